"""Lengths of the phases of a schedule: a share of the run, updates, or passes of the train stream."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emrun.base.errors import ArgumentError
from emrun.base.types import Horizon

_UNITS = {"update": "updates", "pass": "passes"}
_FORMS = "write a share of the run such as '5%', or '500 updates', or '2 passes'"


@dataclass(frozen=True, slots=True)
class Length:
    """A number of updates that may depend on how long the run, or a pass, is.

    Args:
        count: the number of percent, updates or passes.
        unit: `%`, `updates` or `passes`.
        argument: the argument that it was given for, for messages.
    """

    count: float
    unit: str
    argument: str

    @classmethod
    def parse(cls, argument: str, value: object) -> Length:
        """Read a length.

        Args:
            argument: the name of the argument, for messages.
            value: a string such as `5%`, `500 updates` or `2 passes`.

        Raises:
            ArgumentError: the value is not a length.
        """
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(%|updates?|pass(?:es)?)\s*", str(value))
        if match is None:
            raise ArgumentError(argument, f"{value!r} is not a length with a unit; {_FORMS}")
        count = float(match[1])
        unit = _UNITS.get(match[2], match[2])
        if unit == "%" and count > 100:
            raise ArgumentError(argument, f"{value!r} is more than the whole run")
        if unit == "updates" and not count.is_integer():
            raise ArgumentError(argument, f"{value!r} is not a whole number of updates")
        return cls(count, unit, argument)

    def updates(self, horizon: Horizon) -> int:
        """Return the number of updates, rounded to the nearest whole number.

        Raises:
            ArgumentError: the number of updates of the run, or of a pass, is needed and not known.
        """
        if self.unit == "updates":
            return int(self.count)
        whole = horizon.updates if self.unit == "%" else horizon.updates_per_pass
        if whole is None:
            of = "the run" if self.unit == "%" else "a pass"
            missing = horizon.missing if self.unit == "%" else "add num_batches to the dataset, or give updates"
            raise ArgumentError(
                f"scheduler.{self.argument}", f"{self}, but the number of updates of {of} is not known: {missing}"
            )
        return int(self.count * whole / (100 if self.unit == "%" else 1) + 0.5)

    @property
    def name(self) -> str:
        """What the length is of, for messages."""
        words = {"warmup": "warm-up", "cooldown": "cool-down"}
        return words.get(self.argument, "milestone" if self.argument.startswith("milestones") else self.argument)

    def __str__(self) -> str:
        """Return the length as a config has it."""
        if self.unit == "%":
            return f"{self.count:g}%"
        singular = {"updates": "update", "passes": "pass"}[self.unit]
        return f"{self.count:g} {singular if self.count == 1 else self.unit}"
