"""What became of a statistic in a run: its last, lowest and highest value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from emrun.base.errors import StorageError
from emrun.runs.stored_run import StoredRun, statistic

Which = Literal["last", "min", "max"]


def chosen_by(save_best: Any) -> tuple[str, Literal["min", "max"]]:
    """Return the address and the condition by which the hook `SaveBest` with some arguments chooses."""
    given: dict[Any, Any] = save_best if isinstance(save_best, dict) else {}
    parts = [given.get("stream", "valid"), given.get("variable", "loss"), given.get("aggregation", "mean")]
    address = "/".join(str(part) for part in parts if part is not None)
    return address, "max" if given.get("condition") == "max" else "min"


@dataclass(slots=True)
class Summary:
    """The last, the lowest and the highest value of a statistic, each with its epoch; None if there is none.

    NaN is neither the lowest nor the highest value; of equal values, the earliest counts.
    """

    last: tuple[float, int] | None = None
    min: tuple[float, int] | None = None
    max: tuple[float, int] | None = None

    def add(self, value: float, epoch: int) -> None:
        """Add the value of an epoch."""
        self.last = value, epoch
        if not math.isnan(value):
            if self.min is None or value < self.min[0]:
                self.min = value, epoch
            if self.max is None or value > self.max[0]:
                self.max = value, epoch


class Summaries:
    """The statistics of a run that are asked for, all read in one pass over `metrics.jsonl`.

    Args:
        run: the run.
        addresses: the statistics that will be asked for, besides that of `SaveBest`.
        with_best: whether that of `SaveBest` will be asked for.
    """

    def __init__(self, run: StoredRun, addresses: Iterable[str] = (), *, with_best: bool = True) -> None:
        self.run = run
        self._addresses = list(addresses)
        self._with_best = with_best

    @cached_property
    def watched(self) -> tuple[str, Which]:
        """The address and the condition by which the hook `SaveBest` of the run chooses; without it, its default."""
        return chosen_by(self.run.value("hooks.SaveBest"))

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value of the statistic that `watched` names, and its epoch, as `SaveBest` has it."""
        address, condition = self.watched
        value: tuple[float, int] | None = getattr(self._summaries.get(address, (Summary(),))[0], condition)
        return value

    def of(self, address: str, which: Which) -> tuple[float, int] | None:
        """Return a value of a statistic and its epoch; None if the run has not recorded it.

        The zeroth epoch is neither the lowest nor the highest one, unless the run has no other.
        """
        every, trained = self._summaries.get(address, (Summary(), Summary()))
        counts = every if which == "last" or not self.run.epochs_done else trained
        value: tuple[float, int] | None = getattr(counts, which)
        return value

    @cached_property
    def _summaries(self) -> dict[str, tuple[Summary, Summary]]:
        """The summaries of each statistic: of all epochs, and of those but the zeroth."""
        addresses = set(self._addresses)
        if self._with_best:
            addresses.add(self.watched[0])
        summaries = {address: (Summary(), Summary()) for address in addresses}
        try:
            for epoch in self.run.epochs():
                for address, (every, trained) in summaries.items():
                    value = statistic(epoch, address)
                    if value is not None:
                        every.add(value, epoch["epoch"])
                        if epoch["epoch"] > 0:
                            trained.add(value, epoch["epoch"])
        except StorageError as error:
            self.run.note(str(error))
        return summaries
