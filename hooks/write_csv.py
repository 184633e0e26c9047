"""Write the statistics of epochs to a CSV file, and means of the train stream between epochs."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emrun.base.arguments import check_choice, safe_component
from emrun.base.errors import ArgumentError, HookError, StateError
from emrun.base.fields import shown
from emrun.base.types import EpochData, EpochVariable, Period
from emrun.epoch_data import is_rate, learning_rates
from emrun.hook import AbstractHook
from emrun.hooks._parts.intervals import Every
from emrun.hooks._train_means import TrainMeans, written_by
from emrun.storage.lines import Change, Lines

_LOG = logging.getLogger(__name__)


UnknownType = Literal["error", "warn", "default"]
MissingVariable = Literal["error", "warn", "default"]


class WriteCSV(AbstractHook):
    """Writes one line per epoch to a CSV file in the run directory, with the columns `epoch_id` and `STREAM_VARIABLE`.

        hooks:
          - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}
          - WriteCSV: {output_file: training.csv}

    If a variable has several aggregations, only its mean is written. If there is no mean, each aggregation gets a
    column `STREAM_VARIABLE_AGGREGATION`. For an array, the mean of its entries without NaNs is written.

    The first epoch determines the columns. A variable that comes only later gets no column, and a warning names it; to
    get the column, list `variables` and set `on_missing_variable: default`.

    With `every: 50 updates`, there is also a line after every 50 updates. It has the means of the train stream since
    the last line, for the variables that the batches have, and `default_value` in the columns of other streams and
    aggregations. The second column is then `iteration`. The end of an epoch always has its own line, with the means of
    the whole epoch, so that two lines have the same iteration if an interval ends there, too:

        - WriteCSV: {output_file: curves.csv, every: 50 updates}

    A resumed run continues the same file and writes no line twice. If the file has lost lines since the checkpoint, it
    is rebuilt from `metrics.jsonl`; if that is incomplete, or there are lines between epochs, the complete lines of the
    file are kept.

    Args:
        output_file: the name of the file.
        delimiter: the character between the columns.
        default_value: what is written if there is no value.
        variables: which variables are written, of every stream; by default all of the first epoch.
        on_unknown_type: what to do if a value is not a number: `error`, `warn` (and write `default_value`) or
            `default` (write `default_value`).
        on_missing_variable: what to do if a stream of the epoch lacks a variable: `error`, `warn` or `default`, as
            above.
        every: how often lines are written: `5 epochs` for fewer lines; `50 updates`, `500 iterations` or `5 minutes`
            for lines between epochs too. A number without a unit means epochs.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: a value is missing or not a number and the policy is `error`; an integer is too large for a float; a
            name has a character that cannot be written; or the file exists and this hook did not write it.
        StateError: `output_file`, `delimiter` or `variables` differ from those of the checkpoint, or only one of them
            has lines between epochs.
        StorageError: the file cannot be written.
    """

    reads = ()

    def __init__(
        self,
        output_dir: str | Path | None = None,
        output_file: str = "training.csv",
        delimiter: str = ",",
        default_value: str = "",
        variables: Sequence[EpochVariable] | None = None,
        on_unknown_type: UnknownType = "default",
        on_missing_variable: MissingVariable = "error",
        every: Period = 1,
    ) -> None:
        super().__init__(output_dir=output_dir)
        check_choice("on_unknown_type", on_unknown_type, UnknownType)
        check_choice("on_missing_variable", on_missing_variable, MissingVariable)
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
        if variables is not None and (isinstance(variables, str) or not all(isinstance(v, str) for v in variables)):
            raise ArgumentError("variables", f"{variables!r} is not a list of variables")
        self._path = Path(output_dir or ".") / output_file
        self._lines = Lines(self._path)
        self._delimiter = delimiter
        self._default = default_value
        self._variables = list(variables) if variables is not None else None
        self._on_unknown_type = on_unknown_type
        self._on_missing_variable = on_missing_variable
        self._columns: list[list[str]] = []  # stream, variable and, if it has no mean, aggregation
        self._left_out: set[tuple[str, str]] = set()  # stream and variable of the warnings about missing columns
        self._checkpoint: tuple[int, str | None] | None = None  # length and digest of the file
        self._gone_back_to: tuple[int, str | None] | None = None
        self._is_known = False
        self._every = Every("every", every)
        self._means = TrainMeans("WriteCSV", self._variables)
        if not self._every.is_within_epochs and type(self).after_batch is WriteCSV.after_batch:
            self.after_batch = None  # type: ignore[method-assign, assignment]  # it would do nothing

    def before_training(self) -> None:
        """Restore the content that the file had at the checkpoint.

        Raises:
            HookError: the file exists, but the checkpoint has no state of this hook.
        """
        self._every.start()
        if not self._is_known and self.main_loop.iterations_done and self._path.exists():
            raise HookError(
                f"WriteCSV: {self._path} exists, but this hook did not write it; choose another output_file"
            )
        self._is_known = True
        position, self._checkpoint = self._checkpoint or (self._lines.length, self._lines.digest), None
        self._gone_back_to = position
        change = self._lines.go_back_to(
            *position, is_wanted=self._is_wanted, rebuilt=lambda: self._rebuilt(position[0])
        )
        if change is Change.REBUILT:
            _LOG.warning("WriteCSV: %s has changed since the checkpoint; rebuilt from metrics.jsonl", self._path)
        elif change is Change.LOST:
            _LOG.warning(
                "WriteCSV: %s has lost lines since the checkpoint, and metrics.jsonl does not have all of them; the "
                "complete lines are kept, and the next epoch is appended",
                self._path,
            )
        elif change is Change.EDITED:
            _LOG.warning("WriteCSV: %s was edited after the checkpoint; the edited file is continued", self._path)

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the batch to the means of the train stream; write them if a line is due within the epoch."""
        loop = self.main_loop
        if not (loop.training and self._every.is_within_epochs and stream_name == loop.train_stream_name):
            return
        self._means.add(loop, batch_data)
        if self._every.is_batch_due(loop):
            self._write_means(stream_name)

    def after_stream(self, stream_name: str) -> None:
        """Write the means of the train stream if a line is due with its last update."""
        if self._every.is_stream_due(self.main_loop, stream_name):
            self._write_means(stream_name)

    def _write_means(self, stream_name: str) -> None:
        """Write a line with the means of the train stream since the last one."""
        loop = self.main_loop
        rates = learning_rates(loop.model)
        if not self._columns:  # there was no zeroth epoch
            written = written_by(loop.hooks)
            streams = dict.fromkeys([stream_name, *loop.extra_streams], written)
            self._columns = self._find_columns({**streams, stream_name: {**rates, **written}})
        means = {**rates, **self._means.take()}
        cells = [
            repr(means[name]) if stream == stream_name and name in means and not aggregation else self._default
            for stream, name, *aggregation in self._columns
        ]
        self._append(self._joined([str(loop.training_epochs_done + 1), str(loop.iterations_done), *cells]))

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Write the line of the epoch, if it is due."""
        loop = self.main_loop
        self._means.forget()
        if self._every.is_epoch_due(epoch_id) or self._every.is_within_epochs or loop.evaluating or loop.at_end:
            if not self._columns:
                self._columns = self._find_columns(epoch_data)
            line = self._line(epoch_id, loop.iterations_done, epoch_data)
            self._warn_of_left_out(epoch_data)
            self._append(line)

    def _append(self, line: str) -> None:
        """Append a line, after the header if the file is empty."""
        self._lines.look()
        if not self._lines.length:
            self._lines.append(self._header())
        self._lines.append(line)

    def state_dict(self) -> dict[str, Any]:
        """Return the columns, the length of the file in bytes, its SHA-256, the format, which must not change, and the
        values since the last line.
        """
        length, digest = self._checkpoint or (self._lines.length, self._lines.digest)
        return {
            "columns": self._columns,
            "length": length,
            "digest": digest,
            "format": self._format(),
            "means": self._means.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the columns and the position in the file.

        Raises:
            StateError: the format of the file has changed, or a field of the state is damaged.
        """
        before = state["format"]
        if before["has_iterations"] != self._every.is_within_epochs:
            kind = "lines" if before["has_iterations"] else "no lines"
            raise StateError(
                f"WriteCSV: every is {self._every.interval}, but the file of the checkpoint has {kind} between epochs; "
                "a resume cannot change that. Add another WriteCSV at the end of the hooks"
            )
        for name, value in self._format().items():
            if before[name] != value:
                raise StateError(
                    f"WriteCSV: {name} is {value!r}, but was {before[name]!r} at the checkpoint; a resume "
                    "cannot change the format of a CSV file. Add another WriteCSV at the end of the hooks"
                )
        self._columns, self._is_known = [list(column) for column in state["columns"]], True
        self._means.load_state_dict(state["means"])
        position = state["length"], state["digest"]
        if position != self._gone_back_to:  # a checkpoint in the middle of an epoch is loaded twice
            self._checkpoint = position

    def _format(self) -> dict[str, Any]:
        return {
            "output_file": self._path.name,
            "delimiter": self._delimiter,
            "variables": self._variables,
            "has_iterations": self._every.is_within_epochs,
        }

    def _find_columns(self, epoch_data: EpochData) -> list[list[str]]:
        found = dict.fromkeys(name for variables in epoch_data.values() for name in variables)
        names = self._variables if self._variables is not None else sorted(found, key=is_rate)
        extra = [] if self.main_loop.evaluating else self.main_loop.extra_streams
        streams = list(dict.fromkeys([*epoch_data, *extra]))
        return [
            [stream, name, *aggregation]
            for stream in streams
            for name in names
            if (self._variables is not None or name in epoch_data.get(stream, found))
            and (name in epoch_data.get(stream, {}) or not is_rate(name))  # only train streams have learning rates
            for aggregation in _without_mean(stream, name, epoch_data)
        ]

    def _warn_of_left_out(self, epoch_data: EpochData) -> None:
        """Log a warning, once, about each variable that has no column because the first epoch lacked it."""
        written = {(stream, name) for stream, name, *_ in self._columns}
        all_pairs = {(stream, name) for stream, variables in epoch_data.items() for name in variables}
        for stream, name in sorted(all_pairs - written - self._left_out if self._variables is None else ()):
            self._left_out.add((stream, name))
            names = dict.fromkeys([*(column[1] for column in self._columns), name])
            _LOG.warning(
                "WriteCSV: %s/%s is not written to %s, because the first epoch, which determines the columns, did not "
                "have it; to get the column, set variables: [%s] and on_missing_variable: default",
                *(stream, name, self._path.name, ", ".join(names)),
            )

    def _value(self, column: Sequence[str], epoch_data: EpochData) -> str:
        stream, name, *aggregation = column
        if stream not in epoch_data:  # not evaluated in this epoch
            return self._default
        if name not in epoch_data[stream]:
            return self._complain("on_missing_variable", f"stream {stream!r} has no variable {name!r}")
        value = epoch_data[stream][name]
        if isinstance(value, Mapping):
            (wanted,) = aggregation or ["mean"]
            if wanted not in value:
                return self._complain("on_missing_variable", f"{stream}/{name} has no {wanted}")
            value = value[wanted]
        try:
            array = np.asarray(value if value is not None else "", dtype=np.float64)
            return repr(float(np.nanmean(array) if array.ndim else array))
        except OverflowError as error:
            raise HookError(
                f"WriteCSV: {'/'.join(column[:2])} is {shown(value)}, which is too large for a floating-point number; "
                "write a smaller number, or leave the variable out (variables: [...])"
            ) from error
        except (TypeError, ValueError):
            return self._complain("on_unknown_type", f"{stream}/{name} is {type(value).__name__}, not a number")

    def _complain(self, argument: str, message: str) -> str:
        policy = self._on_missing_variable if argument == "on_missing_variable" else self._on_unknown_type
        if policy == "error":
            raise HookError(f"WriteCSV: {message}; to write {self._default!r} instead, set {argument}: default")
        if policy == "warn":
            _LOG.warning("WriteCSV: %s", message)
        return self._default

    def _header(self) -> str:
        names = ["_".join(column) for column in self._columns]
        for column, name in zip(self._columns, names, strict=True):
            if _has_surrogates(name):
                raise HookError(
                    f"WriteCSV: the name of variable {column[1]!r} of stream {column[0]!r} has a lone surrogate, which "
                    "cannot be written to a file; rename the variable, or leave it out (variables: [...])"
                )
        return self._joined(["epoch_id", *(["iteration"] if self._every.is_within_epochs else []), *names])

    def _line(self, epoch_id: int, iteration: int, epoch_data: EpochData) -> str:
        where = [epoch_id, iteration] if self._every.is_within_epochs else [epoch_id]
        return self._joined([*map(str, where), *(self._value(column, epoch_data) for column in self._columns)])

    def _joined(self, cells: Sequence[str]) -> str:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter, lineterminator="").writerow(cells)
        return text.getvalue()

    def _rebuilt(self, length: int) -> bytes | None:
        """Return the content made from `metrics.jsonl`: the header, and the last epochs until `length` is reached."""
        if self._every.is_within_epochs or not (self.main_loop.has_run and self._columns):
            return None
        header = f"{self._header()}\n".encode()
        try:
            lines = [
                f"{self._line(each['epoch'], each['iteration'], _as_written(each['streams']))}\n"
                for each in self.main_loop.metrics
                if self._every.is_epoch_due(each["epoch"])
            ]
        except (HookError, TypeError):  # metrics.jsonl lacks a value
            return None
        kept: list[bytes] = []
        found = len(header)
        for line in reversed(lines):
            if found >= length:
                break
            kept.append(line.encode())
            found += len(kept[-1])
        return header + b"".join(reversed(kept))

    def _is_wanted(self, line: bytes) -> bool:
        """Return whether a line is complete and not of an epoch, or an iteration, after the checkpoint."""
        cells = [cell.strip('"\r\n') for cell in line.decode(errors="replace").split(self._delimiter, 2)]
        loop, within = self.main_loop, self._every.is_within_epochs and len(cells) > 1
        place, done = (cells[1], loop.iterations_done) if within else (cells[0], loop.training_epochs_done)
        is_later = place.isdecimal() and int(place) > done
        return line.endswith(b"\n") and not is_later


def _as_written(value: Any) -> Any:
    """Return the values of `metrics.jsonl` as hooks wrote them: that file has non-finite numbers as strings."""
    if isinstance(value, Mapping):
        return {name: _as_written(each) for name, each in value.items()}
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _without_mean(stream: str, name: str, epoch_data: EpochData) -> list[list[str]]:
    """Return a list for each column of a variable: empty for its mean or number, else with one of its aggregations.

    A stream without the variable in this epoch gets the columns of the other streams.
    """
    own = epoch_data.get(stream, {})
    found = own if name in own else next((each for each in epoch_data.values() if name in each), {})
    value = found.get(name)
    return [[str(key)] for key in value] if isinstance(value, Mapping) and value and "mean" not in value else [[]]
