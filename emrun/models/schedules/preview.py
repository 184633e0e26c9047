"""Running torch's schedulers ahead of the training: the learning rates they will give."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

from emrun.base.errors import ArgumentError, reason_of
from emrun.base.types import State
from emrun.models.optimizers.bare_step import mark_as_stepped

INNER = "_schedulers"
"""The attribute of torch's schedulers with their inner schedulers, and the key of the states of these."""
MOST_STEPS = 50_000
"""Schedules of more steps are not run ahead, which would take seconds."""

_NOTHING = 1e-6  # share of the highest rate that trains nothing


def all_in(scheduler: Any, key: str = "scheduler") -> State:
    """Return key in the section of the model -> scheduler, of a scheduler and its inner ones, at any depth."""
    schedulers = {key: scheduler}
    for index, inner in enumerate(getattr(scheduler, INNER, ())):
        schedulers |= all_in(inner, f"{key}.schedulers.{index}")
    return schedulers


def on_dummy(scheduler: Any) -> Any:
    """Return a copy of a scheduler, with an optimizer of its own that trains nothing.

    The user's functions in it are shared, because they may hold anything.

    Returns:
        The copy; None if there is no scheduler, if it, or one inside of it, is not torch's, or if it cannot be copied.
    """
    schedulers = all_in(scheduler).values()
    if not all(type(each).__module__ == lr_scheduler.__name__ for each in schedulers):
        return None
    # the optimizer
    dummy = torch.optim.SGD([Parameter(torch.zeros(()))], lr=0.0)
    mark_as_stepped(dummy)
    # what the copy shares
    shared = {id(scheduler.optimizer): dummy}
    for each in schedulers:
        shared |= {
            id(function): function
            for function in (*getattr(each, "lr_lambdas", ()), getattr(each, "_scale_fn_custom", None))
        }
    # the copy
    try:
        dummy.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} | {"params": []}
            for group in scheduler.optimizer.param_groups
        ]
        return copy.deepcopy(scheduler, shared)
    except Exception:  # of values that the user's optimizer holds
        return None


def steps_made(scheduler: Any) -> int:
    """Return the number of steps that a scheduler has made."""
    return max(getattr(each, "last_epoch", 0) for each in all_in(scheduler).values())


def rates_ahead(scheduler: Any, steps: int, unit: str) -> list[list[float]]:
    """Run a scheduler to the end of a run.

    Args:
        scheduler: a copy as `on_dummy` makes it, which is changed.
        steps: the number of steps in the run; those that were made count.
        unit: what a step is made after: `updates` or `epochs`.

    Returns:
        For each parameter group, the rate before each step that was left, and after the last one.

    Raises:
        ArgumentError: a step raises an error.
    """
    groups = scheduler.optimizer.param_groups
    rates = [[float(group["lr"])] for group in groups]
    for made in range(steps_made(scheduler), steps):
        try:
            with warnings.catch_warnings(action="ignore"):  # the real steps give them again
                scheduler.step()
            if not all(math.isfinite(group["lr"]) for group in groups):
                raise ArithmeticError(f"its next rate is {float(groups[0]['lr'])}")
        except Exception as error:  # also of the user's functions
            limited = [key for key, each in all_in(scheduler).items() if hasattr(each, "total_steps")]
            reason = (reason_of(error).strip().splitlines() or [type(error).__name__])[0]
            raise ArgumentError(
                f"{limited[0]}.total_steps" if limited else "scheduler",
                f"{type(scheduler).__name__} makes {made} steps, but the run has {steps} {unit} (torch: {reason})",
            ) from error
        for rates_of_group, group in zip(rates, groups, strict=True):
            rates_of_group.append(float(group["lr"]))
    return rates


def without_rate(rates: Sequence[Sequence[float]], bases: Sequence[float]) -> int:
    """Return in how many of the steps that are left the rate of every group is 0, or nearly.

    Args:
        rates: what `rates_ahead` returns.
        bases: the rates that the optimizer was built with.
    """
    least = _NOTHING * max(*bases, *map(max, rates))
    return sum(max(of_groups) <= least for of_groups in list(zip(*rates, strict=True))[:-1])
