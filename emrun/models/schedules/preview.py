"""Running torch's schedulers ahead of the training: the learning rates they will give, and whether they fit the run."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR

from emrun.base.errors import ArgumentError, reason_of

PARTS = "_schedulers"  # where torch's schedulers store their inner schedulers, and the states of these
MOST_STEPS = 50_000
"""Schedules of more steps are not run ahead, which would take seconds."""

_FEW = 3  # a run of so few steps is a trial, of which nothing is expected
_FACTOR = 10  # a length that is so many times the number of steps was meant in another unit
_LONG_BEFORE = 3  # a schedule that ends before this part of the run
_NOTHING = 1e-6  # share of the highest rate that trains nothing
_LENGTHS = ("T_max", "total_steps", "total_iters", "step_size", "T_0")


def all_in(scheduler: Any, key: str = "scheduler") -> dict[str, Any]:
    """Return key in the section of the model -> scheduler, of a scheduler and its inner ones, at any depth."""
    found = {key: scheduler}
    for index, part in enumerate(getattr(scheduler, PARTS, ())):
        found |= all_in(part, f"{key}.schedulers.{index}")
    return found


def on_dummy(scheduler: Any) -> Any:
    """Return a copy of a scheduler, with an optimizer of its own that trains nothing.

    The user's functions in it are shared, because they may hold anything.

    Returns:
        The copy; None if the scheduler, or one inside of it, is not torch's, or if it cannot be copied.
    """
    inside = all_in(scheduler).values()
    if not all(type(each).__module__ == lr_scheduler.__name__ for each in inside):
        return None
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)
    dummy._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns
    own = [(*getattr(each, "lr_lambdas", ()), getattr(each, "_scale_fn_custom", None)) for each in inside]
    shared = {id(scheduler.optimizer): dummy, **{id(function): function for functions in own for function in functions}}
    try:
        dummy.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} | {"params": []}
            for group in scheduler.optimizer.param_groups
        ]
        return copy.deepcopy(scheduler, shared)
    except Exception:  # of values that the user's optimizer holds
        return None


class End(NamedTuple):
    """A scheduler that has made all its steps, and the key that sets their number."""

    scheduler: Any
    key: str
    made: int
    end: float


def ends(scheduler: Any, state: Mapping[str, Any], key: str = "model.scheduler") -> list[End] | None:
    """Return the parts of a scheduler that have ended; None if the scheduler continues or has no end.

    A warm-up that has ended does not count: it has led to the intended rate.

    Args:
        scheduler: the scheduler.
        state: its state.
        key: its key in the config.
    """
    if parts := getattr(scheduler, PARTS, None):
        inside = [
            (part, its, f"{key}.schedulers.{index}")
            for index, (part, its) in enumerate(zip(parts, state[PARTS], strict=True))
        ]
        if "_milestones" in state:
            is_in_last = all(state["last_epoch"] >= milestone for milestone in state["_milestones"])
            return ends(*inside[-1]) if is_in_last else None
        found = [ends(*each) for each in inside]
        return None if None in found else [end for its in found for end in its or ()]
    name = next(
        (each for each in ("T_max", "total_steps", "total_iters") if isinstance(state.get(each), int | float)), None
    )
    made = state.get("last_epoch")
    if name is None or not isinstance(made, int) or made < state[name]:
        return None
    is_left_out = name == "total_iters" and is_warmup(scheduler)
    return [] if is_left_out else [End(scheduler, f"{key}.{name}", made, state[name])]


def is_warmup(scheduler: Any) -> bool:
    """Return whether a scheduler raises the rate to where the optimizer has it, or keeps it there."""
    first = getattr(scheduler, "start_factor", getattr(scheduler, "factor", 1.0))
    return isinstance(scheduler, LinearLR | ConstantLR) and getattr(scheduler, "end_factor", 1.0) >= first


class Ahead:
    """A scheduler that has been run to the end of a run, on a dummy optimizer.

    Args:
        scheduler: a copy as `on_dummy` makes it, which is changed.
        steps: number of steps in the run.
        unit: what a step is made after: `updates` or `epochs`.

    Attributes:
        rates: for each parameter group, the rate before each step and after the last one; shorter after an error.
        error: what a step raised; None if none did.
    """

    def __init__(self, scheduler: Any, steps: int, unit: str) -> None:
        self._scheduler, self._steps, self._unit = scheduler, steps, unit
        groups = scheduler.optimizer.param_groups
        self.rates: list[list[float]] = [[float(group["lr"])] for group in groups]
        self.error: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real steps give them again
            try:
                for _ in range(steps):
                    scheduler.step()
                    if not all(math.isfinite(group["lr"]) for group in groups):
                        raise ArithmeticError(f"its next rate is {float(groups[0]['lr'])}")
                    for rates, group in zip(self.rates, groups, strict=True):
                        rates.append(float(group["lr"]))
            except Exception as error:  # also of the user's functions
                self.error = error

    def check(self, updates: int | None) -> None:
        """Check that the schedule fits the run.

        Args:
            updates: number of updates of the run; None if it is not known.

        Raises:
            ArgumentError: a step raises an error, the schedule ends long before the run, it does not get to its decay,
                or its length was meant in updates instead of epochs.
        """
        self.check_steps()
        steps, unit, name = self._steps, self._unit, type(self._scheduler).__name__
        run, lengths = f"the {steps} {unit} of the run", _lengths(self._scheduler)
        for key, length in lengths.items():
            near = updates is not None and abs(length - updates) <= max(1, updates / 20)
            if unit == "epochs" and length >= _FACTOR * steps and (near or steps > _FEW):
                raise ArgumentError(
                    key,
                    f"{length:g} is far more than {run}, after each of which {name} steps; if updates are meant, add "
                    f"step_on: update, otherwise write {_last(key)}: {steps}",
                    f"set {steps}",
                )
        if steps > _FEW:
            self._check_course(run, lengths)

    def check_steps(self) -> None:
        """Check that the scheduler makes all steps of the run.

        Raises:
            ArgumentError: a step raises an error.
        """
        if self.error is not None:
            made, steps, name = len(self.rates[0]) - 1, self._steps, type(self._scheduler).__name__
            key = next((key for key in _lengths(self._scheduler) if key.endswith("total_steps")), "")
            advice = f"; {_last(key)} must be at least {steps}" if key else ""
            reason = (reason_of(self.error).strip().splitlines() or [type(self.error).__name__])[0]
            message = f"{name} makes {made} steps, but the run has {steps} {self._unit}{advice} (torch: {reason})"
            raise ArgumentError(key or "scheduler", message)

    def _check_course(self, run: str, lengths: Mapping[str, float]) -> None:
        """Check that the rates change in the run, and that no part of it is left out or has a rate near 0."""
        steps, unit, name = self._steps, self._unit, type(self._scheduler).__name__
        meant = "; if epochs are meant, remove step_on: update" if unit == "updates" else ""
        hint = f"{meant}; a schedule that follows the length of the run is {_EXAMPLE}"
        highest, final = max(max(each) for each in self.rates), self.rates[0][-1]
        for end in ends(self._scheduler, self._scheduler.state_dict(), "scheduler") or ():
            climbs = isinstance(end.scheduler, CosineAnnealingLR)
            if end.end * _LONG_BEFORE < end.made and (climbs or final <= 1e-3 * highest):
                whole = run if end.made == steps else f"the {end.made} {unit} that it gets"
                then = "climbs again" if climbs else f"stays at {final:g}"
                raise ArgumentError(
                    end.key,
                    f"{type(end.scheduler).__name__} ends after {end.end:g} of {whole}, and the rate then {then}; "
                    f"write {_last(end.key)}: {end.made}{hint}",
                    f"set {end.made}",
                )
        for key, each in all_in(self._scheduler).items():
            last = max(getattr(each, "_milestones", ()), default=0)
            if last >= steps:
                message = f"the last scheduler begins at step {last}, after {run}; make the parts before it shorter"
                raise ArgumentError(f"{key}.milestones", message)
            if is_warmup(each) and each.total_iters > steps:
                message = f"the warm-up of {each.total_iters} steps is longer than {run}"
                raise ArgumentError(f"{key}.total_iters", message)
        tiny = sum(each < _NOTHING * highest for each in self.rates[0][:-1])
        if steps - tiny < steps / _LONG_BEFORE:
            message = f"{name} decays the rate to less than a millionth after {steps - tiny} of {run}{hint}"
            raise ArgumentError("scheduler", message)
        depends = not any(hasattr(each, "lr_lambdas") for each in all_in(self._scheduler).values())
        if depends and all(max(each[:-1]) - min(each[:-1]) <= 0.01 * max(each) for each in self.rates):
            where = "; ".join(f"{_last(key)} is {length:g}" for key, length in lengths.items())
            raise ArgumentError(
                next(iter(lengths), "scheduler"),
                f"{name} changes the rate by less than 1 % in {run}{f' ({where})' if where else ''}; make it shorter, "
                f"or use a schedule that follows the length of the run, {_EXAMPLE}",
            )


_EXAMPLE = "{class: Cosine, warmup: 5%}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _lengths(scheduler: Any) -> dict[str, float]:
    """Return key -> number of steps, of the arguments that say how long a schedule, or a part of it, is."""
    found: dict[str, float] = {}
    for key, each in all_in(scheduler).items():
        found |= {
            f"{key}.{name}": getattr(each, name)
            for name in _LENGTHS
            if isinstance(getattr(each, name, None), int | float)
        }
        if milestones := getattr(each, "milestones", None) or getattr(each, "_milestones", ()):
            found[f"{key}.milestones"] = min(milestones)
    return found
