"""The step of windows: an update has the gradients of several batches, of the parts of a batch, or of all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.sources import examples_of
from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.step.gradients import divide_gradients
from emrun.models.step.plain import NOT_FINITE, Closure, Parameters, Plain, TrainStep, backward, refuse_closure
from emrun.ranks.parts import weighs_nothing


class Windows(Plain):
    """Adds up gradients, and makes the updates at the end of a window.

    The gradients of a window are those of the mean loss over its examples: the loss of each part is multiplied by the
    weight of the part, and at the update the gradients are divided by the weight of the window, which nobody needs to
    know before.

    Args:
        accumulate: the number of batches of a window.
    """

    count = staticmethod(examples_of)
    """Returns the number of examples of a batch."""

    def __init__(self, *arguments: Any, accumulate: int) -> None:
        super().__init__(*arguments)
        self._accumulate = accumulate
        self.weight: float | Tensor = 1.0
        """The weight of the current part in its window: its number of examples, or the sum of their weights."""
        self.left = accumulate
        """The number of batches, and of further parts of them, that the window still gets."""
        self._pending: dict[Optimizer | None, float | Tensor] = defaultdict(float)
        """The optimizers to step at the end of the window, and the weights of their gradients."""
        self._noted: list[Any] = []  # whose learning rates are noted when a window begins
        self._asked: set[Optimizer] = set()  # those whose update the current part has asked for
        self._ended: set[Optimizer | None] = set()  # those whose update was skipped in an open window

    def run(self, train_step: TrainStep, inputs: Tensors, batch: Batch) -> Values:
        """Run the train step on a batch: the first one clears the gradients, the last one makes the updates.

        A part of a batch is run in the same way; `left` has counted it before.
        """
        if not self.is_open:
            self.clear()
            self.is_open = True
            for own in self._noted:  # for the batches before the update
                own.note_rates()
        self.left -= 1
        if self._asked:
            self._asked.clear()
        self.weight = float(self.count(batch))
        outputs = train_step(inputs)
        if not self.left:
            self.finish()
        return outputs

    @property
    def is_ending(self) -> bool:
        """Whether the window ends with the current part."""
        return not self.left

    def list_optimizers(self) -> None:
        """Note which optimizers there are."""
        super().list_optimizers()
        self._noted = [] if self._accumulate == 1 or self._optimizers.only is None else list(self._owners.values())

    def look(self, outputs: Values, name: str = "example_weight") -> None:
        """Take the sum of the examples' weights, if they have any, for the weight of the current part."""
        if name in outputs and isinstance(weights := outputs[name], Tensor) and self.weight:
            self.weight = weights.detach().sum()

    def look_at_loss(self, outputs: Values) -> None:
        """Take the weights of the loss alone; for a stream whose first batch has them."""
        self.look(outputs, "loss_weight" if "loss_weight" in outputs else "example_weight")

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted loss to those of some parameters; of all by default."""
        backward(loss * self.weight, of)

    def update(self, optimizer: Any, closure: Closure | None = None, reason: str | None = None) -> None:
        """Note that the window makes an update at its end; make it now if this is the last part.

        Raises:
            ArgumentError: there is no such optimizer, or a window gets two updates of it.
        """
        key = "accumulate" if self._accumulate > 1 else "micro_batch_size"
        refuse_closure(closure, key)
        optimizer = self._optimizers.named(optimizer)
        if optimizer in self._asked:
            name = next((each.name for each in self._optimizers.members if each.optimizer is optimizer), "")
            given = repr(name) if name else ""
            raise ArgumentError(
                key,
                f"train_step calls update({given}) twice for a batch, but an optimizer makes "
                "one update for all parts of a window; call it once, or remove the key",
            )
        self._asked.add(optimizer)
        self.note(optimizer)

    def note(self, optimizer: Optimizer | None) -> None:
        """Note, once for each part, that the window makes an update; make it now if this is the last part."""
        self._pending[optimizer] += self.weight
        if not self.left:
            self._make(optimizer)
        elif not self._can_use(self._model._minimised):
            self._end_early(optimizer)

    def _end_early(self, optimizer: Optimizer | None) -> None:
        """Make the update of a window now, with a loss that is not finite: hooks may skip it, otherwise it is refused.

        So the step that fails, or is skipped, is that of the batch with this loss.
        """
        if self._skipped.scale is None and not weighs_nothing(self._model.step_outputs or {}):
            self._make(optimizer)
            self._pending[optimizer] = 0.0
            self._ended.add(optimizer)

    def _make(self, optimizer: Optimizer | None) -> None:
        if optimizer in self._ended:
            self._ended.remove(optimizer)
            del self._pending[optimizer]
            return
        if optimizer is None:
            optimizer = self._optimizers.named(None)  # raises the error
        self.is_skipping = not self.complete(optimizer, self._pending.pop(optimizer))
        Plain.update(self, optimizer, None, NOT_FINITE if self.is_skipping else None)

    def complete(self, optimizer: Optimizer, weight: float | Tensor) -> bool:
        """Make the gradients those of the mean loss of the window; return whether they can be used."""
        divide_gradients(optimizer, weight)
        return True

    def finish(self) -> None:
        """End the window: make the updates that are due."""
        self.is_open = False
        self.left = self._accumulate
        while self._pending:
            self._make(next(iter(self._pending)))
        self.step_schedules()

    def forget(self) -> None:
        """Clear the gradients, and forget a window that has begun."""
        super().forget()
        self.is_open = False
        self.left = self._accumulate
        self._pending.clear()
        self._ended.clear()
