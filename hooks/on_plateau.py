"""Act when a statistic has reached a plateau."""

from __future__ import annotations

import logging
from statistics import mean
from typing import Any

from emrun.base.arguments import check_choice, check_count
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData
from emrun.hook import AbstractHook
from emrun.hooks._shared.statistic import Condition, Statistic

_LOG = logging.getLogger(__name__)


class OnPlateau(AbstractHook):
    """Logs a line after each epoch in which a statistic is on a plateau; a base for hooks that do more.

    The statistic is on a plateau if its mean over the last `short_term` evaluations of its stream is worse than its
    mean over the last `long_term`. With fewer evaluations, the means are over those that there are.

        hooks:
          - ComputeStats: {variables: [loss]}
          - OnPlateau: {long_term: 20, short_term: 5}

    A derived hook overrides `on_plateau`. `StopOnPlateau` ends the training.

    Args:
        long_term: the number of evaluations of the long mean.
        short_term: the number of evaluations of the short mean.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped.
        variable: the variable, of which an earlier hook must write the mean.
        objective: `min` if smaller values are better, `max` if larger values are better.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or `long_term` is less than `short_term`.
        HookError: the statistic is missing or not a number.
    """

    reads = ()

    every_rank = True

    def __init__(
        self,
        long_term: int = 50,
        short_term: int = 10,
        stream: str = "valid",
        variable: str = "loss",
        objective: Condition = "min",
    ) -> None:
        super().__init__()
        check_count("long_term", long_term, minimum=1)
        check_count("short_term", short_term, minimum=1)
        if long_term < short_term:
            raise ArgumentError("long_term", f"{long_term} is less than short_term, {short_term}")
        check_choice("objective", objective, Condition)
        self._statistic = Statistic(type(self).__name__, variable, objective, stream, "mean")
        self._long_term = long_term
        self._short_term = short_term
        self._values: list[float] = []
        self.monitors = (self._statistic.address,)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Add the value of the epoch; call `on_plateau` if the statistic is on a plateau."""
        value = None if self.main_loop.evaluating or self.main_loop.at_end else self._statistic.read(epoch_data)
        if value is None:
            return
        self._values = [*self._values, value][-self._long_term :]
        if self.is_on_plateau:
            self.on_plateau()

    def on_plateau(self) -> None:
        """Act; called after each epoch in which the statistic is on a plateau."""
        _LOG.info("%s", self.plateau)

    @property
    def is_on_plateau(self) -> bool:
        """Whether the short mean is worse than the long mean; never, if one of them is NaN."""
        long, short = self._means()
        return self._statistic.is_better(long, short)

    @property
    def plateau(self) -> str:
        """The two means in words, for a message."""
        long, short = self._means()
        return (
            f"{self._statistic.address} is on a plateau: its mean is {short:g} over the last "
            f"{self._short_term} evaluations, {long:g} over the last {self._long_term}"
        )

    def _means(self) -> tuple[float, float]:
        recent = self._values[-self._short_term :]
        if not recent:
            return float("nan"), float("nan")
        return mean(self._values), mean(recent)  # exact: rounding makes no plateau of equal values

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the last `long_term` evaluations."""
        return {"of": self._statistic.identity, "values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values, unless this hook watches another statistic now."""
        if self._statistic.is_of(state, "its means begin anew"):
            self._values = list(state["values"])[-self._long_term :]
