"""The plain step: each batch makes an update, with its hooks and its schedule."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.nn import Parameter

from emrun.base.errors import ArgumentError
from emrun.base.finite import as_number, is_finite, not_finite
from emrun.base.types import Batch, EpochData, State, Values
from emrun.base.wording import few, size_of
from emrun.hook import TrainingAborted, UpdateSkipped
from emrun.models.modes import Tensors
from emrun.models.optimizers.named import Optimizers
from emrun.models.optimizers.scheduled import FOREIGN, ScheduledOptimizer
from emrun.models.step.gradients import Cleared, all_parameters, clear_gradients, exhaust
from emrun.models.step.skipped_updates import SkippedUpdates
from emrun.ranks.parts import weighs_nothing
from emrun.schedule_plan import log_plan

_LOG = logging.getLogger(__name__)
NOT_FINITE = "gradients in float16 are not finite, so the scale of the loss is reduced"

TrainStep = Callable[[Values], Values]
"""`TorchModel.train_step`: gets the tensors of a batch, or of a part, and returns the outputs."""
Parameters = Sequence[Parameter] | None
Closure = Callable[[], Tensor]
"""Calculates the loss and its gradients for an optimizer that needs them several times for an update, as LBFGS does."""
_not_looked_at = partial(operator.is_not, object())  # returns True for any loss


def backward(loss: Tensor, of: Parameters = None) -> None:
    """Add the gradients of a scalar loss to those of some parameters; of all by default.

    Raises:
        ArgumentError: the loss does not depend on any parameter with `requires_grad`.
    """
    try:
        loss.backward(inputs=of)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if loss.requires_grad:
            raise
        message = "the loss does not depend on any parameter with requires_grad; there is nothing to train"
        if not torch.is_grad_enabled():
            message = "your code has called torch.set_grad_enabled(False); enable gradients again"
        raise ArgumentError("loss", message) from error


class Plain:
    """Clears the gradients, runs forward and backward, and makes an update; the other steps derive from this one.

    Args:
        model: the model; hooks get it with each update.
        optimizers: the optimizers.
        skipped: counts the updates that are skipped.
    """

    backward = staticmethod(backward)
    is_open = False
    """Whether a window of batches has begun that the last batch did not end."""

    def __init__(self, model: Any, optimizers: Optimizers, skipped: SkippedUpdates) -> None:
        self._model = model
        self._optimizers = optimizers
        self._skipped = skipped
        self.scheduled: list[ScheduledOptimizer] = []
        """Those whose schedules step after each window, whether it has one update of theirs, several or none."""
        self.parameters: list[Parameter] = []
        """The parameters of the module at the beginning of the train stream."""
        self.is_skipping = False
        """Whether the last update is skipped because its gradients in float16 are not finite."""
        self.has_updated = False
        """Whether an update was made, or begun, since this was last set to False."""
        self._can_use: Callable[[Any], bool] = _not_looked_at
        """Returns whether an update may be made with a loss."""
        self._owners: Mapping[Any, ScheduledOptimizer] = {}
        self._cleared = Cleared([], [])
        self._before: Callable[..., None] | None = None  # called before and after an update, if a hook listens
        self._after: Callable[..., None] | None = None

    def __getstate__(self) -> State:
        """Return what a deep copy of the model gets: nobody listens to it."""
        return {**vars(self), "_before": None, "_after": None}

    def begin_stream(self, stream: str) -> None:
        """Prepare for the batches of a train stream.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        members = self._optimizers.members
        loop = self._model._main_loop
        self._skipped.begin_stream(stream)
        # the parameters, and whose schedules step
        self.parameters = all_parameters(self._model.module)
        self.list_optimizers()
        self.scheduled = [each for each in members if each.scheduler is not None and each.scheduler.on_update]
        # the hooks of an update
        self._before = self._after = None
        if loop is not None and loop.listens("before_update"):
            self._before = partial(loop.notify, "before_update")
        if loop is not None and loop.listens("after_update"):
            self._after = partial(loop.notify, "after_update")
        # which losses are refused
        self._can_use = _not_looked_at
        waits = not all(each.is_cpu for each in self.parameters)  # for a device, to read a loss
        if loop is not None and loop.on_nan_loss == "error" and not waits:
            self._can_use = is_finite if self._model.trains_itself else math.isfinite
        # the warnings, the plan and the optimizers
        self._optimizers.warn_of_untrained(self._model.module)
        self._model.frozen_parts.warn()
        if self._optimizers.is_plan_due:
            log_plan(self._optimizers.plan(loop))
        for each in members:
            each.begin_stream(loop)

    def run(self, train_step: TrainStep, inputs: Tensors, batch: Batch) -> Values:
        """Call the train step with a batch, or with each of its parts."""
        self.clear()
        outputs = train_step(inputs)
        if self.scheduled:
            self.step_schedules()
        return outputs

    def step_schedules(self) -> None:
        """Step the schedules that step after each window."""
        for each in self.scheduled:
            each.step_schedule()

    def list_optimizers(self) -> None:
        """Note which optimizers there are, and whose gradients are cleared before a step."""
        self._owners = self._optimizers.owners()
        for member in self._owners.values():
            member.renew_step()
        self._cleared = Cleared(self.parameters, list(self._owners))

    def clear(self) -> None:
        """Clear the gradients."""
        cleared = self._cleared
        if [*map(len, cleared.groups)] != cleared.counts:  # a hook has added some
            cleared = self._cleared = Cleared(self.parameters, list(self._owners))
        exhaust(cleared.gradients())
        for clear in cleared.more:
            clear()

    def forget(self) -> None:
        """Forget what an incomplete epoch has left."""
        self.clear()

    def update(self, optimizer: Any, closure: Closure | None = None, reason: str | None = None) -> None:
        """Make an update with the current gradients; hooks are called before and after.

        Args:
            optimizer: the optimizer, or its name.
            closure: calculates the gradients, for an optimizer that needs it; see `TorchModel.update`.
            reason: why the update is skipped; None if it is not.

        Raises:
            ArgumentError: there is no such optimizer.
        """
        own = self._owners.get(optimizer)
        if own is None:  # a name, or an optimizer of a subclass
            optimizer = self._optimizers.named(optimizer)
            own = self._owners.get(optimizer, FOREIGN)
        if closure is not None:
            closure = evaluated(closure, optimizer)
        if own.bare_step is None:
            self._make_first(own, optimizer, closure, reason)
            return
        if self._before is not None:
            try:
                self._before(model=self._model, optimizer=optimizer)
            except UpdateSkipped as error:
                reason = reason or error.reason
        own.note_rates()  # before a hook or the scheduler changes them
        if reason is not None:
            loop = self._model._main_loop
            self._skipped.add(reason, loop.updates_done + 1 if loop is not None else None, own.name)
            clear_gradients(optimizer)
            return
        if not self._can_use(self._model._minimised):
            self._refuse_loss()
        self.has_updated = True
        if closure is not None:
            optimizer.step(closure)
        elif any(own.bare_step.hooks) or _profiler_enabled():
            optimizer.step()
        else:
            own.bare_step.call(optimizer)
        if self._after is not None:
            self._after(model=self._model, optimizer=optimizer)

    def _make_first(self, own: ScheduledOptimizer, *arguments: Any) -> None:
        """Make the first update of an optimizer, with its checks."""
        own.begin_first_update(self._model.module)
        Plain.update(self, *arguments)
        loop = self._model._main_loop
        if loop is not None and loop.has_run:
            own.check_loadable()  # most optimizers begin to keep something with their first update
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                _LOG.info(
                    "most memory used on the GPU by the first update: %s", size_of(torch.cuda.max_memory_allocated())
                )

    def _refuse_loss(self) -> None:
        """Refuse an update with a loss that is not finite, unless the examples of the batch all have the weight 0.

        Raises:
            TrainingAborted: the loss is one of examples that count.
        """
        model = self._model
        if not weighs_nothing(model.step_outputs or {}):
            iteration = model._main_loop.iterations_done + 1  # of this batch, which is not counted yet
            raise TrainingAborted(f"{not_finite(as_number(model._minimised), iteration)}, so no update is made with it")

    def end_epoch(self, epoch_data: EpochData) -> None:
        """Step schedulers that step after each training epoch; log which optimizers and updates were left out."""
        self._optimizers.warn_of_untrained(self._model.module)  # code of the user may have replaced some
        self._skipped.report()
        loop = self._model._main_loop
        members = self._optimizers.members
        late = [each.name for each in members if each.bare_step is None]
        if loop is not None and loop.training_epochs_done == 1 and 0 < len(late) < len(members):
            text = "no update of %s in this epoch; if this is a mistake, call self.update(%r) in train_step"
            _LOG.warning(text, few([f"the optimizer {name!r}" for name in late]), late[0])
        for each in self._optimizers.members:
            each.end_epoch(epoch_data)


def evaluated(closure: Closure, optimizer: torch.optim.Optimizer) -> Closure:
    """Calculate the gradients of an update, before the hooks get the update; return a closure for the optimizer.

    The optimizer gets these gradients for its first call; each other call clears them and calculates them again.
    """
    if getattr(closure, "is_evaluated", False):
        return closure

    def evaluate() -> Tensor:
        clear_gradients(optimizer)
        with torch.enable_grad():
            return closure()

    first = [evaluate()]

    def evaluated_first() -> Tensor:
        return first.pop() if first else evaluate()

    evaluated_first.is_evaluated = True  # type: ignore[attr-defined]
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
        why = f"cannot be used with {value or key}"
        raise ArgumentError(key, f"update(optimizer, closure) calculates the loss several times, which {why}")
