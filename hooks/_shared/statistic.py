"""A statistic that a hook watches: where it is in the data of an epoch, and which of its values are better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from emrun.base.arguments import check_choice
from emrun.base.types import EpochData
from emrun.epoch_data import number_at

_LOG = logging.getLogger(__name__)

Condition = Literal["min", "max"]
"""Whether smaller or larger values are better."""


class Statistic:
    """A number that earlier hooks write into the data of an epoch.

    Args:
        owner: the class of the hook that watches the statistic, for messages.
        variable: the variable.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable.
        aggregation: the aggregation; None or empty for the mean, or for the one plain number of the variable.

    Raises:
        ArgumentError: `condition` has another value.
    """

    def __init__(self, owner: str, variable: str, condition: str, stream: str, aggregation: str | None) -> None:
        check_choice("condition", condition, Condition)
        self._owner = owner
        self._sign = 1.0 if condition == "max" else -1.0
        self.condition = condition
        self.address = "/".join(str(part) for part in (stream, variable, aggregation) if part)
        """`stream/variable/aggregation`, or `stream/variable`."""
        self.identity = [self.address, self._sign]
        """What must be equal for values to be comparable; plain types, for the state of a hook."""

    def is_of(self, state: Mapping[str, Any], else_: str) -> bool:
        """Return whether the state of a hook, with `of`, is of this statistic; if not, warn of what happens instead."""
        is_same = bool(state["of"] == self.identity)
        if not is_same:
            _LOG.warning(
                "%s now watches another statistic, %s (%s); %s", self._owner, self.address, self.condition, else_
            )
        return is_same

    def read(self, epoch_data: EpochData) -> float | None:
        """Return the value in the data of an epoch; None if the stream was not evaluated.

        Raises:
            HookError: the statistic is missing, or not a number.
        """
        return number_at(epoch_data, self.address, self._owner)

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better than another one by more than `by`.

        NaN is never better, and any other value is better than None.
        """
        return not math.isnan(value) and (than is None or self._sign * value > self._sign * than + by)
