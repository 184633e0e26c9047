"""Subclasses that train in their own way: the first window of `train_step`, and how it runs in 16 bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.precision import Autocast, in_float32
from emrun.models.step.micro_batches import MicroBatches
from emrun.models.step.plain import Closure, Parameters, Plain, TrainStep
from emrun.ranks.group import ranks

_LOG = logging.getLogger(__name__)


class FirstWindow:
    """Stands for `train_step` of a model during its first window; then it is gone, so that no later step is slower.

    Args:
        model: a `TorchModel`, whose file needs this one.

    Raises:
        ArgumentError: `train_step` does not return outputs, or the window ends without an update although the model
            has an optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._left = model.iterations_per_update
        self._asked = False  # whether `update` was called
        self._has_gradients = ranks().several  # whether an update had any; a rank without rows has none
        self._held: dict[Optimizer, dict[Tensor, int]] = {}  # before the update of another optimizer

    def __call__(self, inputs: Tensors) -> Values:
        """Call `train_step` of the class, and check what the step has done."""
        model = self._model
        if "train_step" not in vars(model):
            return type(model).train_step(model, inputs)  # type: ignore[no-any-return]
        name = f"{type(model).__name__}.train_step"
        self._held = {}
        model.update = model._update = partial(self._update, model.update)
        try:
            outputs: Any = type(model).train_step(model, inputs)
        finally:
            del model.update
            model._update = model.update
        if not isinstance(outputs, Mapping):
            what = "nothing" if outputs is None else f"a {type(outputs).__name__}"
            raise ArgumentError("class", f"{name} returned {what}; end it with `return outputs`, a mapping of names")
        self._left -= 1
        has_trained = self._asked and self._has_gradients
        if not has_trained and self._left <= 0 and model.own_optimizers:
            count = model.iterations_per_update
            window = "batch" if count == 1 else f"{count} batches"
            what = "updates without gradients" if self._asked else "no update"
            raise ArgumentError(
                "class",
                f"{name} has made {what} in its first {window}; call self.update(self.optimizer), not "
                "optimizer.step(), after self.backward(loss), or set model.accumulate to the number of batches of an "
                "update",
            )
        if has_trained or self._left <= 0:
            vars(model).pop("train_step", None)  # a window of several parts still has it
        return outputs

    def _update(self, update: Any, optimizer: Optimizer | str | None, *args: Any, **kwargs: Any) -> None:
        """Make an update; warn if its gradients stem from before and after the update of another optimizer."""
        self._asked = True
        self._model._loadable.check()
        named = self._model.own_optimizers
        own = named.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
        self._has_gradients |= bool(args or kwargs) or any(each.grad is not None for each in parameters_of(own))
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
        update(optimizer, *args, **kwargs)


class Own:
    """Another step, for a `train_step` that may call `backward` of the loss itself.

    Args:
        model: a `TorchModel`, whose file needs this one.
        step: the other step.
    """

    def __init__(self, model: Any, step: Plain | MicroBatches | InAutocast) -> None:
        self._model = model
        self._step = step
        self.backward = step.backward
        self.update = step.update

    def run(self, train_step: TrainStep, inputs: Tensors, batch: Batch) -> Values:
        """Run the train step on a batch, or on each of its parts."""
        model = self._model
        model._minimised = None
        outputs = self._step.run(train_step, inputs, batch)
        loss = outputs.get("loss")
        if model._minimised is None and isinstance(loss, Tensor) and not loss.dim():
            model._minimised = loss.detach()
        return outputs


class InAutocast:
    """Another step, whose `train_step` runs in 16 bits, except for gradients and updates.

    Args:
        step: the other step.
        autocast: the precision.
    """

    def __init__(self, step: Plain | MicroBatches, autocast: Autocast) -> None:
        self._step = step
        self._autocast = autocast

    def run(self, train_step: TrainStep, inputs: Tensors, batch: Batch) -> Values:
        """Run the train step on a batch, or on each of its parts."""
        return self._step.run(partial(self._autocast.call, train_step), inputs, batch)

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Calculate gradients without autocast."""
        with self._autocast.off():
            self._step.backward(in_float32(loss), of)
        torch.clear_autocast_cache()

    def update(self, optimizer: Any, closure: Closure | None = None) -> None:
        """Make an update without autocast."""
        with self._autocast.off():
            self._step.update(optimizer, None if closure is None else partial(self._evaluate, closure))
        torch.clear_autocast_cache()  # which has the weights as they were

    def _evaluate(self, closure: Closure) -> Tensor:
        torch.clear_autocast_cache()
        with self._autocast.on():
            return closure()
