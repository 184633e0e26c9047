"""Updates: hooks, the step of the optimizer, its learning rates and its schedule; or why an update is not made."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.nn import Parameter
from torch.optim import Optimizer

from emrun.base.finite import as_number, is_finite, not_finite
from emrun.base.types import EpochData, State
from emrun.base.wording import few, size_of
from emrun.hook import Loop, TrainingAborted, UpdateSkipped
from emrun.models.optimizers.named import Optimizers
from emrun.models.optimizers.scheduled import Foreign, ScheduledOptimizer
from emrun.models.step.gradients import GradientsToClear, all_parameters, clear_gradients, exhaust
from emrun.models.step.skipped_updates import SkippedUpdates
from emrun.ranks.parts import weighs_nothing
from emrun.schedule_plan import log_plan

_LOG = logging.getLogger(__name__)

Closure = Callable[[], Tensor]
"""Calculates the loss and its gradients for an optimizer that needs them several times for an update, as LBFGS does."""

_not_looked_at = partial(operator.is_not, object())  # returns True for any loss


class Updater:
    """Makes the updates of all kinds of steps, and clears gradients before a step.

    Args:
        model: the `TorchModel`, which hooks get with each update.
        optimizers: the optimizers.
        skipped: counts the updates that are skipped.
    """

    def __init__(self, model: Any, optimizers: Optimizers, skipped: SkippedUpdates) -> None:
        self.optimizers = optimizers
        self.skipped = skipped
        self.scheduled: list[ScheduledOptimizer] = []
        """Those whose schedules step after each window, whether it has one update of theirs, several or none."""
        self.has_updated = False
        """Whether an update was made, or begun, since the gradients were last cleared."""
        self.to_clear = GradientsToClear([], [])
        """The gradients that are cleared before a step."""
        self._parameters: Sequence[Parameter] = []  # those of the module at the beginning of the train stream
        self._owners: dict[Optimizer, ScheduledOptimizer] = {}
        self._foreign: dict[Optimizer, ScheduledOptimizer] = {}  # those that only a subclass of the model knows
        self.can_use: Callable[[Any], bool] = _not_looked_at
        """Returns whether an update may be made with a loss."""
        # whom an update is told
        self._model = model
        self._loop: Loop | None = None
        self._before: Callable[..., None] | None = None  # called before and after an update, if a hook listens
        self._after: Callable[..., None] | None = None

    def __getstate__(self) -> State:
        """Return what a deep copy of the model gets: nobody listens to it."""
        return {**vars(self), "_before": None, "_after": None}

    def register(self, loop: Loop) -> None:
        """Belong to a loop, whose hooks may listen to the updates."""
        self._loop = loop

    def begin_stream(self, stream: str) -> None:
        """Prepare for the batches of a train stream.

        Args:
            stream: the name of the stream.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        model = self._model
        loop = self._loop
        optimizers = self.optimizers
        self.skipped.begin_stream(stream)
        # the parameters, and whose schedules step
        self._parameters = all_parameters(model.module)
        self.list_optimizers()
        self.scheduled = [
            each
            for each in optimizers.members
            if each.phases is not None or (each.scheduler is not None and each.scheduler.on_update)
        ]
        # the hooks of an update
        self._before = self._notifying("before_update")
        self._after = self._notifying("after_update")
        # which losses are refused
        self.can_use = _not_looked_at
        waits = not all(each.is_cpu for each in self._parameters)  # for a device, to read a loss
        if loop is not None and loop.on_nan_loss == "error" and not waits:
            self.can_use = is_finite if model.trains_itself else math.isfinite
        # the warnings, the plan and the optimizers
        optimizers.warn_of_untrained(model.module)
        if optimizers.is_plan_due:
            log_plan(optimizers.plan(loop))
        for member in optimizers.members:
            member.begin_stream(loop)

    def _notifying(self, event: str) -> Callable[..., None] | None:
        """Return what calls the hooks that listen to an event; None if there are none."""
        loop = self._loop
        return partial(loop.notify, event) if loop is not None and loop.listens(event) else None

    def list_optimizers(self) -> None:
        """Note which optimizers there are, and whose gradients are cleared before a step."""
        self._owners = self.optimizers.owners()
        for member in self._owners.values():
            member.renew_step()
        self.to_clear = GradientsToClear(self._parameters, list(self._owners))

    def clear(self) -> None:
        """Clear the gradients, before a step or a window."""
        self.has_updated = False
        to_clear = self.to_clear
        if [*map(len, to_clear.groups)] != to_clear.counts:  # a hook has added some
            to_clear = self.to_clear = GradientsToClear(self._parameters, list(self._owners))
        exhaust(to_clear.gradients())
        for clear in to_clear.more:
            clear()

    def clear_known(self) -> None:
        """Clear the gradients, if no hook can have added groups of parameters."""
        self.has_updated = False
        exhaust(self.to_clear.gradients())
        if self.to_clear.more:
            self.clear()

    def forget(self) -> None:
        """Forget the last update: a batch has failed before its step."""
        self.has_updated = False

    def note_rates(self) -> None:
        """Note the learning rates of the only optimizer, which the batches of a window have before its update."""
        if self.optimizers.only is not None and self.optimizers.only.optimizer is not None:
            self.optimizers.only.note_rates()

    def member_of(self, optimizer: Optimizer | str | None) -> ScheduledOptimizer:
        """Return an optimizer, given by itself or by its name, with its schedule.

        Raises:
            ArgumentError: there is no such optimizer.
        """
        optimizer = self.optimizers.named(optimizer)
        if optimizer in self._owners:
            return self._owners[optimizer]
        if optimizer not in self._foreign:
            self._foreign[optimizer] = Foreign(optimizer)
        return self._foreign[optimizer]

    def update(
        self, member: ScheduledOptimizer, loss: Any, closure: Closure | None = None, reason: str | None = None
    ) -> None:
        """Make an update with the current gradients; hooks are called before and after.

        Args:
            member: the optimizer, with its schedule.
            loss: the loss that was minimised.
            closure: calculates the gradients, for an optimizer that needs it; see `TorchModel.update`.
            reason: why the update is skipped; None if it is not.

        Raises:
            ArgumentError: there is no optimizer.
            TrainingAborted: the loss is not finite.
        """
        if member.bare_step is None:
            self._make_first(member, loss, closure, reason)
            return
        optimizer: Any = member.optimizer
        if self._before is not None:
            try:
                self._before(model=self._model, optimizer=optimizer)
            except UpdateSkipped as error:
                reason = reason or error.reason
        member.note_rates()  # before a hook or the scheduler changes them
        if reason is not None:
            loop = self._loop
            self.skipped.add(reason, loop.updates_done + 1 if loop is not None else None, member.name)
            clear_gradients(optimizer)
            return
        if not self.can_use(loss):
            self.refuse(loss)
        self.has_updated = True
        if closure is not None:
            optimizer.step(closure)
        elif any(member.bare_step.hooks) or _profiler_enabled():
            optimizer.step()
        else:
            member.bare_step.call(optimizer)
        if self._after is not None:
            self._after(model=self._model, optimizer=optimizer)

    def _make_first(self, member: ScheduledOptimizer, loss: Any, closure: Closure | None, reason: str | None) -> None:
        """Make the first update of an optimizer, with its checks."""
        self.optimizers.named(member.optimizer)  # raises the error if there is none
        member.begin_first_update(self._model.module)
        self.update(member, loss, closure, reason)
        if self._loop is not None and self._loop.has_run:
            member.check_loadable()  # most optimizers begin to keep something with their first update
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                _LOG.info(
                    "most memory used on the GPU by the first update: %s", size_of(torch.cuda.max_memory_allocated())
                )

    @property
    def may_be_skipped(self) -> bool:
        """Whether a hook may skip an update."""
        return self._before is not None

    def refuse(self, loss: Any) -> None:
        """Refuse an update with a loss that is not finite, unless the examples of the batch all have the weight 0.

        Raises:
            TrainingAborted: the loss is one of examples that count.
        """
        if self._loop is not None and not weighs_nothing(self._model.step_outputs or {}):
            iteration = self._loop.iterations_done + 1  # of this batch, which is not counted yet
            raise TrainingAborted(f"{not_finite(as_number(loss), iteration)}, so no update is made with it")

    def step_schedules(self) -> None:
        """Step the schedules that step after each window."""
        for member in self.scheduled:
            member.step_schedule()

    def end_epoch(self, epoch_data: EpochData) -> None:
        """Step schedulers that step after each training epoch; log which optimizers and updates were left out."""
        optimizers = self.optimizers
        optimizers.warn_of_untrained(self._model.module)  # once more: code of the user may have replaced parameters
        self.skipped.report()
        members = optimizers.members
        late = [member.name for member in members if member.bare_step is None]
        if self._loop is not None and self._loop.training_epochs_done == 1 and 0 < len(late) < len(members):
            _LOG.warning(
                "no update of %s in this epoch; if this is a mistake, call self.update(%r) in train_step",
                few([f"the optimizer {name!r}" for name in late]),
                late[0],
            )
        for member in members:
            member.end_epoch(epoch_data)
        self._foreign = {}  # those that a subclass has made for a few steps
