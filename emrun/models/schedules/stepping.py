"""The learning rate schedule of a `TorchModel`: one of torch's schedulers, when it steps, and how it is resumed."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from emrun.base.errors import ArgumentError, HookError, StateError
from emrun.base.types import EpochData, Factory, Horizon, State, Values
from emrun.epoch_data import check_address, number_at
from emrun.hook import Loop
from emrun.models.optimizers.build import is_raised_by_torch
from emrun.models.optimizers.state import check_class, equal, refusals
from emrun.models.schedules.built_in import Constant
from emrun.models.schedules.closed_form import ClosedForm, horizon_of
from emrun.models.schedules.curves import base_rates
from emrun.models.schedules.preview import INNER, MOST_STEPS, all_in, on_dummy, rates_ahead, steps_made, without_rate
from emrun.schedule_plan import SchedulePlan
from emrun.storage.checkpoints.state_file import read_back

_LOG = logging.getLogger(__name__)


class Scheduler:
    """A learning rate scheduler and when it steps.

    Args:
        scheduler: one of torch's schedulers.
        on_update: step after each update instead of after each epoch.
        metric: the address `stream/variable/aggregation` of the statistic that each step gets.
        warmup: what precedes the first step; None for nothing.
        key: its key in the config, for messages.
    """

    def __init__(
        self,
        scheduler: Any,
        on_update: bool,
        metric: str | None,
        warmup: WarmUp | None = None,
        key: str = "model.scheduler",
    ) -> None:
        self.scheduler = scheduler
        self.on_update = on_update
        self.metric = metric
        self.warmup = warmup
        self.key = key
        self._configured = _plain(scheduler.state_dict())
        self._at_first = on_dummy(scheduler) if metric is None else None  # None if it cannot be run ahead
        self._has_warned = False

    def state_dict(self) -> State:
        """Return the scheduler's state with its class and configured arguments."""
        return {
            "class": _class_of(self.scheduler),
            "configured": self._configured,
            "state": _plain(self.scheduler.state_dict()),
            "warmup": self.warmup.state_dict() if self.warmup is not None else None,
        }

    def load_state_dict(self, saved: Values) -> None:
        """Load what `state_dict` returned; arguments that the config has changed since then replace the saved ones.

        Raises:
            StateError: the state belongs to another scheduler, or the scheduler refuses it.
        """
        check_class(saved, "scheduler", _class_of(self.scheduler))
        of_warmup: Values | None = saved.get("warmup")
        if (of_warmup is None) is not (self.warmup is None):
            raise StateError("model.scheduler.warmup was added or removed; a resume cannot change that")
        if self.warmup is not None and of_warmup is not None:
            self.warmup.load_state_dict(of_warmup)
        old = saved["configured"]
        new = self._configured
        with refusals("scheduler", self.scheduler):
            self.scheduler.load_state_dict(_updated(saved["state"], old, new))
        if old.get("_last_lr") != new.get("_last_lr"):
            for scheduler in all_in(self.scheduler).values():  # what `get_last_lr` returns
                scheduler._last_lr = [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def check_loadable(self) -> None:
        """Check that the state can be saved and read back, and that the scheduler of a resume does not refuse it.

        Raises:
            StateError: a resume could not load the state.
        """
        saved = read_back(self.state_dict(), "its state")
        with refusals("scheduler", self.scheduler):
            _copied(self.scheduler).load_state_dict(_updated(saved["state"], saved["configured"], self._configured))

    def shown(self, horizon: Horizon, epochs: int | None) -> SchedulePlan:
        """Return the plan of a run of this length; warn once if the rate is 0 in most of what is left of it.

        Args:
            horizon: the length of the run.
            epochs: number of epochs of the run; None if it is not known.

        Raises:
            ArgumentError: a step of the scheduler raises an error.
        """
        name = _class_of(self.scheduler)
        rising = 0  # updates of the warm-up
        if self.warmup is not None:
            name += self.warmup.shown(horizon).name
            if horizon.share is None and horizon.updates is not None:
                rising = self.warmup.updates(horizon)
        if horizon.share is not None:
            horizon = Horizon(None, horizon.updates_per_pass, "time ends the run")
        # what is not known in advance
        if self.metric is not None:
            return SchedulePlan(name, horizon.updates, note=f"the rate depends on {self.metric}")
        steps = horizon.updates if self.on_update else epochs
        if steps is None or (self.warmup is not None and horizon.updates is None):
            when = "known after the zeroth epoch" if horizon.is_awaited else "not known"
            return SchedulePlan(name, note=f"the length of the run is {when}")
        epochs = None if self.on_update else epochs
        first = on_dummy(self._at_first)
        now = on_dummy(self.scheduler)
        if first is None or now is None or steps > MOST_STEPS:
            why = f"of more than {MOST_STEPS} steps" if first is not None else "of your own"
            return SchedulePlan(
                name, horizon.updates, epochs, f"the rates of a schedule {why} are not known in advance"
            )
        # the rates that are left, and those from the beginning
        unit = "updates" if self.on_update else "epochs"
        per_step = (horizon.updates or 0) // steps if epochs else 1
        missed = min(rising // max(per_step, 1), steps)
        made = steps_made(now)
        rates = rates_ahead(now, steps - missed, unit)
        self._warn_without_rate(rates, unit)
        if made or rising:
            rates = rates_ahead(first, steps - missed, unit)
        # with the warm-up
        shares = [min((index * per_step + 1) / max(rising, 1), 1.0) for index in range(max(steps, 1))]
        shown = [[*of_group[:1] * missed, *of_group] for of_group in rates]
        shown = [[rate * share for rate, share in zip(of_group, shares, strict=False)] for of_group in shown]
        return SchedulePlan(name, horizon.updates, epochs, rates=shown)

    def _warn_without_rate(self, rates: list[list[float]], unit: str) -> None:
        """Warn once if the rate is 0 in most of the steps that are left."""
        left = len(rates[0]) - 1
        count = without_rate(rates, base_rates(self.scheduler.optimizer))
        if 2 * count > left and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s: %s gives a learning rate of 0 in %d of %d %s; write its length in %s, or use a schedule that "
                "follows the length of the run, such as {class: Cosine, warmup: 5%%}",
                self.key,
                _class_of(self.scheduler),
                count,
                left,
                unit,
                unit,
            )

    def step(self, epoch_data: EpochData | None) -> None:
        """Step the scheduler, after the warm-up; with a metric, only after an epoch that evaluated its stream.

        Raises:
            ArgumentError: the data of the epoch does not have the metric, or the metric is not a number.
        """
        if self.warmup is not None and not self.warmup.is_over:
            return
        if self.metric is None:
            self.scheduler.step()
            return
        try:
            value = number_at(epoch_data or {}, self.metric, "the schedule")
        except HookError as error:
            raise ArgumentError("scheduler", f"{error}; see ComputeStats") from error
        if value is not None:
            self.scheduler.step(value)


class WarmUp(Constant):
    """The warm-up before a scheduler of torch: update k of W has k / W of the rates that the scheduler begins with.

    The scheduler makes no step before an update after the warm-up was made, so that it begins then as it would without
    a warm-up.

    Args:
        optimizer: the optimizer, whose scheduler is built.
        warmup: the length.

    Attributes:
        is_over: whether an update after the warm-up was made; from then on, the rates are those of the scheduler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: float | str) -> None:
        super().__init__(optimizer, warmup=warmup)
        self.is_over = False
        self._on_extend = "replan"  # the scheduler of torch has a length of its own
        self._full = [float(group["lr"]) for group in optimizer.param_groups]
        self._done = self._end = 0.0  # how far the run was before the update, and at the end of the warm-up

    def bases(self) -> list[float]:
        """Return the rates that the scheduler begins with."""
        return [*self._full, *super().bases()[len(self._full) :]]

    def updates(self, horizon: Horizon) -> int:
        """Return the number of updates of the warm-up."""
        return sum(length.updates(horizon) for length in self.lengths())

    def begin(self, horizon: Horizon, loop: Loop | None = None) -> None:
        """Set the rates of the next update; see the base class."""
        self._place = self.by_time(float, horizon)
        super().begin(horizon, loop)
        if self.planned is not None:
            self._end = self.updates(horizon_of(self.planned))

    def step(self, epoch_data: object = None) -> None:
        """Count an update, and set the rates of the next one of the warm-up."""
        self.is_over = self.is_over or self._done >= self._end
        super().step()

    def shown(self, horizon: Horizon) -> SchedulePlan:
        """Return the plan; its name is what follows that of the scheduler."""
        plan = super().shown(horizon)
        return replace(plan, name=plan.name.removeprefix(type(self).__name__))

    def state_dict(self) -> State:
        """Return the state of the base class, and whether the warm-up is over."""
        return {**super().state_dict(), "is_over": self.is_over}

    def load_state_dict(self, saved: Values) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(saved)
        self.is_over = saved["is_over"]

    def _set_rates(self) -> None:
        if not self.is_over:
            self._done = self._place(self.updates_done)
            super()._set_rates()


Schedule = Scheduler | ClosedForm
"""The schedule of an optimizer: one of torch's, or one of emrun's."""


def build_scheduler(
    optimizer: torch.optim.Optimizer | None, form: Callable[..., Any], key: str = "model.scheduler"
) -> Schedule:
    """Build the scheduler of an optimizer.

    Args:
        optimizer: the optimizer whose learning rates the scheduler sets.
        form: called with the optimizer; its options are `step_on` (`epoch` or `update`), `metric` and `warmup`.
        key: the key of the scheduler in the config.

    Raises:
        ArgumentError: an option has a value that is not allowed, or the scheduler needs a metric.
    """
    # when it steps
    options: Values = getattr(form, "options", {})
    step_on = options.get("step_on", "epoch")
    metric = options.get("metric")
    if optimizer is None:
        raise ArgumentError("scheduler", "there is no optimizer whose learning rate the scheduler could set")
    if step_on not in ("epoch", "update"):
        raise ArgumentError("scheduler.step_on", f"{step_on!r} is neither epoch nor update")
    if metric is not None:
        check_address("scheduler.metric", metric)
        if step_on == "update":
            raise ArgumentError("scheduler.metric", "statistics exist only after an epoch; remove `step_on: update`")
    # the scheduler
    try:
        with warnings.catch_warnings():  # a chain that is the first part of a sequence steps while it is built
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            scheduler = form.share("optimizer", optimizer) if isinstance(form, Factory) else form(optimizer)
    except (ValueError, TypeError) as error:
        if not is_raised_by_torch(error):
            raise
        message = str(error).rstrip(".")
        if "ReduceLROnPlateau" in message:
            message += "; write {class: ReduceLROnPlateau, metric: valid/loss/mean} as the whole scheduler"
        raise ArgumentError("scheduler", message) from error
    # whether it steps then
    if isinstance(scheduler, ClosedForm):
        for name in options:
            raise ArgumentError(
                f"scheduler.{name}",
                f"{type(scheduler).__name__} steps after each update, and watches nothing; remove {name!r}",
                "delete",
            )
        return scheduler
    needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if needs_metric and metric is None:
        raise ArgumentError("scheduler", "ReduceLROnPlateau needs `metric`, e.g. valid/loss/mean")
    if metric is not None and not needs_metric and "metrics" not in inspect.signature(scheduler.step).parameters:
        raise ArgumentError("scheduler.metric", f"{type(scheduler).__name__} does not take a metric; remove `metric`")
    # what precedes it
    warmup = options.get("warmup")
    try:
        rise = None if warmup in (None, 0) else WarmUp(optimizer, warmup)
    except ArgumentError as error:
        raise ArgumentError("scheduler.warmup", error.message) from error
    return Scheduler(scheduler, step_on == "update", metric, rise, key)


def _updated(state: Any, old: Any, new: Any) -> Any:
    """Return a state with the new value wherever the old and the new arguments differ.

    So too where it is still the old one, because the new one has the type that the scheduler needs, such as Counter.
    """
    if isinstance(state, dict) and isinstance(old, dict) and type(new) is dict:
        common = old.keys() & new.keys()
        return {key: _updated(value, old[key], new[key]) if key in common else value for key, value in state.items()}
    if all(isinstance(value, list) for value in (state, old, new)) and len(state) == len(old) == len(new):
        return list(map(_updated, state, old, new))
    return state if equal(old, new) and not equal(state, old) else copy.deepcopy(new)


def _plain(state: Values) -> State:
    """Return the part of a scheduler's state that can be saved, at any depth; functions are in the config."""
    return {
        key: list(map(_plain, value)) if key == INNER and isinstance(value, list) else copy.deepcopy(value)
        for key, value in state.items()
        if isinstance(value, bool | int | float | str | list | tuple | dict | type(None) | torch.Tensor)
    }


def _copied(scheduler: Any) -> Any:
    """Return a copy of a scheduler that loads a state without changing the scheduler; the optimizer is the same."""
    copied = copy.copy(scheduler)
    if hasattr(copied, INNER):
        vars(copied)[INNER] = list(map(_copied, getattr(copied, INNER)))
    return copied


def _class_of(scheduler: Any) -> str:
    """Return the name of a scheduler's class, with those of its inner ones: `SequentialLR(LinearLR, StepLR)`."""
    name = type(scheduler).__name__
    inner = ", ".join(map(_class_of, getattr(scheduler, INNER, ())))
    return f"{name}({inner})" if inner else name
