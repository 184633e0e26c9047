"""Write the statistics of epochs to the log, and means of the train stream between epochs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData, EpochVariable, Period
from emrun.base.wording import did_you_mean, short
from emrun.epoch_data import Lowest, brief_statistics, is_rate, learning_rates, number
from emrun.hook import AbstractHook, Loop
from emrun.hooks._shared.aggregations import read
from emrun.record.interval_rows import LAST, written_by
from emrun.record.intervals import Every
from emrun.record.rows import Row

_LOG = logging.getLogger(__name__)

UnknownType = Literal["error", "warn", "str", "ignore"]


class LogVariables(AbstractHook):
    """Logs one line per stream after every epoch: `epoch 3  valid  loss 0.1240  accuracy 0.9611`.

    A mean is logged under the name of its variable, any other aggregation as `variable/aggregation`; of a statistic of
    more than four classes, the mean and the three lowest. The line of the train stream ends with the learning rate of
    the last update (several, if the parameter groups have different ones) and the seconds of the epoch, evaluations
    included: `epoch 3  train  loss 0.1173  lr 0.001  12.3 s`.

        hooks:
          - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}
          - LogVariables: {variables: [loss], every: 50 updates}

    With `every: 50 updates`, there is also a line after every 50 updates, with the means of the train stream since the
    last line: `epoch 3  iteration 250  train  loss 0.1240  lr 0.001`. Other aggregations are those of `ComputeStats`,
    and `last`, the value of the last batch:

        - LogVariables: {variables: [{loss: [mean, max, std, last]}], every: 50 updates}

    Other hooks with the same `every`, such as `WriteCSV` and trackers, then have them too, by the name `loss/max`.

    Args:
        variables: which variables of the epoch are logged, and with which aggregations between epochs; by default the
            means of all.
        on_unknown_type: what to do if a value is not a number: `error`, `warn`, `str` (log the value as a string) or
            `ignore`.
        every: how often lines are logged: `5 epochs` for fewer lines; `50 updates`, `500 iterations` or `5 minutes` for
            more, of the variables that the batches have. A number without a unit means epochs.

    Raises:
        ArgumentError: `variables` has another form, or aggregations although no line is logged between epochs; `every`
            is not an interval, or `on_unknown_type` has another value.
        HookError: a value is not a number and `on_unknown_type` is `error`, or no stream has a listed variable.
    """

    reads = ()

    def __init__(
        self,
        variables: Sequence[EpochVariable | Mapping[EpochVariable, str | Sequence[str]]] | None = None,
        on_unknown_type: UnknownType = "ignore",
        every: Period = 1,
    ) -> None:
        super().__init__()
        check_choice("on_unknown_type", on_unknown_type, UnknownType)
        aggregations = read(variables, (LAST,)) if variables else {}
        self.variables = None if variables is None else list(aggregations)
        self._aggregations = None if variables is None else aggregations
        statistics = [
            name if aggregation == "mean" else f"{name}/{aggregation}"
            for name, names in aggregations.items()
            for aggregation in names
        ]
        self._means = None if variables is None else statistics
        self._on_unknown_type = on_unknown_type
        self._every = Every("every", every)
        if not self._every.is_within_epochs and any(names != ["mean"] for names in aggregations.values()):
            raise ArgumentError(
                "variables",
                "aggregations are those between epochs: set every to updates, or list them in ComputeStats "
                "for the lines of epochs",
            )
        self._interval = ""

    def register_mainloop(self, main_loop: Loop) -> None:
        """Ask for the means between epochs."""
        super().register_mainloop(main_loop)
        self._interval = main_loop.rows.intervals.ask("LogVariables", self._every, self._aggregations)

    def before_training(self) -> None:
        """Listen to the rows that the run records."""
        if self._interval:
            self.main_loop.rows.listeners.append(self._log_means)

    def _log_means(self, row: Row) -> None:
        """Log the means of the train stream since the last line."""
        if row.every != self._interval:
            return
        parts = [
            f"{name} {_readable(value)}"
            for name, value in row.means.items()
            if not is_rate(name) and (self._means is None or name in self._means)
        ]
        parts += self._rates()
        _LOG.info("epoch %d  iteration %d  %s  %s", row.epoch, row.iteration, row.stream, "  ".join(parts))

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Log one line per stream."""
        is_due = self._every.is_epoch_due(epoch_id) or self._every.is_within_epochs
        if not (is_due or self.main_loop.evaluating or self.main_loop.at_end):
            return
        known = [name for variables in epoch_data.values() for name in variables]
        for name in self.variables or ():
            if name not in known and not self._is_written(name):
                raise HookError(f"LogVariables: no earlier hook wrote {name!r}{did_you_mean(name, known)}")
        loop = self.main_loop
        when = "at the end" if loop.at_end else f"epoch {loop.training_epochs_done}"
        width = max((len(stream) for stream in epoch_data), default=0)
        for stream, variables in epoch_data.items():
            parts = []
            for name, value in variables.items():
                is_shown = not is_rate(name) if self.variables is None else name in self.variables
                if is_shown:
                    parts += self._format(stream, name, value)
            if stream == loop.train_stream_name and not loop.evaluating:
                if epoch_id > 0:
                    parts += self._rates()
                since = " since the resume" if loop.epoch_is_resumed else ""
                parts.append(f"{short(loop.epoch_seconds)} s{since}")
            if parts:
                _LOG.info("%s  %s  %s", when, stream.ljust(width), "  ".join(parts))

    def _is_written(self, name: str) -> bool:
        """Return whether a hook or the model declares to write a variable, which it may not do in every epoch."""
        loop = getattr(self, "main_loop", None)
        return loop is not None and name in written_by([*loop.hooks, loop.model])

    def _rates(self) -> list[str]:
        """Return the different learning rates of the last update, if the model has any."""
        shown = dict.fromkeys(short(rate) for rate in learning_rates(self.main_loop.model).values())
        return [f"lr {' '.join(shown)}"] if shown else []

    def _format(self, stream: str, name: str, value: Any) -> list[str]:
        parts = []
        for label, entry in brief_statistics({name: value}):
            if (finite := number(entry)) is not None:
                parts.append(f"{label} {_readable(finite)}")
            elif self._on_unknown_type == "str" or isinstance(entry, Lowest):
                parts.append(f"{label} {entry}")
            elif self._on_unknown_type != "ignore":
                message = f"LogVariables: {stream}/{label} is {type(entry).__name__}, not a number"
                if self._on_unknown_type == "error":
                    raise HookError(f"{message}; to allow such values, set on_unknown_type to warn, str or ignore")
                _LOG.warning("%s", message)
        return parts


def _readable(value: float) -> str:
    """Format a number so that its width stays the same from epoch to epoch for the usual magnitudes."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"
