"""The steps of windows: an update has the gradients of several batches, or of the parts of a batch."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.sources import examples_of
from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.step.gradients import divide_gradients
from emrun.models.step.loss_scale import NOT_FINITE, LossScale
from emrun.models.step.single import refuse_closure
from emrun.models.step.training_step import Calls, Check, Parameters, TrainingStep, backward
from emrun.models.step.updater import Closure, Updater
from emrun.ranks.parts import Joined, Weight, weighs_nothing, weight_of


class AccumulatedStep(TrainingStep):
    """Adds up gradients, and makes the updates at the end of a window.

    The gradients of a window are those of the mean loss over its examples: the loss of each part is multiplied by the
    weight of the part, and at the update the gradients are divided by the weight of the window, which nobody needs to
    know before.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
        accumulate: the number of batches of a window.
    """

    weighs_examples = True
    checks_parts = True
    """Whether an update whose loss cannot be used is refused, or skipped, at the part with this loss."""
    count = staticmethod(examples_of)
    """Returns the number of examples of a batch."""

    def __init__(self, calls: Calls, updater: Updater, accumulate: int) -> None:
        super().__init__(calls, updater)
        self._accumulate = accumulate
        self.weight: Weight = 1.0
        """The weight of the current part in its window: its number of examples, or the sum of their weights."""
        self._left = accumulate  # the number of batches, and of further parts of them, that the window still gets
        self._weight_name = "example_weight"  # the output that has the weights of examples
        self._pending: dict[ScheduledOptimizer, Weight] = defaultdict(float)
        """The optimizers to step at the end of the window, and the weights of their gradients."""
        self._ended: set[ScheduledOptimizer] = set()  # those whose update was skipped in an open window
        self._joined: Joined | None = None  # the outputs of the parts of the current batch that were run

    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Train on a batch: the first one clears the gradients, the last one makes the updates.

        A part of a batch is run in the same way; `expect_part` has counted it before.
        """
        if not self.is_open:
            self.clear()
            self.is_open = True
            if self._accumulate > 1:
                self.updater.note_rates()  # for the batches before the update
        self._left -= 1
        self.weight = float(self.count(batch))
        outputs = self._train(inputs)
        if not self._left:
            self.finish()
        return outputs

    @property
    def is_ending(self) -> bool:
        """Whether the window ends with the current part."""
        return not self._left

    def clear(self) -> None:
        """Clear the gradients, at the beginning of a window."""
        self.updater.clear()

    # the parts of a batch

    def expect_part(self) -> None:
        """Expect a part of a batch, after the next one."""
        self._left += 1

    def begin_parts(self, joined: Joined) -> None:
        """Begin with the parts of a batch, whose outputs are joined."""
        self.updater.forget()
        self.minimised = None
        self._joined = joined
        self._looks = True

    def take_loss(self) -> Tensor | None:
        """Return the minimised loss of the last part, if there is one, and forget it."""
        loss = self.minimised
        self.minimised = None
        return loss

    def end_parts(self) -> None:
        """Forget the outputs of the parts of a batch."""
        self._joined = None

    def take_batch(self, loss: Tensor | None, weight: Weight) -> None:
        """Take the loss and the weight of a batch of several parts, for the mean of ranks."""
        self.minimised = loss
        self.weight = weight

    # the weights

    def _begin_batches(self, outputs: Values, check_first: Check) -> None:
        """Look at all that the first batch of a stream shows: an output `loss_weight` replaces `example_weight`."""
        if "loss_weight" in outputs:
            self._weight_name = "loss_weight"
        super()._begin_batches(outputs, check_first)
        self._looks |= self._joined is not None

    def weigh(self, outputs: Values) -> None:
        """Take the sum of the examples' weights, if they have any, for the weight of the current part.

        At the end of a window, hooks get the outputs of all parts of a batch, detached, not only those of the last one.
        """
        weights = outputs.get(self._weight_name, outputs.get("example_weight"))
        if isinstance(weights, Tensor) and self.weight:
            self.weight = weights.detach().sum()
        if self._joined is not None and self.is_ending:
            self.outputs = self._joined.with_last(outputs, weight_of(outputs, self._joined.counts[-1]))

    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted loss to those of some parameters; of all by default."""
        backward(loss * self.weight, of)

    # the updates

    def make(self, member: ScheduledOptimizer, loss: Tensor | None) -> None:
        """Note, once for each part, that the window makes an update; make the update if this is the last part."""
        self._pending[member] += self.weight
        if not self._left:
            self._complete_update(member)
        elif not self.updater.can_use(loss):
            self._end_early(member)

    def ask(self, member: ScheduledOptimizer, closure: Closure | None) -> None:
        """Note an update that a `train_step` of a subclass asks for; see `make`.

        Raises:
            ArgumentError: a window gets two updates of the optimizer.
        """
        key = "accumulate" if self._accumulate > 1 else "micro_batch_size"
        refuse_closure(closure, key)
        if self._manual is not None and self._manual.has_asked(member):
            raise ArgumentError(
                key,
                f"train_step calls update({repr(member.name) if member.name else ''}) twice for a batch, but an "
                "optimizer makes one update for all parts of a window; call it once, or remove the key",
            )
        self.make(member, self.minimised)

    def _end_early(self, member: ScheduledOptimizer) -> None:
        """Make the update of a window now, with a loss that is not finite: hooks may skip it, otherwise it is refused.

        So the step that fails, or is skipped, is that of the batch with this loss.
        """
        if not weighs_nothing(self.outputs or {}):
            self._complete_update(member)
            self._pending[member] = 0.0
            self._ended.add(member)

    def _complete_update(self, member: ScheduledOptimizer, *, is_checked: bool = False) -> None:
        """Make the update of a window; its loss is looked at unless that of each of its parts has been."""
        if member in self._ended:
            self._ended.remove(member)
            del self._pending[member]
            return
        optimizer = member.optimizer
        if optimizer is None:
            optimizer = self.updater.optimizers.named(None)  # raises the error
        self.is_skipping = not self.complete(optimizer, self._pending.pop(member))
        self.updater.update(
            member, (0.0 if is_checked else self.minimised), None, NOT_FINITE if self.is_skipping else None
        )

    def complete(self, optimizer: Optimizer, weight: Weight) -> bool:
        """Make the gradients those of the mean loss of the window; return whether they can be used."""
        divide_gradients(optimizer, weight)
        return True

    def finish(self) -> None:
        """End the window: make the updates that are due."""
        self.is_open = False
        self._left = self._accumulate
        while self._pending:
            self._complete_update(next(iter(self._pending)), is_checked=self.checks_parts)
        self.updater.step_schedules()

    def forget(self) -> None:
        """Clear the gradients, and forget a window that has begun."""
        self.outputs = None
        self.clear()
        self.is_open = False
        self._left = self._accumulate
        self._pending.clear()
        self._ended.clear()


class AccumulatedScaledStep(AccumulatedStep):
    """Adds up the gradients of scaled losses, and divides them by the scale and by the weight of the window.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
        accumulate: the number of batches of a window.
        scale: the scale of the loss.
    """

    def __init__(self, calls: Calls, updater: Updater, accumulate: int, scale: LossScale) -> None:
        super().__init__(calls, updater, accumulate)
        self._scale = scale

    def clear(self) -> None:
        """Clear the gradients, and what the scale knows of them."""
        super().clear()
        self._scale.clear()

    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted and scaled loss to those of some parameters; of all by default."""
        backward(self._scale.scaled(self._scale.weighted(loss, self.weight)), of)

    def _end_early(self, member: ScheduledOptimizer) -> None:
        """Wait for the end of the window, where gradients that are not finite change the scale."""

    def complete(self, optimizer: Optimizer, weight: Weight) -> bool:
        """Make the gradients those of the mean loss of the window; return whether all of them are finite."""
        is_finite = self._scale.unscale(optimizer)
        unit = self._scale.unit
        divide_gradients(optimizer, weight if unit is None else weight / unit)
        return is_finite

    def finish(self) -> None:
        """End the window, and change the scale."""
        super().finish()
        self._scale.end()
