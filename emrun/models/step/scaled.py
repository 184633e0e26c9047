"""The steps in float16: the loss is scaled, because small gradients would become zero otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.step.gradients import divide_gradients
from emrun.models.step.loss_scale import LossScale
from emrun.models.step.plain import NOT_FINITE, Closure, Parameters, Plain, TrainStep, backward, refuse_closure
from emrun.models.step.windows import Windows


class _WithScale(Plain):
    """Has a scale of the loss, which is forgotten with the gradients.

    Args:
        scale: the scale of the loss.
    """

    def __init__(self, *arguments: Any, scale: LossScale, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._scale = scale

    def clear(self) -> None:
        """Clear the gradients."""
        super().clear()
        self._scale.clear()


class Scaled(_WithScale):
    """Makes an update with each batch, with a scaled loss."""

    def run(self, train_step: TrainStep, inputs: Tensors, batch: Batch) -> Values:
        """Run the train step on a batch."""
        outputs = super().run(train_step, inputs, batch)
        self._scale.end()
        return outputs

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the scaled loss to those of some parameters; of all by default."""
        backward(self._scale.scaled(loss), of)

    def update(self, optimizer: Any, closure: Closure | None = None, reason: str | None = None) -> None:
        """Make an update with the gradients, unless one is not finite."""
        refuse_closure(closure, "precision", "fp16")
        optimizer = self._optimizers.named(optimizer)
        self.is_skipping = not self._scale.unscale(optimizer)
        super().update(optimizer, reason=NOT_FINITE if self.is_skipping else reason)


class ScaledWindows(_WithScale, Windows):
    """Adds up the gradients of scaled losses, and divides them by the scale and by the weight of the window."""

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted and scaled loss to those of some parameters; of all by default."""
        backward(self._scale.scaled(self._scale.weighted(loss, self.weight)), of)

    def complete(self, optimizer: torch.optim.Optimizer, weight: float | Tensor) -> bool:
        """Make the gradients those of the mean loss of the window; return whether all of them are finite."""
        is_finite = self._scale.unscale(optimizer)
        unit = self._scale.unit
        divide_gradients(optimizer, weight if unit is None else weight / unit)
        return is_finite

    def step_schedules(self) -> None:
        """Step the schedules at the end of a window, and change the scale."""
        self._scale.end()
        super().step_schedules()
