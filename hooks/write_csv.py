"""Write the statistics of epochs to a CSV file, and means of the train stream between epochs."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from emrun.base.arguments import check_choice, check_names, safe_component
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochVariable, Period
from emrun.epoch_data import is_rate
from emrun.hooks._shared.columns import csv_of
from emrun.record.facts import Facts
from emrun.record.interval_rows import written_by
from emrun.record.intervals import Every
from emrun.record.metrics_log import MetricsLog
from emrun.record.rows import Row
from emrun.record.sinks import FileSink
from emrun.storage.files import append, opened_regular, write_atomically

_LOG = logging.getLogger(__name__)


Otherwise = Literal["error", "warn", "default"]


class WriteCSV(FileSink):
    """Writes one line per epoch to a CSV file in the run directory, with the columns `epoch_id` and `STREAM_VARIABLE`.

        hooks:
          - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}
          - WriteCSV: {output_file: training.csv}

    If a variable has several aggregations, only its mean is written. If there is no mean, each aggregation gets a
    column `STREAM_VARIABLE_AGGREGATION`. Integers have no decimal point. Two columns that would have the same name are
    written `STREAM/VARIABLE`.

    The first epoch determines the columns. A variable that comes later gets a column at the end, with `default_value`
    in the lines before, and where it is missing again.

    With `every: 50 updates`, there is also a line after every 50 updates. It has the means of the train stream since
    the last line, for the variables that the batches have and the values that hooks record, and `default_value` in the
    columns of other streams and aggregations. The second column is then `iteration`. The end of an epoch always has its
    own line, with the means of the whole epoch, so that two lines have the same iteration if an interval ends there,
    too:

        - WriteCSV: {output_file: curves.csv, every: 50 updates}

    The lines are made from what the run records. A resume makes the file again, so that no line is there twice and none
    is missing; what others have added to the file is lost.

    Args:
        output_file: the name of the file.
        delimiter: the character between the columns.
        default_value: what is written if there is no value.
        variables: which variables are written, of every stream; by default all.
        on_unknown_type: what to do if a value is not a number: `error`, `warn` (and write `default_value`) or
            `default` (write `default_value`).
        on_missing_variable: what to do if a stream of the epoch lacks a variable that it had in the first one, or that
            is listed: `error`, `warn` or `default`, as above.
        every: how often lines are written: `5 epochs` for fewer lines; `50 updates`, `500 iterations` or `5 minutes`
            for lines between epochs too. A number without a unit means epochs.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: a value is missing or not a number and the policy is `error`; a name has a character that cannot be
            written; or there is a file that the run has not written.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        output_file: str = "training.csv",
        delimiter: str = ",",
        default_value: str = "",
        variables: Sequence[EpochVariable] | None = None,
        on_unknown_type: Otherwise = "default",
        on_missing_variable: Otherwise = "error",
        every: Period = 1,
    ) -> None:
        check_choice("on_unknown_type", on_unknown_type, Otherwise)
        check_choice("on_missing_variable", on_missing_variable, Otherwise)
        if not isinstance(output_file, str) or safe_component("output_file", output_file) != output_file:
            raise ArgumentError(
                "output_file", f"{output_file!r} is not a file name of letters, digits, '.', '_' and '-'"
            )
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ArgumentError(
                "delimiter", f"{delimiter!r} is not a single character (quotes and line breaks excluded)"
            )
        for argument, text in (("delimiter", delimiter), ("default_value", default_value)):
            if _has_surrogates(str(text)):
                raise ArgumentError(argument, f"{text!r} has a lone surrogate, which cannot be written to a file")
        if variables is not None:
            check_names("variables", variables)
        super().__init__(output_file, output_dir=output_dir)
        self._every = Every("every", every)
        self._is_within = self._every.is_within_epochs  # whether there may be lines between epochs
        self._delimiter = delimiter
        self._default = default_value
        self._variables = list(variables) if variables is not None else None
        self._policies = {"on_unknown_type": on_unknown_type, "on_missing_variable": on_missing_variable}
        self._columns: list[list[str]] = []  # stream, variable and, if it has no mean, aggregation
        self._first: dict[str, list[str]] = {}  # stream -> the variables of its first epoch
        self._header: list[str] = []  # that the file has
        self._lines: list[list[str]] = []  # that are waiting to be written
        self._record: MetricsLog | None = None

    def ask(self, record: MetricsLog) -> None:
        """Ask a record for the rows between epochs."""
        self._record = record
        self._interval = record.intervals.ask("WriteCSV", self._every, self._variables)

    def wants(self, row: Row) -> bool:
        """Return whether a row is one to write: with an interval of epochs, the end of a run is too."""
        if row.every is not None or self._every is None or self._every.is_within_epochs or row.at_end:
            return row.every in (None, self._interval)
        return self._every.is_epoch_due(row.epoch) or (hasattr(self, "main_loop") and self.main_loop.evaluating)

    def begin(self, facts: Facts) -> None:
        """Begin without columns, which the rows determine."""
        self._columns = []
        self._first = {}
        self._header = []
        self._lines = []

    def write(self, row: Row) -> None:
        """Add the line of a row to those that are waiting."""
        self._columns += self._new_columns(row)
        where = [row.epoch, row.iteration] if self._is_within else [row.epoch]
        self._lines.append([*map(str, where), *(self._cell(column, row) for column in self._columns)])

    def flush(self) -> None:
        """Append the lines that are waiting; if there are new columns, write all lines with them."""
        lines = self._lines
        self._lines = []
        counters = ["epoch_id", "iteration"] if self._is_within else ["epoch_id"]
        header = [*counters, *_names(self._columns)]
        if lines and header != self._header:
            wider = (line + [self._default] * (len(header) - len(line)) for line in (*self._written(), *lines))
            write_atomically(self.file, self._text([header, *wider]))
            self._header = header
        elif lines:
            append(self.file, self._text(lines))

    def _written(self) -> list[list[str]]:
        """Return the lines of the file below its header."""
        with opened_regular(self.file) as file:
            content = io.StringIO(file.read().decode(errors="replace"))
        return list(csv.reader(content, delimiter=self._delimiter))[1:]

    def _text(self, lines: Sequence[Sequence[str]]) -> bytes:
        return csv_of(lines, delimiter=self._delimiter)

    def _new_columns(self, row: Row) -> list[list[str]]:
        """Return the columns of what a row has and the rows before did not have."""
        known_columns = {(stream, name) for stream, name, *_ in self._columns}
        if row.every is not None and all((row.stream, name) in known_columns for name in row.means):
            return []  # as usual, and there may be many rows
        known = {stream for stream, _ in known_columns}
        streams: dict[str, dict[str, Any]] = {stream: dict(values) for stream, values in row.streams.items()}
        for stream, name in row.unknown:
            streams[stream].setdefault(name, None)
        if row.every is not None:  # the steps have a loss, which need not be a statistic
            leaves_out = () if (row.stream, "loss") in known_columns or self._has_loss(row.stream) else ("loss",)
            streams = {row.stream: {name: value for name, value in row.means.items() if name not in leaves_out}}
        new_columns = []
        for stream, values in streams.items():
            names = sorted(values, key=is_rate)
            if self._variables is not None:  # only train streams have learning rates
                names = [name for name in self._variables if name in values or not is_rate(name)]
            if row.every is None:
                self._first.setdefault(stream, names)
            if self._variables is None or stream not in known:
                new = (name for name in names if (stream, name) not in known_columns)
                new_columns += [
                    [stream, name, *aggregation] for name in new for aggregation in _without_mean(values.get(name))
                ]
        return new_columns

    def _has_loss(self, stream: str) -> bool:
        """Return whether a hook writes the loss of a stream, or in a run that has ended, has done so."""
        if hasattr(self, "main_loop"):
            return "loss" in written_by(self.main_loop.hooks, stream)
        return self._record is not None and any(
            "loss" in epoch["streams"].get(stream, {}) for epoch in self._record.epochs
        )

    def _cell(self, column: Sequence[str], row: Row) -> str:
        stream, name, *aggregation = column
        if row.every is not None:
            is_mean = stream == row.stream and name in row.means and not aggregation
            return repr(row.means[name]) if is_mean else self._default
        missing = "on_missing_variable" if name in self._first.get(stream, ()) else "default"
        if stream not in row.streams:  # not evaluated in this epoch
            return self._default
        value = row.streams[stream].get(name)
        if isinstance(value, Mapping) and value:
            (wanted,) = aggregation or ["mean"]
            if wanted not in value and (stream, name) not in row.unknown:
                return self._complain(row, missing, f"{stream}/{name} has no {wanted}")
            value = value.get(wanted)
        if isinstance(value, int | float):
            return repr(value)
        kind = row.unknown.get((stream, name)) or (type(value).__name__ if value is not None else None)
        if kind is None:
            return self._complain(row, missing, f"stream {stream!r} has no variable {name!r}")
        return self._complain(row, "on_unknown_type", f"{stream}/{name} is {kind}, not a number")

    def _complain(self, row: Row, argument: str, message: str) -> str:
        policy = self._policies.get(argument)
        if policy == "error" and row.is_new:
            raise HookError(f"WriteCSV: {message}; to write {self._default!r} instead, set {argument}: default")
        if policy == "warn" and row.is_new:
            _LOG.warning("WriteCSV: %s", message)
        return self._default


def _names(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the columns; those that would be the same have slashes."""
    short = ["_".join(column) for column in columns]
    names = [name if short.count(name) == 1 else "/".join(column) for name, column in zip(short, columns, strict=True)]
    for column, name in zip(columns, names, strict=True):
        if _has_surrogates(name):
            raise HookError(
                f"WriteCSV: the name of variable {column[1]!r} of stream {column[0]!r} has a lone surrogate, which "
                "cannot be written to a file; rename the variable, or leave it out (variables: [...])"
            )
    return names


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _without_mean(value: Any) -> list[list[str]]:
    """Return a list for each column of a variable: empty for its mean or number, else with one of its aggregations."""
    return [[str(key)] for key in value] if isinstance(value, Mapping) and value and "mean" not in value else [[]]
