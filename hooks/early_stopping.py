"""End the training when a statistic has stopped improving."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from emrun.base.arguments import check_count, check_number
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData, Interval, Units
from emrun.base.wording import counted
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.hooks._shared.statistic import Condition, Statistic
from emrun.record.intervals import done

_LOG = logging.getLogger(__name__)

_UNITS = ("epochs", "updates", "iterations")


class EarlyStopping(AbstractHook):
    """Ends the training successfully when a statistic has not improved for several evaluations of its stream.

        hooks:
          - ComputeStats: {variables: [loss]}
          - EarlyStopping: {variable: loss, condition: min, patience: 5}

    The zeroth epoch counts as an evaluation; epochs in which the stream is not evaluated do not count. Of equal values
    the earliest is the best. NaN never improves. `SaveBest` saves the checkpoint of the best epoch.

    The count survives a resume. A run that this hook has ended ends again at once when it is resumed, unless it has
    more patience: `emrun resume RUN_DIR hooks.EarlyStopping.patience=10`.

    Args:
        variable: the variable to compare.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable.
        aggregation: the aggregation to compare; of a variable with one plain number, `mean` is this number.
        patience: the training ends after this many evaluations in a row without an improvement; null for never, if
            there is a threshold.
        min_delta: by how much a value must be better than the best one to count as an improvement.
        not_before: the training does not end before this interval has passed: `10 epochs`, `500 updates`, `500
            iterations`; a bare number means epochs. Evaluations before it count.
        threshold: the training ends if no value has been at least as good as this one when `not_before` has passed.

    Raises:
        ArgumentError: an argument has a value that is not allowed; `threshold` is given without `not_before`; or
            neither `patience` nor `threshold` is given.
        HookError: the statistic is missing or not a number.
    """

    reads = ()

    def __init__(
        self,
        variable: str = "loss",
        condition: Condition = "min",
        stream: str = "valid",
        aggregation: str | None = "mean",
        patience: int | None = 5,
        min_delta: float = 0.0,
        not_before: Annotated[int | str, Units(("epochs", "updates", "iterations"))] | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__()
        if patience is not None:
            check_count("patience", patience, minimum=1)
        elif threshold is None:
            raise ArgumentError("patience", "give patience, or threshold with not_before")
        check_number("min_delta", min_delta, "a number of at least 0", least=0)
        if threshold is not None:
            check_number("threshold", threshold)
            if not_before is None:
                raise ArgumentError("threshold", "add not_before, when the threshold must have been reached: 10 epochs")
        self._statistic = Statistic("EarlyStopping", variable, condition, stream, aggregation)
        self._patience = patience
        self._min_delta = min_delta
        self._not_before = None if not_before is None else Interval.parse("not_before", not_before, _UNITS)
        self._threshold = threshold
        self._best: float | None = None
        self._best_epoch = 0
        self._evaluations = 0
        self._since_best = 0  # evaluations
        self.monitors = (self._statistic.address,)

    def before_training(self) -> None:
        """End a resumed training that this hook has ended already."""
        if self.main_loop.iterations_done:
            self._end_if_due()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Compare the value of the epoch; end the training if the patience is used up or the threshold was missed."""
        value = None if self.main_loop.evaluating or self.main_loop.at_end else self._statistic.read(epoch_data)
        if value is None:
            return
        self._evaluations += 1
        if self._statistic.is_better(value, self._best, self._min_delta):
            self._best = value
            self._best_epoch = epoch_id
            self._since_best = 0
        else:
            self._since_best += 1
        self._end_if_due()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value with its epoch, and the evaluations so far and since the best value."""
        best = None if self._best is None else {"value": self._best, "epoch": self._best_epoch}
        return {
            "of": self._statistic.identity,
            "best": best,
            "evaluations": self._evaluations,
            "since_best": self._since_best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count, unless this hook watches another statistic now."""
        if not self._statistic.is_of(state, "its patience begins anew"):
            return
        if state["best"] is not None:
            self._best = state["best"]["value"]
            self._best_epoch = state["best"]["epoch"]
        self._evaluations = state["evaluations"]
        self._since_best = state["since_best"]

    def _end_if_due(self) -> None:
        """End the training if the patience is used up or the threshold was missed.

        Raises:
            TrainingTerminated: it is.
        """
        first = self._not_before
        if not self._evaluations or (first is not None and done(self.main_loop, first.unit) < first.count):
            return
        address = self._statistic.address
        best = self._best
        epoch = self._best_epoch
        if self._patience is not None and self._since_best >= self._patience:
            times = counted(self._since_best, "evaluation")
            since = "was never a number" if best is None else f"has not improved since epoch {epoch} ({best:g})"
            raise TrainingTerminated(f"{address} {since}: {times} (EarlyStopping patience: {self._patience})")
        threshold = self._threshold
        if threshold is not None and (best is None or self._statistic.is_better(threshold, best)):
            reached = "was never a number" if best is None else f"has come to {best:g} at best, in epoch {epoch},"
            raise TrainingTerminated(
                f"{address} {reached} after {first} (EarlyStopping threshold: {threshold:g}, not_before: {first})"
            )
