"""The steps of single batches: each batch makes an update, as in PyTorch's own loop; in float16 with a scaled loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.step.gradients import clear_gradients
from emrun.models.step.loss_scale import NOT_FINITE, LossScale
from emrun.models.step.training_step import Calls, Parameters, TrainingStep, backward
from emrun.models.step.updater import Closure, Updater


class SingleStep(TrainingStep):
    """Makes an update with each batch."""

    add = staticmethod(backward)

    def __init__(self, calls: Calls, updater: Updater) -> None:
        super().__init__(calls, updater)
        if calls.update is None:
            self._make = updater.update  # as `make`, without a call in between

    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Clear the gradients, train on a batch, and step the schedules."""
        self.updater.clear()
        outputs = self._train(inputs)
        if self.updater.scheduled:
            self.updater.step_schedules()
        return outputs

    def ask(self, member: ScheduledOptimizer, closure: Closure | None) -> None:
        """Make the update that a `train_step` of a subclass asks for."""
        self.updater.update(member, self.minimised, (None if closure is None else evaluated(closure, member.optimizer)))


class ScaledStep(SingleStep):
    """Makes an update with each batch, with a scaled loss.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
        scale: the scale of the loss.
    """

    def __init__(self, calls: Calls, updater: Updater, scale: LossScale) -> None:
        super().__init__(calls, updater)
        self._scale = scale
        if calls.update is None:
            self._make = self.make

    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Train on a batch, and change the scale."""
        self._scale.clear()
        outputs = super().run(inputs, batch)
        self._scale.end()
        return outputs

    def forget(self) -> None:
        """Clear the gradients, and what the scale knows of them."""
        super().forget()
        self._scale.clear()

    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the scaled loss to those of some parameters; of all by default."""
        backward(self._scale.scaled(loss), of)

    def make(self, member: ScheduledOptimizer, loss: Tensor | None) -> None:
        """Make an update with the gradients, unless one is not finite."""
        self.is_skipping = not self._scale.unscale(self.updater.optimizers.named(member.optimizer))
        self.updater.update(member, loss, reason=NOT_FINITE if self.is_skipping else None)

    def ask(self, member: ScheduledOptimizer, closure: Closure | None) -> None:
        """Make the update that a `train_step` of a subclass asks for."""
        refuse_closure(closure, "precision", "fp16")
        self.make(member, self.minimised)


def evaluated(closure: Closure, optimizer: Any) -> Closure:
    """Calculate the gradients of an update, before the hooks get the update; return a closure for the optimizer.

    The optimizer gets these gradients for its first call; each other call clears them and calculates them again.
    """

    def evaluate() -> Tensor:
        clear_gradients(optimizer)
        with torch.enable_grad():
            return closure()

    first = [evaluate()]

    def evaluated_first() -> Tensor:
        return first.pop() if first else evaluate()

    return evaluated_first


def refuse_closure(closure: Closure | None, key: str, value: str = "") -> None:
    """Refuse an update with a closure, of a model that needs the gradients before the optimizer steps.

    Args:
        closure: the closure; None without one.
        key: the key of the config that needs them.
        value: what the key says.

    Raises:
        ArgumentError: there is a closure.
    """
    if closure is not None:
        raise ArgumentError(
            key,
            f"update(optimizer, closure) calculates the loss several times, which cannot be used with {value or key}",
        )
