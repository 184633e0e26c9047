"""A statistic that a hook watches: where it is in the data of an epoch, and which of its values are better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData
from emrun.base.wording import listed

Condition = Literal["min", "max"]
"""Whether smaller or larger values are better."""


class Statistic:
    """A number that earlier hooks write into the data of an epoch.

    Args:
        owner: the class of the hook that watches the statistic, for messages.
        variable: the variable.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable.
        aggregation: the aggregation; None or empty if the data of the epoch has one plain number for the variable.
        argument: the argument of the condition, for messages.

    Raises:
        ArgumentError: `condition` has another value.
    """

    def __init__(
        self,
        owner: str,
        variable: str,
        condition: str,
        stream: str,
        aggregation: str | None,
        argument: str = "condition",
    ) -> None:
        check_choice(argument, condition, Condition)
        self._owner = owner
        self._path = (stream, variable, aggregation) if aggregation else (stream, variable)
        self._sign = 1.0 if condition == "max" else -1.0
        self.condition = condition
        self.address = "/".join(str(part) for part in self._path)
        """`stream/variable/aggregation`, or `stream/variable` for a plain number."""
        self.identity = [self.address, self._sign]
        """What must be equal for values to be comparable; plain types, for the state of a hook."""

    @classmethod
    def at(cls, owner: str, argument: str, address: Any, condition: Any) -> Statistic:
        """Return the statistic at an address `stream/variable` (its mean) or `stream/variable/aggregation`.

        Raises:
            ArgumentError: the address has another form, or `condition` is neither `min` nor `max`.
        """
        parts = address.split("/") if isinstance(address, str) else []
        if len(parts) not in (2, 3) or not all(parts):
            raise ArgumentError(argument, f"{address!r} is not an address such as valid/loss or valid/loss/mean")
        stream, variable, aggregation = (*parts, "mean")[:3]
        return cls(owner, variable, condition, stream, aggregation, argument)

    def read(self, epoch_data: EpochData) -> float | None:
        """Return the value in the data of an epoch; None if the stream was not evaluated.

        Raises:
            HookError: the statistic is missing, or not a number.
        """
        value: Any = epoch_data
        if self._path[0] not in epoch_data:
            return None
        for part in self._path:
            if not isinstance(value, Mapping) and self._path[2:] == ("mean",):
                break  # a plain number is its own mean
            if not isinstance(value, Mapping) or part not in value:
                there = listed(list(value)) if isinstance(value, Mapping) else f"the number {value}"
                raise HookError(f"{self._owner} monitors {self.address}, but there is no {part!r}: there is {there}")
            value = value[part]
        if isinstance(value, Mapping) and value:
            raise HookError(
                f"{self._owner} monitors {self.address}, which has the aggregations {listed(list(map(str, value)))}; "
                "set aggregation to one of them"
            )
        number = _number(value)
        if number is None:
            raise HookError(f"{self._owner} monitors {self.address}, which is not a number: {_shown(value)}")
        return number

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better than another one by more than `by`.

        NaN is never better, and any other value is better than None.
        """
        return not math.isnan(value) and (than is None or self._sign * value > self._sign * than + by)


def _number(value: Any) -> float | None:
    """Return a number, or the only number in an array or tensor; None for any other value."""
    if isinstance(value, str | bytes):
        return None
    item = getattr(value, "item", None)  # of arrays and tensors
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    """Return a short description of a value."""
    shape = getattr(value, "shape", None)
    return repr(value)[:40] if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
