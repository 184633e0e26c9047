"""The steps on several ranks: the gradients of all ranks are summed, and divided by the weight of their examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import StreamError
from emrun.base.types import Batch, Values
from emrun.models.forward_pass import ForwardPass
from emrun.models.modes import Tensors, in_mode
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.step.accumulated import AccumulatedStep
from emrun.models.step.gradient_sums import EMPTY, GradientSums
from emrun.models.step.single import refuse_closure
from emrun.models.step.training_step import Calls, Check, Parameters, backward
from emrun.models.step.updater import Closure, Updater
from emrun.ranks.gather import prepare as prepare_to_gather
from emrun.ranks.group import Ranks
from emrun.ranks.parts import Weight, weighted
from emrun.ranks.shares import rows_in


class RankSums:
    """What ranks exchange in a step: the sums of the gradients of each optimizer, and the mean of their losses.

    Args:
        forward_pass: has the module, which a rank without rows runs in evaluation mode.
        ranks: the ranks.
        carries_loss: whether the sums of an update also have the loss: if a window has one part.
        sends: whether the gradients of the only optimizer may be sent while others are calculated: several optimizers,
            and a subclass that trains in its own way, could send in another order on each rank.
        exchanges: whether forward and backward exchange messages, so that a rank without rows runs both, too.
    """

    def __init__(
        self, forward_pass: ForwardPass, ranks: Ranks, *, carries_loss: bool, sends: bool, exchanges: bool
    ) -> None:
        self.forward_pass = forward_pass
        self.ranks = ranks
        self.carries_loss = carries_loss
        self.exchanges = exchanges
        self.of: dict[Any, Any] = {}
        """Optimizer -> `GradientSums` of its gradients, or `ShardSums`, as soon as they are needed."""
        self.early: GradientSums | None = None
        """The sums whose gradients are sent during the backward pass."""
        self._sends = sends

    def begin_stream(self, only: Optimizer | None) -> None:
        """Prepare for the batches of a train stream.

        Args:
            only: the only optimizer; None if there are several.
        """
        self.early = None
        if self._sends and only is not None:
            sums = self.sums_of(only)
            if isinstance(sums, GradientSums) and sums.is_parted:
                self.early = sums

    def sums_of(self, optimizer: Any) -> Any:
        """Return the sums of the gradients of an optimizer."""
        if optimizer not in self.of:
            self.of[optimizer] = self.new(optimizer)
        return self.of[optimizer]

    def new(self, optimizer: Any) -> Any:
        """Return new sums of the gradients of an optimizer."""
        return GradientSums(parameters_of(optimizer), self.ranks)

    def mean(self, loss: Tensor, weight: Weight) -> Tensor:
        """Return the mean of the losses of all ranks, of shape (); all ranks call this.

        Raises:
            StreamError: no rank has an example.
        """
        own_weight = torch.as_tensor(weight).to(loss)
        has_rows = weight.__class__ is Tensor or weight > 0
        sums = torch.stack([weighted(loss, own_weight), own_weight, torch.as_tensor(has_rows).to(loss)])
        self.ranks.add_up(sums)
        if not has_rows and not sums[2]:  # this waits for the device, on ranks without rows
            raise StreamError(EMPTY)
        return sums[0] / sums[1]


class SummedStep(AccumulatedStep):
    """Sums the gradients of a window over all ranks, and divides them by the weight of the window on all ranks.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
        accumulate: the number of batches of a window.
        sums: what the ranks exchange.
    """

    count = staticmethod(prepare_to_gather)

    def __init__(self, calls: Calls, updater: Updater, accumulate: int, sums: RankSums) -> None:
        super().__init__(calls, updater, accumulate)
        self._sums = sums
        self._exchanges = sums.exchanges
        self._mean_loss: Tensor | None = None  # of the last update, if the sums have it

    def begin_stream(self, check_first: Check) -> None:
        """Prepare for the batches of a train stream."""
        super().begin_stream(check_first)
        only = self.updater.optimizers.only
        self._sums.begin_stream(None if only is None else only.optimizer)

    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Train on the rows of this rank."""
        if self._exchanges or rows_in(batch):
            return super().run(inputs, batch)
        with in_mode(self._sums.forward_pass.module, train=False):  # no statistics of a row that counts nothing
            return super().run(inputs, batch)

    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted loss; those of the last part are sent as they arrive."""
        weight = self.weight
        if weight.__class__ is Tensor or weight or self._exchanges:  # 0.0 of a rank without rows
            if self._sums.early is not None and self.is_ending:
                self._sums.early.begin_backward()
            backward(loss * weight, of)

    def ask(self, member: ScheduledOptimizer, closure: Closure | None) -> None:
        """Note an update that a `train_step` of a subclass asks for; see `AccumulatedStep`."""
        refuse_closure(closure, "optimizer", "several ranks")
        super().ask(member, closure)

    @property
    def checks_parts(self) -> bool:  # type: ignore[override]
        """Whether no hook may skip an update, which all ranks would have to make."""
        return not self.updater.may_be_skipped

    def _end_early(self, member: ScheduledOptimizer) -> None:
        """Refuse an update with a loss that is not finite, unless a hook may skip the update, which all ranks make."""
        if self.checks_parts:
            self.updater.refuse(self.minimised)

    def complete(self, optimizer: Optimizer, weight: Weight) -> bool:
        """Make the gradients those of the mean loss of the window on all ranks."""
        carries_loss = self._sums.carries_loss
        self._mean_loss = self._sums.sums_of(optimizer).reduce(weight, self.minimised if carries_loss else None)
        if carries_loss:
            self.minimised = self._mean_loss  # for hooks of the update
        return True

    def exchange_if(self, gathers: bool) -> None:
        """Note whether the forward of the module gathers rows of all ranks."""
        self._exchanges |= gathers

    def take_mean(self) -> None:
        """Take the mean loss of the current batch on all ranks for the loss of this one; all ranks call this."""
        mean = self._mean_loss
        self._mean_loss = None
        if mean is None and self.minimised is not None:
            mean = self._sums.mean(self.minimised, self.weight)
        self.minimised = mean


class SummedBatchStep(SummedStep):
    """Sums the gradients of each batch, which is a window; `train_step` makes one update, of the only optimizer."""

    is_ending = True

    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Train on the rows of this rank."""
        self.updater.clear_known()
        rows = prepare_to_gather(batch)
        self.weight = float(rows)
        if rows or self._exchanges:
            outputs = self._train(inputs)
        else:
            with in_mode(self._sums.forward_pass.module, train=False):  # no statistics of a row that counts nothing
                outputs = self._train(inputs)
        if self.updater.scheduled:
            self.updater.step_schedules()
        return outputs

    def make(self, member: ScheduledOptimizer, loss: Tensor | None) -> None:
        """Make an update at once, with the mean loss of all ranks."""
        self.minimised = (self._sums.of.get(member.optimizer) or self._sums.sums_of(member.optimizer)).reduce(
            self.weight, loss
        )
        self.updater.update(member, self.minimised)
