"""One of the optimizers of a `TorchModel`, with its schedule: built, stepped, saved and loaded together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError, StateError
from emrun.base.types import EpochData, Horizon, State, Values
from emrun.base.wording import few
from emrun.hook import Loop
from emrun.models.optimizers.bare_step import BareStep, mark_as_stepped
from emrun.models.optimizers.build import build_optimizer
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.optimizers.state import (
    check_loadable,
    configured_arguments,
    load_optimizer_state,
    on_shapes,
    optimizer_state,
)
from emrun.models.schedules.closed_form import REPLAN, ClosedForm
from emrun.models.schedules.stepping import Schedule, Scheduler, build_scheduler
from emrun.schedule_plan import SchedulePlan

_LOG = logging.getLogger(__name__)

Rates = list[float | Tensor]
"""The learning rates of the parameter groups of an optimizer."""

_rates_of = partial(map, methodcaller("get", "lr"))
_types_of = partial(map, type)
_are_floats = frozenset((float,)).issuperset


class ScheduledOptimizer:
    """An optimizer, its schedule, and its learning rates.

    An optimizer with the methods `train` and `eval`, such as those of schedulefree, has other weights for evaluations
    than for training. It is switched to those of evaluations before they are used or saved. The weights that it trains
    are kept meanwhile, because the way back is not exact.

    Args:
        module: the module to train; None without a form.
        name: its name in the config; empty for the only one.
        form: the form of the optimizer; None for a model that is only evaluated, or trains in its own way.
        scheduler: the form of the schedule.
        scheduler_key: the key of that form in the model's section, for messages.

    Raises:
        ArgumentError: optimizer or scheduler cannot be built.
    """

    def __init__(self, module: Any, name: str, form: Any, scheduler: Any, scheduler_key: str = "scheduler") -> None:
        self.name = name
        self.shown_name = name or "optimizer"
        """The name that it has in the `optimizers` of a model."""
        self.key = f"optimizer.{name}" if name else "optimizer"
        """Its key in the model's section."""
        self._scheduler_key = scheduler_key
        self.metric: str | None = getattr(scheduler, "options", {}).get("metric")
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        self.rates: Rates | None = None
        """The learning rates of the last update, or with which a window of several batches has begun."""
        self.bare_step: BareStep | None = None
        """The step of the optimizer; None until an update was made in this process."""
        self._kept: list[Tensor] | None = None  # the weights for training, while those for evaluations are in use
        if name and getattr(form, "options", {}).get("match") is None:
            raise ArgumentError(self.key, "missing key 'match': a regular expression for the parameters that it trains")
        self.replace(None if form is None else build_optimizer(module, form, self.key))
        self.scheduler: Schedule | None = None
        self.phases: ClosedForm | None = None
        """The schedule or its warm-up, which steps after each update and follows the length of the run."""
        if scheduler is not None:
            with self.errors():
                self.scheduler = build_scheduler(self.optimizer, scheduler, f"model.{scheduler_key}")
            self.phases = self.scheduler if isinstance(self.scheduler, ClosedForm) else self.scheduler.warmup
            if self.scheduler.on_update:  # it also steps after a window whose update was skipped
                mark_as_stepped(self.optimizer)
        self._configured = [] if self.optimizer is None else configured_arguments(module, self.optimizer)
        self.register()

    def register(self) -> None:
        """Record the groups of the optimizer; a resume, which has them too, loads its state after that."""
        self._empty = on_shapes(self.optimizer) if self.optimizer is not None else None

    def check_loadable(self) -> None:
        """Check that a resume could load the states of optimizer and scheduler.

        Raises:
            ArgumentError: it could not.
        """
        key = self.key
        try:
            if self.optimizer is not None:
                check_loadable(self.optimizer, self._empty)
            key = self._scheduler_key
            if isinstance(self.scheduler, Scheduler):
                self.scheduler.check_loadable()
        except StateError as error:
            raise ArgumentError(key, f"a resume could not load a checkpoint: {error}") from error

    def replace(self, optimizer: Optimizer | None) -> None:
        """Take an optimizer, which gets the mode of evaluations if it has modes."""
        self.optimizer = optimizer
        if optimizer is None:
            self.bare_step = None
        self.has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        """Whether the optimizer has other weights for evaluations."""
        self.is_training = False
        """Whether such an optimizer has its weights for training in the module."""
        if self.has_modes:
            optimizer.eval()  # type: ignore[union-attr]

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Give errors of the schedule its key in the config."""
        try:
            yield
        except ArgumentError as error:
            if error.argument.partition(".")[0] != "scheduler" or self._scheduler_key == "scheduler":
                raise
            key = self._scheduler_key + error.argument.removeprefix("scheduler")
            raise ArgumentError(key, error.message, error.fix) from error

    def before_training(self, loop: Loop | None) -> None:
        """Let the loop find the length of the run on each rank, while nothing reads the train stream."""
        if self.scheduler is not None:
            _horizon_of(loop)

    def begin_stream(self, loop: Loop | None) -> None:
        """Prepare for the batches of a train stream.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        if self.phases is not None:
            with self.errors():
                self.phases.begin(_horizon_of(loop), loop)

    def begin_first_update(self, module: Module) -> None:
        """Warn of parameters that get no gradient in the first update."""
        self.bare_step = BareStep.of(self.optimizer)
        without = {id(each) for each in parameters_of(self.optimizer) if each.requires_grad and each.grad is None}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in without]
        if names:
            _LOG.warning(
                "%sin the first update, there is no gradient for %s: nothing that is minimised depends on %s",
                f"optimizer {self.name!r}: " if self.name else "",
                few(names),
                "it" if len(names) == 1 else "them",
            )

    def renew_step(self) -> None:
        """Look for the step of the optimizer again, if an update was made: code of the user may have replaced it."""
        if self.bare_step is not None:
            self.bare_step = BareStep.of(self.optimizer)

    def note_rates(self) -> None:
        """Note the learning rates of the update that follows; called in each update, so the usual case is fast."""
        self.rates = rates = [*_rates_of(self.optimizer.param_groups)]  # type: ignore[union-attr]
        if not _are_floats(_types_of(rates)):
            self.rates = learning_rates(self.optimizer)

    def plan(self, loop: Loop) -> tuple[SchedulePlan, bool]:
        """Return the plan of the schedule, and whether the zeroth epoch will tell more.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        horizon = loop.horizon
        schedule = self.scheduler
        assert schedule is not None
        with self.errors():
            phases = self.phases
            is_due = phases is not None and phases.is_awaited(horizon) and phases.planned is None
            if isinstance(schedule, ClosedForm):
                return schedule.shown(horizon), is_due
            epochs = _epochs_of(loop, horizon)
            steps = horizon.updates if schedule.on_update else epochs
            is_due = is_due or (horizon.is_awaited and schedule.metric is None and steps is None)
            return schedule.shown(horizon, epochs), is_due

    def step_schedule(self) -> None:
        """Step what steps after each update, the warm-up first."""
        if self.phases is not None:
            self.phases.step()
        if isinstance(self.scheduler, Scheduler) and self.scheduler.on_update:
            self.scheduler.step(None)

    def end_epoch(self, epoch_data: EpochData) -> None:
        """Step a scheduler that steps after each training epoch."""
        if self.scheduler is not None and not self.scheduler.on_update:
            with self.errors():
                self.scheduler.step(epoch_data)

    def next_rates(self, loop: Loop | None) -> Rates | None:
        """Return the learning rates of the next update; None without an optimizer."""
        if self.optimizer is None:
            return None
        if self.rates is None and self.phases is not None:
            with suppress(ArgumentError):  # the first update raises it again, if there is one
                self.phases.begin(_horizon_of(loop), loop)
        return learning_rates(self.optimizer)

    def set_mode(self, *, train: bool) -> None:
        """Put the weights for training or for evaluations into the module, if they differ."""
        if not self.has_modes or train is self.is_training:
            return
        optimizer: Any = self.optimizer
        self.is_training = train
        if not train:
            self._kept = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
            optimizer.eval()
            return
        optimizer.train()
        with torch.no_grad():
            for parameter, weights in zip(parameters_of(optimizer), self._kept or (), strict=False):
                parameter.copy_(weights)
        self._kept = None

    def forget_training(self) -> None:
        """Prepare for weights that are loaded, which are those for evaluations."""
        self.set_mode(train=False)
        self._kept = None

    def state_dict(self) -> State:
        """Return the states of optimizer and scheduler, and the learning rates of the last update."""
        state: State = {
            "optimizer": None,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "rates": list(map(float, self.rates)) if self.rates is not None else None,
        }
        if self.optimizer is None:
            return state
        was_training = self.is_training
        self.set_mode(train=False)
        state["optimizer"] = optimizer_state(self.optimizer, self._configured)
        if self.has_modes:
            state["optimizer"] = copy.deepcopy(state["optimizer"])  # a change of modes may change it
            state["training_weights"] = self._kept
        self.set_mode(train=was_training)
        return state

    def load_state_dict(self, state: Values, loop: Loop | None) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has another optimizer or scheduler, or one of them refuses its state.
        """
        for key in ("optimizer", "scheduler"):
            if (getattr(self, key) is None) is not (state[key] is None):
                raise StateError(f"model.{key} was added or removed; a resume cannot change that")
        if self.optimizer is not None:
            self.forget_training()
            kept = state.get("training_weights")
            if kept is not None and [each.shape for each in kept] != [
                each.shape for each in parameters_of(self.optimizer)
            ]:
                raise StateError("model.optimizer: training_weights are not of the shapes of the parameters")
            load_optimizer_state(self.optimizer, state["optimizer"], self._configured)
            self._kept = kept
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self._check_length(loop)
        rates = state.get("rates")
        self.rates = list(map(float, rates)) if rates is not None else None

    def _check_length(self, loop: Loop | None) -> None:
        """Check that a run with a loaded schedule may have the length that the loop gives it now.

        Raises:
            StateError: the length has changed, and with it the rates of updates that were made; or the schedule is
                over, and nothing limits the updates of the run any more.
        """
        if self.phases is None:
            return
        horizon = _horizon_of(loop)
        refusal = self.phases.refusal(horizon)
        is_endless = loop is not None and loop.has_run and horizon.updates is None
        if refusal is None and is_endless and isinstance(self.scheduler, ClosedForm):
            refusal = self.scheduler.refusal_without_end()
        if refusal is not None:
            key = f"model.{self._scheduler_key}"
            raise StateError(f"{key}: {refusal.replace(REPLAN, f'{key}.on_extend=replan')}")


class Foreign(ScheduledOptimizer):
    """An optimizer that only a subclass of the model knows, without a name and a schedule.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(None, "", None, None)
        self.optimizer = optimizer
        self.bare_step = BareStep.of(None)

    def note_rates(self) -> None:
        """Note nothing: the learning rates in the record are those of the optimizers in the config."""


def learning_rates(optimizer: Any) -> Rates:
    """Return the learning rate of each parameter group: a number, or a copy of a tensor on another device."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return [rate.detach().clone() if isinstance(rate, Tensor) and not rate.is_cpu else float(rate) for rate in rates]


def _horizon_of(loop: Loop | None) -> Horizon:
    """Return how long the run will be; without a loop, this is not known."""
    return Horizon(None, missing="the model does not belong to a main loop") if loop is None else loop.horizon


def _epochs_of(loop: Loop, horizon: Horizon) -> int | None:
    """Return the number of epochs of the run, which its smallest limit gives; None if it is not known."""
    limits = loop.limits
    fixed = loop.fixed_epoch_size
    units = ("epochs",) if fixed else ("epochs", "passes")  # an epoch of a fixed size is not a pass
    epochs = [limits[unit] for unit in units if unit in limits]
    updates_per_epoch = -(-fixed // loop.model.iterations_per_update) if fixed else horizon.updates_per_pass
    if horizon.updates is not None and horizon.share is None and updates_per_epoch is not None:
        epochs.append(horizon.updates // updates_per_epoch)
    return min(epochs, default=None)
