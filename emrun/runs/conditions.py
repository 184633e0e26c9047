"""Conditions that runs are chosen by, such as `model.module.channels=32` and `valid/loss<0.3`."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from emrun.base.errors import ConfigError, UsageError
from emrun.base.wording import did_you_mean, in_one_line, listed
from emrun.config.names import same_class
from emrun.config.yaml_tree import parse_typed
from emrun.runs.columns import Column, Row, check_known, column, rows_of
from emrun.runs.stored_run import MISSING, STATUSES, StoredRun, moment

_CONDITION = re.compile(r"([^=!<>]+)(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_NOT_FINITE = re.compile(r"[+-]?\.?(nan|inf|infinity)", re.IGNORECASE)  # as values of statistics are shown and written
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a value of a run. A run without the value meets only `!=`.

    Args:
        column: the value.
        sign: one of `=`, `!=`, `<`, `<=`, `>`, `>=`.
        wanted: what the value is compared with.
    """

    column: Column
    sign: str
    wanted: Any

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition, `NAME=VALUE`, with a name as `column` takes it.

        A value is YAML; of an age or a duration a time such as `2d`, of a size such as `1GB`, of `begin` and `end` a
        date. Classes are compared as in a config: Digits is emrun.datasets.digits.Digits.

        Raises:
            UsageError: it is not a condition.
        """
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(f"{in_one_line(text)!r} is not a condition; write for example model.optimizer.lr=0.1")
        left_side = column(match[1].strip())
        return cls(left_side, match[2].replace("==", "="), _wanted(left_side, match[3].strip()))

    def holds(self, row: Row) -> bool:
        """Return whether a run meets the condition."""
        value = self.column.of(row)
        if self.sign in ("=", "!="):
            return (value is not MISSING and self._equals(value)) is (self.sign == "=")
        return self._has_order(value) and _ORDERS[self.sign](value, self.wanted)

    def check(self, rows: Iterable[Row]) -> None:
        """Check that the values of some run can be compared with the wanted one.

        Raises:
            UsageError: no value can, such as numbers with a text.
        """
        if self.sign in ("=", "!="):
            return
        values = [value for value in map(self.column.of, rows) if value is not MISSING]
        if values and not any(map(self._has_order, values)):
            raise UsageError(
                f"{in_one_line(self.column.name)} {self.sign} {in_one_line(str(self.wanted))} cannot be "
                f"compared: a run has {in_one_line(str(values[0]))}"
            )

    def _has_order(self, value: Any) -> bool:
        comparable = (int, float), (str,), (datetime,)
        return any(
            all(isinstance(operand, kind) and not isinstance(operand, bool) for operand in (value, self.wanted))
            for kind in comparable
        )

    def _equals(self, value: Any) -> bool:
        if self.column.unit == "class":
            return same_class(value, self.wanted)
        if isinstance(value, float) and isinstance(self.wanted, float) and math.isnan(value):
            return math.isnan(self.wanted)
        return bool(value == self.wanted) and isinstance(value, bool) is isinstance(self.wanted, bool)


def chosen(
    runs: Iterable[StoredRun], root: Path, wanted: Sequence[Condition], columns: Sequence[Column]
) -> tuple[list[Row], list[Row]]:
    """Return all runs as rows, and those that meet conditions.

    Args:
        runs: the runs.
        root: the directory to which their names are relative.
        wanted: the conditions.
        columns: what else is asked of each run.

    Raises:
        UsageError: no run has the value of a column, or one that can be compared with the value of a condition.
    """
    needed = [*columns, *(condition.column for condition in wanted)]
    rows = rows_of(runs, root, needed)
    check_known(needed, rows)
    for condition in wanted:
        condition.check(rows)
    return rows, [row for row in rows if all(condition.holds(row) for condition in wanted)]


def _wanted(left_side: Column, text: str) -> Any:
    match left_side.unit:
        case "seconds":
            return time_of(text, left_side.name)
        case "bytes":
            return quantity(text, _BYTES, "a size such as 500MB or 2GB", left_side.name)
        case "status" if text not in STATUSES:
            raise UsageError(f"{text!r} is not a status{did_you_mean(text, STATUSES)} (there are {listed(STATUSES)})")
        case "time":
            if (time := moment(text)) is None:
                raise UsageError(f"{left_side.name}: {text!r} is not a time; write for example 2026-11-20")
            return time
        case "status":
            return text
    if left_side.is_number and _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    try:
        return parse_typed(text, "condition", f"for a text, write {left_side.name}={json.dumps(text)}").plain()
    except ConfigError as error:
        raise UsageError(f"{left_side.name}: {error.problems[0].message}") from error


def quantity(text: str, units: dict[str, Any], example: str, name: str) -> float:
    """Return a number with its unit as a number of the smallest unit.

    Raises:
        UsageError: it is not one.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        lacks = "; the unit is missing" if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else ""
        raise UsageError(f"{name}: {in_one_line(text)!r} is not {example}{lacks}")
    return float(match[1]) * float(units[match[2]])


def time_of(text: str, name: str) -> float:
    """Return a time such as `30d` in seconds.

    Raises:
        UsageError: it is not a time.
    """
    return quantity(text, _SECONDS, "a time such as 30d, 12h or 5min", name)
