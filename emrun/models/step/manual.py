"""The `train_step` of a subclass: the precision in which it runs, and what its first window is checked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.types import Values
from emrun.models.modes import Tensors
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.precision import Autocast, in_float32
from emrun.models.step.updater import Closure
from emrun.ranks.group import ranks

_LOG = logging.getLogger(__name__)

Run = Callable[[Tensors], Values]
"""Runs a batch, or a part of one: source -> tensor; returns the outputs."""


class FirstWindow:
    """Watches a `train_step` during its first window, for what a beginner forgets.

    Args:
        model: the model, an object of the subclass.
        check_weights: called before an update; raises an error if a resume could not load the weights.
        sees_updates: whether each update is noted here: the subclass has no `update` of its own, which may make the
            update by itself.
    """

    def __init__(self, model: Any, check_weights: Callable[[], None], *, sees_updates: bool) -> None:
        self._model = model
        self._check_weights = check_weights
        self._sees_updates = sees_updates
        self._versions: dict[Tensor, int] | None = None  # of parameters at the beginning, if updates are not seen
        self._left = model.iterations_per_update
        self._asked = False  # whether `update` was called
        self._has_gradients = ranks().several  # whether an update had any; a rank without rows has none
        self._held: dict[Optimizer, dict[Tensor, int]] = {}  # before the update of another optimizer

    def begin(self) -> None:
        """Begin with a batch, or with a part of one."""
        self._held = {}
        if not self._sees_updates and self._versions is None:
            trained = parameters_of(*self._model.own_optimizers.values())
            self._versions = {parameter: parameter._version for parameter in trained}

    def end(self, outputs: Any) -> bool:
        """End a batch, or a part of one; return whether the window is over.

        Raises:
            ArgumentError: `train_step` does not return outputs, or the window ends without an update although the model
                has an optimizer.
        """
        name = f"{type(self._model).__name__}.train_step"
        if not isinstance(outputs, Mapping):
            what = "nothing" if outputs is None else f"a {type(outputs).__name__}"
            raise ArgumentError("class", f"{name} returned {what}; end it with `return outputs`, a mapping of names")
        self._left -= 1
        has_changed = any(parameter._version != version for parameter, version in (self._versions or {}).items())
        has_trained = has_changed or (self._asked and self._has_gradients)
        if not has_trained and self._left <= 0 and self._model.own_optimizers:
            batches = self._model.iterations_per_update
            window = "batch" if batches == 1 else f"{batches} batches"
            what = "updates without gradients" if self._asked else "no update"
            raise ArgumentError(
                "class",
                f"{name} has made {what} in its first {window}; call self.update(self.optimizer), not "
                "optimizer.step(), after self.backward(loss), or set model.accumulate to the number of batches of an "
                "update",
            )
        return has_trained or self._left <= 0

    def note_update(self, optimizer: Any, *, has_closure: bool) -> None:
        """Look at an update before it is made; warn of gradients from both sides of the update of another optimizer."""
        self._asked = True
        self._check_weights()
        self._has_gradients |= has_closure or any(each.grad is not None for each in parameters_of(optimizer))
        named = self._model.own_optimizers
        if any(gradient._version != version for gradient, version in self._held.pop(optimizer, {}).items()):
            name = next((name for name, each in named.items() if each is optimizer), "")
            _LOG.warning(
                "the optimizer %s uses gradients from before and after the update of another optimizer; if this is a "
                "mistake, give backward the optimizer: self.backward(loss, optimizer=%r)",
                name,
                name,
            )
        for other in named.values():
            if other is not optimizer:
                self._held[other] = {
                    each.grad: each.grad._version for each in parameters_of(other) if each.grad is not None
                }


class Manual:
    """Calls the `train_step` of a subclass, and makes the gradients and updates that it asks for.

    With a precision of 16 bits, `train_step` runs in autocast as a whole, except for gradients and updates.

    Args:
        train_step: the method, bound to the model.
        autocast: the precision; None in 32 bits.
        first_window: watches its first window; None if only `update` is the subclass's own.
    """

    def __init__(self, train_step: Run, autocast: Autocast | None, first_window: FirstWindow | None) -> None:
        self._autocast = autocast
        self.replace(train_step)
        self._first_window = first_window
        self._asked: set[ScheduledOptimizer] = set()  # those whose update the current part has asked for

    def replace(self, train_step: Run) -> None:
        """Call another function from now on."""
        self._call = train_step if self._autocast is None else partial(self._autocast.call, train_step)

    def __call__(self, inputs: Tensors) -> Values:
        """Call `train_step` with the tensors of a batch, or of a part of one."""
        self._asked.clear()
        if self._first_window is None:
            return self._call(inputs)
        self._first_window.begin()
        outputs = self._call(inputs)
        if self._first_window.end(outputs):
            self._first_window = None
        return outputs

    def has_asked(self, member: ScheduledOptimizer) -> bool:
        """Return whether the current part has asked for an update of an optimizer before; note that it has now."""
        has_asked = member in self._asked
        self._asked.add(member)
        return has_asked

    def backward(self, add: Callable[..., None], loss: Tensor, of: Any) -> None:
        """Calculate gradients, without autocast."""
        with self._without_autocast():
            add(loss if self._autocast is None else in_float32(loss), of)

    def update(
        self,
        ask: Callable[[ScheduledOptimizer, Closure | None], None],
        member: ScheduledOptimizer,
        closure: Closure | None,
    ) -> None:
        """Make an update, without autocast; the closure runs in autocast."""
        if self._first_window is not None:
            self._first_window.note_update(member.optimizer, has_closure=closure is not None)
        if closure is not None and self._autocast is not None:
            closure = partial(self._evaluated, self._autocast, closure)
        with self._without_autocast():
            ask(member, closure)

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        if self._autocast is None:
            yield
            return
        with self._autocast.off():
            yield
        torch.clear_autocast_cache()  # which has the weights as they were

    @staticmethod
    def _evaluated(autocast: Autocast, closure: Closure) -> Tensor:
        torch.clear_autocast_cache()
        with autocast.on():
            return closure()
