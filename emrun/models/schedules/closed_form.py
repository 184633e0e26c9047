"""Schedules whose learning rates are a closed form of the number of updates done and of the horizon of the run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError, StateError
from emrun.base.types import TICKS, Horizon, State, Values
from emrun.base.wording import counted
from emrun.hook import Loop
from emrun.models.optimizers.groups import Group
from emrun.models.optimizers.state import check_class
from emrun.models.schedules import curves
from emrun.models.schedules.curves import Factor
from emrun.models.schedules.lengths import Length
from emrun.schedule_plan import BEFORE_COOLDOWN, SchedulePlan

_NOMINAL = 10_000  # updates of a run whose length is not known yet
_MOST_DONE = 10**9  # updates
REPLAN = "model.scheduler.on_extend=replan"
"""The override that accepts the rates of a longer run, for messages."""


class ClosedForm(ABC):
    """Base class of the schedules in `emrun.models.schedules.built_in`, which step after each update.

    A schedule has three phases: the warm-up, the phase that gives the schedule its name, and the cool-down. All rates
    are doubles that depend on nothing but the number of updates done. If the run continues after its end, the rate
    stays at `final`.

    A run that is made longer by a resume has the rates of a run that had this length from the beginning, if those of
    the updates that were made stay the same. Otherwise `on_extend` says whether the resume is refused.

    Args:
        optimizer: its parameter groups get the rates; the base rate of a group is its `lr`.
        warmup: the length of the warm-up, in which update k of W has k / W of the rate: a share of the run such as
            `5%`, `500 updates` or `2 passes`.
        cooldown: the length of the cool-down, the last phase of the run, written in the same ways: the rate goes in a
            straight line to `final`, or to 0 without one. A decay to `final` ends where the cool-down begins.
        final: where the decay or the cool-down ends, as a share of the rate.
        on_extend: what a resume does that makes the run longer in a way that changes the rates of updates that were
            made: `replan` continues on the curve of the longer run; by default such a resume is refused.

    Attributes:
        updates_done: number of updates that were counted.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or there is a `final` without a `cooldown`.
    """

    on_update = True
    metric = None
    sets_rates = True
    """Whether the shares are those of learning rates; a hook may use a schedule for another number, and sets False."""
    depends_on_end = True
    """Whether the phase between warm-up and cool-down depends on where it ends."""
    largest_final = 1.0
    """The largest share of the rate that a run may end with."""
    further_lengths = tuple[Length, ...]()
    """The lengths among the arguments that only this schedule has; set before this class is constructed."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float | str | None = None,
        cooldown: float | str | None = None,
        final: float | None = None,
        on_extend: Literal["replan"] | None = None,
    ) -> None:
        # what the arguments must be
        if on_extend not in ("replan", None):
            raise ArgumentError("on_extend", f"{on_extend!r} is not replan")
        if final is not None and cooldown is None and not self.depends_on_end:
            raise ArgumentError("final", f"{final!r} is where the cool-down ends, and there is none; add cooldown: 20%")
        final = 0.0 if final is None else final
        allowed = "from 0 to 1" if self.largest_final == 1 else "a positive number"
        check_number(
            "final",
            final,
            f"a share of the rate, {allowed}",
            least=0,
            below=math.nextafter(self.largest_final, math.inf),
        )
        # the phases
        self.optimizer = optimizer
        self.final = float(final)
        self.warmup = None if warmup in (None, 0) else Length.parse("warmup", warmup)
        self.cooldown = None if cooldown in (None, 0) else Length.parse("cooldown", cooldown)
        # where the run is
        self.updates_done = 0
        self.planned: State | None = None
        """What the rates are calculated from: the update at which the plan began, and the horizon.

        A plan that extends another also has `before`: the share of the rate of the update before.
        """
        self._on_extend = on_extend
        if on_extend is not None and not self.needs_horizon:
            raise ArgumentError(
                "on_extend",
                f"the rates of {type(self).__name__} do not depend on the length of the run; remove on_extend",
                "delete",
            )
        self._configured: State = {"warmup": warmup, "cooldown": cooldown, "final": final}
        self._is_changed = False  # whether the arguments are others than those of the loaded state
        # what sets the rates
        self._factor: Factor | None = None
        self._at_cooldown: tuple[int, Loop] | None = None  # the updates before it; the loop, which saves a checkpoint
        self._groups: list[tuple[Group, float]] = []  # parameter group, base rate
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    @abstractmethod
    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return the rates between warm-up and cool-down.

        Args:
            horizon: the horizon, for lengths.
            warmup: number of updates of the warm-up.
            length: number of updates of this phase; 0 if nothing depends on it and it is not known, or if warm-up and
                cool-down fill the run, for schedules with `further_lengths`.

        Returns:
            Function of the number of updates done since the warm-up, from 0 to `length`.
        """

    def lengths(self) -> list[Length]:
        """Return all lengths among the arguments."""
        return [length for length in (self.warmup, self.cooldown, *self.further_lengths) if length is not None]

    @property
    def needs_horizon(self) -> bool:
        """Whether the rates depend on the number of updates of the run."""
        return self.depends_on_end or self.cooldown is not None or any(length.unit == "%" for length in self.lengths())

    def is_awaited(self, horizon: Horizon) -> bool:
        """Return whether the rates can be calculated only after the zeroth epoch."""
        needs_updates = self.needs_horizon and horizon.updates is None and not horizon.missing
        needs_passes = horizon.updates_per_pass is None and any(length.unit == "passes" for length in self.lengths())
        return horizon.is_awaited and (needs_updates or needs_passes)

    def factor(self, horizon: Horizon) -> Factor:
        """Return the function that gives the share of the rate of each update.

        Raises:
            ArgumentError: the run is too short for the phases of the schedule, or its length is not known.
        """
        total = horizon.updates
        warmup = self.warmup.updates(horizon) if self.warmup is not None else 0
        # a run without an end
        if total is None:
            if self.needs_horizon:
                raise ArgumentError(
                    "scheduler",
                    f"{type(self).__name__} needs the number of updates of the run, which is not known: "
                    f"{horizon.missing}",
                )
            return curves.in_phases(warmup, self.between(horizon, warmup, 0))
        # the lengths of the phases
        cooldown = self.cooldown.updates(horizon) if self.cooldown is not None else 0
        if warmup > total:
            raise ArgumentError(
                "scheduler.warmup",
                f"{self.warmup}: the run makes only {total} updates; make the warm-up shorter, or the run longer",
            )
        if warmup + cooldown > total:
            both = f"{warmup} of warm-up and {cooldown} of cool-down" if warmup else f"{cooldown}"
            raise ArgumentError(
                "scheduler.cooldown", f"{self.cooldown}: the run makes only {total} updates, fewer than {both}"
            )
        # their rates
        end = total - cooldown
        is_checked = end > warmup or (total and self.further_lengths)  # also milestones without updates that are left
        between = self.between(horizon, warmup, end - warmup) if is_checked else lambda done: 1.0
        return curves.in_phases(warmup, between, end if cooldown or self.depends_on_end else None, cooldown, self.final)

    def plan(self, horizon: Horizon) -> Factor:
        """Plan the rates for a horizon, or continue with the loaded plan if it still fits.

        Raises:
            ArgumentError: see `factor`; or the horizon has changed since the run began, and with it the rates of
                updates that were made already.
        """
        if horizon.share is not None:
            for length in self.lengths():
                if length.unit != "%":
                    raise ArgumentError(
                        f"scheduler.{length.argument}", f"{length}: time ends the run; write a share such as 5%"
                    )
        old = self.planned
        if old is not None and horizon.updates is None:
            horizon = horizon_of(old)
        of_run = {"updates": horizon.updates, "updates_per_pass": horizon.updates_per_pass}
        new: State = {"began": self.updates_done, **of_run}
        if old is not None and not self._is_changed:
            if self._keeps_rates(old, horizon):
                new = {**old, **of_run}
            elif (refusal := self.refusal(horizon)) is not None:
                raise ArgumentError("scheduler", refusal)
            else:
                new["before"] = self._factor_of(old)(self.updates_done - 1)
        factor = self.factor(horizon)
        self.planned = new
        self._is_changed = False
        return factor

    def by_time(self, factor: Factor, horizon: Horizon) -> Factor:
        """Return rates that go by the share of the run that is over, if time ends the run; else the same function."""
        share = horizon.share
        return factor if share is None else lambda done: factor(int(min(share(done), 1.0) * TICKS))

    def refusal(self, horizon: Horizon) -> str | None:
        """Return why the run cannot have another horizon than the loaded plan; None if it can.

        It can if the rates of the updates that were made stay the same, if the arguments have changed too, so that the
        schedule is another one, or if it is longer and `on_extend` allows it.

        Raises:
            ArgumentError: see `factor`.
        """
        plan = self.planned
        if plan is None or plan["updates"] is None or horizon.updates is None or self._is_changed:
            return None
        is_longer = horizon.updates > plan["updates"]
        done = self.updates_done
        if self._keeps_rates(plan, horizon) or (is_longer and self._on_extend is not None):
            return None
        # what has changed
        text = (
            f"{type(self).__name__} was planned for {plan['updates']} updates, and the run now makes "
            f"{horizon.updates}: this changes the rates of the {done} updates that were made already. "
        )
        # the rates of a longer run
        if is_longer:
            places = (done, (done + horizon.updates - 1) // 2, horizon.updates - 1)
            before = self._factor_of(plan)(done - 1)
            after = [self.factor(horizon)(place) for place in places]
            bases = curves.base_rates(self.optimizer)
            text += (
                f"{REPLAN} accepts the rates of the longer run: {curves.by_group(bases, after)} in the next update, "
                f"halfway, and in the last one, after {curves.by_group(bases, [before])} in the update before. "
            )
        # a checkpoint from which such a run may continue
        begin = self._cooldown_begin(plan) if self.sets_rates else None  # nothing else requests a checkpoint
        if begin is not None and 0 < begin < done and self._keeps_rates(plan, horizon, begin):
            return text + (
                f"The rates before the cool-down stay the same: resume with --checkpoint {BEFORE_COOLDOWN}, after "
                f"{counted(begin, 'update')}, to get what a run of this length gives from its beginning"
            )
        return f"{text}{'Or resume' if is_longer else 'Resume'} with the limits that the run had, or train anew"

    def refusal_without_end(self) -> str | None:
        """Return why the run cannot go on without limits to its updates: the loaded plan is over; None if it can."""
        plan = self.planned
        if plan is None or self._is_changed or not self.needs_horizon or self.updates_done < plan["updates"]:
            return None
        rate = curves.by_group(curves.base_rates(self.optimizer), [self._factor_of(plan)(self.updates_done)])
        return (
            f"the {plan['updates']} updates for which {type(self).__name__} was planned were made, and no hook limits "
            f"the updates of the run now: the learning rate would stay {rate}; give StopAfter a number of updates"
        )

    def _keeps_rates(self, plan: Values, horizon: Horizon, until: int | None = None) -> bool:
        """Return whether the updates under a plan that were made have the same rates with another horizon.

        Raises:
            ArgumentError: see `factor`.
        """
        if horizon.updates == plan["updates"]:
            return True
        before = self._factor_of(plan)
        now = self.factor(horizon)
        return all(
            before(done) == now(done) for done in range(plan["began"], self.updates_done if until is None else until)
        )

    def _factor_of(self, plan: Values) -> Factor:
        return self.factor(horizon_of(plan))

    def _cooldown_begin(self, plan: Values) -> int | None:
        """Return the number of updates before the cool-down; None if there is none."""
        if self.cooldown is None or plan["updates"] is None:
            return None
        return int(plan["updates"]) - self.cooldown.updates(horizon_of(plan))

    def shown(self, horizon: Horizon) -> SchedulePlan:
        """Return the plan of a run of this length.

        Raises:
            ArgumentError: see `plan`.
        """
        name = type(self).__name__
        bases = curves.base_rates(self.optimizer)
        with_lengths = name + "".join(f", {length.name} {length}" for length in self.lengths())
        # a run that time ends
        if horizon.share is not None:
            return SchedulePlan(
                with_lengths,
                note="shares of the time in which the run trains",
                rates=curves.sampled(self.plan(horizon), TICKS, bases),
            )
        # a run whose length is not known yet
        if self.is_awaited(horizon) and self.planned is None:
            is_of_shares = all(length.unit == "%" for length in self.lengths())
            return SchedulePlan(
                with_lengths,
                note="the number of updates is known after the zeroth epoch",
                rates=curves.sampled(self.factor(Horizon(_NOMINAL)), _NOMINAL, bases) if is_of_shares else [],
            )
        # a run of a known length, or without an end
        factor = self.plan(horizon)
        plan = self.planned or {}
        updates = plan["updates"]
        planned = horizon_of(plan)
        name += "".join(f", {length.name} {counted(length.updates(planned), 'update')}" for length in self.lengths())
        if updates is None:
            return SchedulePlan(name, note="no hook limits the updates of the run")
        note = ""
        if "before" in plan:
            began = plan["began"]
            note = (
                f"on_extend=replan after {began} updates, from {curves.by_group(bases, [plan['before']])} "
                f"to {curves.by_group(bases, [factor(began)])}"
            )
        return SchedulePlan(name, updates, note=note, rates=curves.sampled(factor, max(updates, 1), bases))

    def begin(self, horizon: Horizon, loop: Loop | None = None) -> None:
        """Set the rates of the next update; called before the first update of each epoch.

        Args:
            horizon: the length of the run.
            loop: saves the checkpoint `before-cooldown`; None for none.

        Raises:
            ArgumentError: see `plan`.
        """
        if self.is_awaited(horizon) and self.planned is None:
            return  # before the zeroth epoch, or in `emrun check`
        self._factor = self.by_time(self.plan(horizon), horizon)
        # the checkpoint before the cool-down
        updates = self._cooldown_begin(self.planned or {}) if horizon.share is None else None
        self._at_cooldown = None
        if updates is not None and loop is not None and loop.has_run:
            self._at_cooldown = updates, loop
        # the parameter groups, of which a hook may have added some
        self._groups = list(zip(self.optimizer.param_groups, self.bases(), strict=True))
        self._set_rates()

    def bases(self) -> list[float]:
        """Return the rate of each parameter group of which the updates have shares."""
        return [float(group.setdefault("initial_lr", float(group["lr"]))) for group in self.optimizer.param_groups]

    def step(self, epoch_data: object = None) -> None:
        """Count an update, and set the rates of the next one."""
        self.updates_done += 1
        self._set_rates()
        if self._at_cooldown is not None and self.updates_done == self._at_cooldown[0]:
            self._at_cooldown[1].request_checkpoint(BEFORE_COOLDOWN, on_failure="warn")

    def _set_rates(self) -> None:
        if self._factor is None:
            return
        factor = self._factor(self.updates_done)
        for group, base in self._groups:
            if isinstance(group["lr"], Tensor):  # as optimizers that are captured in graphs need it
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def state_dict(self) -> State:
        """Return the updates done and the plan, with the class and the configured arguments."""
        return {
            "class": type(self).__name__,
            "configured": self._configured,
            "state": {"updates_done": self.updates_done, "plan": self.planned},
        }

    def load_state_dict(self, saved: Values) -> None:
        """Load what `state_dict` returned; the arguments are those of the config.

        Raises:
            StateError: the state belongs to another scheduler.
        """
        check_class(saved, "scheduler", type(self).__name__)
        self.updates_done = saved["state"]["updates_done"]
        self.planned = saved["state"]["plan"]
        began = 0 if self.planned is None else self.planned["began"]
        if not 0 <= began <= self.updates_done <= _MOST_DONE:  # they are compared one by one with those of a longer run
            raise StateError(f"the scheduler of the checkpoint has made {self.updates_done} updates")
        self._is_changed = saved["configured"] != self._configured
        self._factor = None


def horizon_of(plan: Values) -> Horizon:
    """Return the horizon of a plan."""
    return Horizon(plan["updates"], plan["updates_per_pass"])
