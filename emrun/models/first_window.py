"""The first window of a subclass that trains in its own way: whether `train_step` does what it must."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.models.optimizer import parameters_of

_LOG = logging.getLogger(__name__)


class FirstWindow:
    """Stands for `train_step` of a model during its first window; then it is gone, so that no later step is slower.

    Args:
        model: a `TorchModel`, whose file needs this one.

    Raises:
        ArgumentError: `train_step` does not return outputs, or the window ends without an update.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._left = model.iterations_per_update
        self._asked = False  # whether `update` was called
        self._held: dict[torch.optim.Optimizer, dict[Tensor, int]] = {}  # before the update of another optimizer

    def __call__(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Call `train_step` of the class, and check what the step has done."""
        model = self._model
        if "train_step" not in vars(model):
            return type(model).train_step(model, inputs)  # type: ignore[no-any-return]
        name = f"{type(model).__name__}.train_step"
        self._held = {}
        model.update = partial(self._update, model.update)
        try:
            outputs: Any = type(model).train_step(model, inputs)
        finally:
            del model.update
        if not isinstance(outputs, Mapping):
            what = "nothing" if outputs is None else f"a {type(outputs).__name__}"
            raise ArgumentError("class", f"{name} returned {what}; end it with `return outputs`, a mapping of names")
        self._left -= 1
        has_updated = self._asked or model.has_updated
        if has_updated is False and self._left <= 0:
            count = model.iterations_per_update
            window = "batch" if count == 1 else f"{count} batches"
            raise ArgumentError(
                "class",
                f"{name} has made no update in its first {window}; call self.update(self.optimizer) after "
                "self.backward(loss), or set model.accumulate to the number of batches of an update",
            )
        if has_updated is not False or self._left <= 0:
            loop = model._main_loop
            if has_updated and not self._asked and loop is not None and loop.listens("before_update"):
                _LOG.warning(
                    "%s steps an optimizer itself, so hooks that listen to updates, such as ClipGradients, do nothing; "
                    "call self.update(self.optimizer)",
                    name,
                )
            vars(model).pop("train_step", None)  # a window of several parts still has it
        return outputs

    def _update(self, update: Any, optimizer: torch.optim.Optimizer | str | None) -> None:
        """Make an update; warn if its gradients stem from before and after the update of another optimizer."""
        self._asked = True
        model = self._model
        attributes = {name: each for name, each in vars(model).items() if isinstance(each, torch.optim.Optimizer)}
        named = {**attributes, **model.optimizers}
        own = named.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
        held = self._held.pop(own, {})  # type: ignore[arg-type]
        if any(gradient._version != version for gradient, version in held.items()):
            name = next((name for name, each in named.items() if each is own), "")
            _LOG.warning(
                "the optimizer %s uses gradients from before and after the update of another optimizer; if this is a "
                "mistake, give backward the optimizer: self.backward(loss, optimizer=%r)",
                name,
                name,
            )
        for each in named.values():
            if each is not own:
                gradients = [parameter.grad for parameter in parameters_of(each) if parameter.grad is not None]
                self._held[each] = {gradient: gradient._version for gradient in gradients}
        update(optimizer)
