"""The plan of a run's learning rates, as `check`, `train` and `resume` show it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emrun.base.wording import counted

_LOG = logging.getLogger(__name__)

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The parts of the run at which the plan shows the rates: of the first update, of the last one, and between them."""

BEFORE_COOLDOWN = "before-cooldown"
"""The name of the checkpoint that a schedule requests at the last update before its cool-down."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 30  # characters of the curve


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The learning rates of a run.

    Args:
        name: the schedule with its parts, for example `Cosine, warm-up 10 updates`.
        updates: number of updates of the run; None if it is not known.
        steps: number of steps of the schedule in the run, if it steps after epochs; None if after updates.
        note: what is not known, and why; empty if nothing is.
        rates: for each parameter group, the learning rates at points that are evenly spread over the run: that of the
            first update, ..., that of the last one; empty if they are not known.
        optimizer: the name of the optimizer; empty if there is only one without a name.
        others: the plans of further optimizers.
    """

    name: str
    updates: int | None = None
    steps: int | None = None
    note: str = ""
    rates: Sequence[Sequence[float]] = ()
    optimizer: str = ""
    others: Sequence[SchedulePlan] = ()

    def lines(self) -> list[str]:
        """Return the plan as text: a line about the schedule, and a line for each sort of parameter groups."""
        length = [counted(self.updates, "update")] if self.updates is not None else []
        length += [counted(self.steps, "epoch")] if self.steps is not None else []
        of = f" of {self.optimizer}" if self.optimizer else ""
        first = f"learning rate{of}{' over ' if length else ''}{', '.join(length)}: {self.name}"
        lines = [f"{first}; {self.note}" if self.note else first]
        if self.updates != 0:
            for name, rates in self._by_group():
                points = ", ".join(f"{share:.0%} {at(rates, share):.3g}" for share in SHARES)
                lines.append(f"  {name}{points}  {curve(rates)}")
        return [*lines, *(line for each in self.others for line in each.lines())]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values.

        `rates` has those at 0, 25, 50, 75 and 100 % of the run, for each parameter group; `lines` is the plan as text.
        With several optimizers, `optimizer` is the name of the first, and `others` has the plans of the others.
        """
        rates = [[at(each, share) for share in SHARES] for each in self.rates]
        known = {"name": self.name, "updates": self.updates, "epochs": self.steps, "note": self.note, "rates": rates}
        several = {"optimizer": self.optimizer, "others": [each.as_dict() for each in self.others]}
        return {**known, **(several if self.optimizer else {}), "lines": self.lines()}

    def _by_group(self) -> list[tuple[str, Sequence[float]]]:
        """Return the different rates with the numbers of the groups that have them."""
        found: dict[tuple[float, ...], list[int]] = {}
        for number, rates in enumerate(self.rates):
            found.setdefault(tuple(rates), []).append(number)
        if len(found) == 1:
            return [("", rates) for rates in found]
        return [
            (f"{'groups' if len(numbers) > 1 else 'group'} {', '.join(map(str, numbers))}: ", rates)
            for rates, numbers in found.items()
        ]


def log_plan(plan: SchedulePlan | None) -> None:
    """Log a plan, if there is one."""
    if plan is not None:
        for line in plan.lines():
            _LOG.info("%s", line)


def at(rates: Sequence[float], share: float) -> float:
    """Return the rate at a share of the run."""
    return rates[round(share * (len(rates) - 1))]


def curve(rates: Sequence[float]) -> str:
    """Return rates as a line of block characters, from 0 to the highest rate."""
    highest = max(rates)
    count = min(_WIDTH, len(rates))
    shares = [at(rates, index / max(count - 1, 1)) / highest if highest > 0 else 0.0 for index in range(count)]
    return "".join(_BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)] for share in shares)
