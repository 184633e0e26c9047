"""How a schedule continues in a run that is made longer, if this changes the rates of updates that were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from emrun.base.errors import ArgumentError
from emrun.base.types import Horizon
from emrun.models.schedules.curves import Factor, rewarmed

OnExtend = Literal["replan", "hold", "rewarm"]
CHOICES: tuple[OnExtend, ...] = get_args(OnExtend)
OVERRIDE = "model.scheduler.on_extend="
"""The override of a choice, for messages."""


def check_choice(choice: object) -> None:
    """Check the argument `on_extend`.

    Raises:
        ArgumentError: it is none of the choices.
    """
    if choice is not None and choice not in CHOICES:
        raise ArgumentError("on_extend", f"{choice!r} is none of {', '.join(CHOICES)}")


def horizon_of(plan: Mapping[str, Any]) -> Horizon:
    """Return the number of updates over which a plan has its parts: after a `rewarm`, those that were left."""
    updates = plan["updates"]
    if plan.get("on_extend") == "rewarm":
        updates -= plan["began"]
    return Horizon(updates, plan["updates_per_pass"])


def factor_of(plan: Mapping[str, Any], factor: Callable[[Horizon], Factor], warmup: int) -> Factor:
    """Return the rates of a plan.

    Args:
        plan: the plan; one that extends another has `on_extend`, and in `rate` the share of the last update before it.
        factor: gives the rates of the schedule over a horizon.
        warmup: number of updates of the warm-up.
    """
    choice = plan.get("on_extend")
    if choice == "hold":
        rate = plan["rate"]
        return lambda done: rate
    curve = factor(horizon_of(plan))
    return rewarmed(plan["began"], plan["rate"], warmup, curve) if choice == "rewarm" else curve


def described(
    rates_of: Callable[[str], Factor], name: str, bases: Sequence[float], done: int, updates: tuple[int, int]
) -> str:
    """Return the question how a longer run continues, with the rates of each choice.

    Args:
        rates_of: gives the rates of a choice.
        name: the name of the schedule.
        bases: the base rates of the parameter groups.
        done: number of updates that were made.
        updates: number of updates that the run had, and that it has now.

    Returns:
        Several lines.
    """
    lines = [
        f"{name} was planned for {updates[0]} updates, and the run now makes {updates[1]}: this changes the rates of "
        f"the {done} updates that were made already. Choose with an override how it continues; the rates are those of "
        "the next update, halfway, and of the last one:"
    ]
    places = (done, (done + updates[1] - 1) // 2, updates[1] - 1)
    for choice in CHOICES:
        try:
            factor = rates_of(choice)
        except ArgumentError as error:
            shown = f"not possible: {error}"
        else:
            shown = by_group(bases, [factor(place) for place in places])
        lines.append(f"  {OVERRIDE}{choice:6}  {shown}")
    return "\n".join(lines)


def by_group(bases: Sequence[float], shares: Sequence[float]) -> str:
    """Return the rates of parameter groups as text, those of different groups apart."""
    found: dict[float, list[str]] = {}
    for number, base in enumerate(bases):
        found.setdefault(base, []).append(str(number))
    texts = {base: ", ".join(f"{base * share:.3g}" for share in shares) for base in found}
    if len(found) == 1:
        return next(iter(texts.values()))
    named = {base: f"group{'s' * (len(each) > 1)} {', '.join(each)}" for base, each in found.items()}
    return "; ".join(f"{named[base]}: {text}" for base, text in texts.items())
