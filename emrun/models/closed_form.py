"""Schedules of learning rates that are a closed form of the updates done and the horizon of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from emrun.errors import ArgumentError
from emrun.fields import ANYTHING, mapping_of, optional, record, sequence_of, whole
from emrun.models.lengths import Length
from emrun.models.optimizer import check_class
from emrun.schedule_plan import SchedulePlan
from emrun.types import Horizon
from emrun.wording import counted

_NOMINAL = 10_000  # updates of a run whose length is not known yet
_POINTS = 400  # of the curve in a plan; a multiple of 4

Factor = Callable[[int], float]
"""Updates done -> the share of each parameter group's own rate that the next update has."""

_STATE = {
    "updates_done": whole(),
    "plans": sequence_of(
        record({"began": whole(), "updates": optional(whole()), "updates_per_pass": optional(whole(1))})
    ),
}


class ClosedForm(ABC):
    """Base class of the schedules in `emrun.models.schedules`, which step after each update.

    A schedule has three parts. In the warm-up, update k of W has k / W of the rate of its parameter group. Then comes
    the part that gives the schedule its name. The cool-down is the last part of the run: the rate goes in a straight
    line from where it is to `final`. All rates are doubles that depend on nothing but the number of updates done. If
    the run continues after its end, the rate stays at `final`.

    Args:
        optimizer: its parameter groups get the rates; the base rate of a group is its `lr`.
        warmup: the length of the warm-up; None for none.
        cooldown: the length of the cool-down; None for none.
        final: the share of the rate at the end.

    Attributes:
        updates_done: number of updates that were counted.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    on_update = True
    metric = None
    depends_on_end = True
    """Whether the part between warm-up and cool-down depends on where it ends."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup: float | str | None,
        cooldown: float | str | None,
        final: float,
        **others: Any,
    ) -> None:
        if isinstance(final, bool) or not isinstance(final, int | float) or not 0 <= final <= 1:
            raise ArgumentError("final", f"{final!r} is not a share of the rate, from 0 to 1")
        self.optimizer = optimizer
        self.final = float(final)
        self.warmup = None if warmup is None else Length.parse("warmup", warmup)
        self.cooldown = None if cooldown is None else Length.parse("cooldown", cooldown)
        self.updates_done = 0
        self.plans: list[dict[str, Any]] = []
        """What the rates were calculated from: the update at which a plan began, and the horizon; the last counts."""
        self._configured = {"warmup": warmup, "cooldown": cooldown, "final": final, **others}
        self._is_changed = False  # whether the arguments are others than those of the loaded state
        self._factor: Factor | None = None
        self._groups: list[tuple[dict[str, Any], float]] = []  # parameter group, base rate
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    @abstractmethod
    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return the rates between warm-up and cool-down.

        Args:
            horizon: the horizon, for lengths.
            warmup: number of updates of the warm-up.
            length: number of updates of this part; 0 if nothing depends on it and it is not known.

        Returns:
            Function of the number of updates done since the warm-up, from 0 to `length`.
        """

    def lengths(self) -> list[Length]:
        """Return all lengths among the arguments."""
        return [each for each in (self.warmup, self.cooldown) if each is not None]

    @property
    def needs_horizon(self) -> bool:
        """Whether the rates depend on the number of updates of the run."""
        return self.depends_on_end or self.cooldown is not None or any(each.unit == "%" for each in self.lengths())

    def is_awaited(self, horizon: Horizon) -> bool:
        """Return whether the rates can be calculated only after the zeroth epoch."""
        needs_updates = self.needs_horizon and horizon.updates is None and not horizon.missing
        needs_passes = horizon.updates_per_pass is None and any(each.unit == "passes" for each in self.lengths())
        return horizon.is_awaited and (needs_updates or needs_passes)

    def factor(self, horizon: Horizon) -> Factor:
        """Return the function that gives the share of the rate of each update.

        Raises:
            ArgumentError: the run is too short for the parts of the schedule, or its length is not known.
        """
        name, total = type(self).__name__, horizon.updates
        warmup = self.warmup.updates(horizon) if self.warmup is not None else 0
        if total is None:
            if self.needs_horizon:
                message = f"{name} needs the number of updates of the run, which is not known: {horizon.missing}"
                raise ArgumentError("scheduler", message)
            return _joined(warmup, self.between(horizon, warmup, 0))
        cooldown = self.cooldown.updates(horizon) if self.cooldown is not None else 0
        if warmup > total:
            message = f"{self.warmup}: the run makes only {total} updates; make the warm-up shorter, or the run longer"
            raise ArgumentError("scheduler.warmup", message)
        if warmup + cooldown > total:
            both = f"{warmup} of warm-up and {cooldown} of cool-down" if warmup else f"{cooldown}"
            message = f"{self.cooldown}: the run makes only {total} updates, fewer than {both}"
            raise ArgumentError("scheduler.cooldown", message)
        length = total - warmup - cooldown
        between = self.between(horizon, warmup, length) if length else _full
        if not cooldown and not self.depends_on_end:
            return _joined(warmup, between)
        return _ended(warmup, length, between, cooldown, self.final)

    def plan(self, horizon: Horizon) -> Factor:
        """Plan the rates for a horizon, or continue with the loaded plan if it still fits.

        Raises:
            ArgumentError: see `factor`; or the horizon has changed since the run began, and with it the rates of
                updates that were made already.
        """
        known = self.plans[-1] if self.plans else None
        if known is not None and horizon.updates is None:
            horizon = Horizon(known["updates"], known["updates_per_pass"])
        factor = self.factor(horizon)
        plan = {"updates": horizon.updates, "updates_per_pass": horizon.updates_per_pass}
        if known is None:
            self.plans = [{"began": self.updates_done, **plan}]
        elif self._is_changed:
            self.plans = [*self.plans, {"began": self.updates_done, **plan}]
        elif plan != {key: known[key] for key in plan}:
            refusal = self.refusal(horizon)
            if refusal is not None:
                raise ArgumentError("scheduler", refusal)
            self.plans = [*self.plans[:-1], {"began": known["began"], **plan}]
        self._is_changed = False
        return factor

    def refusal(self, horizon: Horizon) -> str | None:
        """Return why the run cannot have another horizon than the loaded plan; None if it can.

        It can if the rates of the updates that were made stay the same, or if the arguments have changed too.

        Raises:
            ArgumentError: see `factor`.
        """
        known = self.plans[-1] if self.plans else None
        if known is None or self._is_changed or horizon.updates in (None, known["updates"]):
            return None
        before, now = self.factor(Horizon(known["updates"], known["updates_per_pass"])), self.factor(horizon)
        if all(before(done) == now(done) for done in range(known["began"], self.updates_done)):
            return None
        return (
            f"{type(self).__name__} was planned for {known['updates']} updates, and the run now makes "
            f"{horizon.updates}: this changes the rates of the {self.updates_done} updates that were made already. "
            "Resume with the limits that the run had, or train anew. A schedule that can be made longer is Constant or "
            "InverseSqrt, with warmup and cooldown in updates, from a checkpoint before its cool-down"
        )

    def shown(self, horizon: Horizon) -> SchedulePlan:
        """Return the plan of a run of this length.

        Raises:
            ArgumentError: see `plan`.
        """
        name = type(self).__name__
        bases = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        if self.is_awaited(horizon) and not self.plans:
            name += "".join(f", {each.name} {each}" for each in self.lengths())
            note = "the number of updates is known after the zeroth epoch"
            if any(each.unit != "%" for each in self.lengths()):
                return SchedulePlan(name, note=note)
            total = _NOMINAL
            factor = self.factor(Horizon(total))
            return SchedulePlan(name, note=note, rates=_sampled(factor, total, bases))
        factor = self.plan(horizon)
        known = Horizon(self.plans[-1]["updates"], self.plans[-1]["updates_per_pass"])
        for each in self.lengths():
            name += f", {each.name} {counted(each.updates(known), 'update')}"
        if known.updates is None:
            return SchedulePlan(name, note="no hook limits the updates of the run")
        return SchedulePlan(name, known.updates, rates=_sampled(factor, max(known.updates, 1), bases))

    def begin(self, horizon: Horizon) -> None:
        """Set the rates of the next update; called before the first update of each epoch.

        Raises:
            ArgumentError: see `plan`.
        """
        if self.is_awaited(horizon) and not self.plans:
            return  # before the zeroth epoch, or in `emrun check`
        self._factor = self.plan(horizon)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # a hook may have added the group
        self._groups = [(group, float(group["initial_lr"])) for group in self.optimizer.param_groups]
        self._set()

    def step(self, epoch_data: object = None) -> None:
        """Count an update, and set the rates of the next one."""
        self.updates_done += 1
        self._set()

    def _set(self) -> None:
        if self._factor is None:
            return
        factor = self._factor(self.updates_done)
        for group, base in self._groups:
            if group["lr"].__class__ is float:
                group["lr"] = base * factor
            else:
                _set_rate(group, base * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the updates done and the plans, with the class and the configured arguments."""
        state = {"updates_done": self.updates_done, "plans": [dict(plan) for plan in self.plans]}
        return {"class": type(self).__name__, "configured": self._configured, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the arguments are those of the config.

        Raises:
            StateError: the state belongs to another scheduler.
        """
        check_class(saved, "scheduler", type(self).__name__)
        record({"configured": mapping_of(ANYTHING), "state": record(_STATE)}).check(saved, "scheduler")
        self.updates_done = saved["state"]["updates_done"]
        self.plans = [dict(plan) for plan in saved["state"]["plans"]]
        self._is_changed = saved["configured"] != self._configured
        self._factor = None


def _sampled(factor: Factor, total: int, bases: Sequence[float]) -> list[list[float]]:
    """Return the rates of some updates, evenly spread from the first to the last one, for each base rate."""
    count = min(total, _POINTS + 1)
    factors = [factor(round(index * (total - 1) / max(count - 1, 1))) for index in range(count)]
    return [[base * each for each in factors] for base in bases]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a rate that may be a tensor, as optimizers that are captured in graphs need it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _full(done: int) -> float:
    return 1.0


def _joined(warmup: int, between: Factor) -> Factor:
    """Return the rates of a schedule without an end."""

    def factor(done: int) -> float:
        return (done + 1) / warmup if done < warmup else between(done - warmup)

    return factor


def _ended(warmup: int, length: int, between: Factor, cooldown: int, final: float) -> Factor:
    """Return the rates of a schedule with an end.

    Args:
        warmup: number of updates of the warm-up.
        length: number of updates between warm-up and cool-down.
        between: the rates of these.
        cooldown: number of updates of the cool-down.
        final: the rate at the end of the cool-down.
    """
    cools = warmup + length
    last = between(length)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if done < cools:
            return between(done - warmup)
        if not cooldown:
            return last
        return last + (final - last) * min(done - cools, cooldown) / cooldown

    return factor
