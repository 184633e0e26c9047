"""What runs have recorded, epoch by epoch or step by step, as rows of one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emrun.base.errors import UsageError
from emrun.base.types import Json
from emrun.base.wording import did_you_mean, in_one_line, listed
from emrun.epoch_data import statistics
from emrun.record.steps import ITERATION
from emrun.runs.stored_run import MISSING, StoredRun, number

RUN = "run"
"""The column with the name of the run."""
_OF_EPOCH = ("epoch", ITERATION, "seconds")
TableRow = Mapping[str, Any]
"""Column -> a number, a plain value of the config, or a string; a column without a value is missing."""


@dataclass(frozen=True, slots=True)
class RunTable:
    """What runs have recorded, as rows of one table.

    Args:
        runs: name -> run.
        by_step: the steps of the step record instead of the epochs.
        streams: only statistics of these streams; all if empty.
        variables: only statistics of these variables; all if empty.
    """

    runs: Mapping[str, StoredRun]
    by_step: bool = False
    streams: Sequence[str] = ()
    variables: Sequence[str] = ()

    def keys(self) -> list[str]:
        """Return the columns that the runs have: the counters, then the statistics. The files are read for it.

        Raises:
            UsageError: no run has recorded anything of the streams or variables that are asked for.
            StorageError: a file cannot be read.
        """
        columns: dict[str, None] = {}
        for run in self.runs.values():
            rows = (chunk.columns for chunk in run.steps()) if self.by_step else map(_row_of, run.epochs())
            for keys in rows:
                columns.update(dict.fromkeys(keys))
        first = [ITERATION] if self.by_step else [key for key in _OF_EPOCH if key in columns]
        others = [key for key in columns if key not in first]
        self._check(others)
        return [*([RUN] if len(self.runs) > 1 else []), *first, *[key for key in others if self._is_asked(key)]]

    def rows(self, keys: Sequence[str]) -> Iterator[TableRow]:
        """Yield a row for each epoch or step of each run, one after another.

        Args:
            keys: what is asked for: columns, as `keys` returns them, or keys of values of the config.

        Raises:
            StorageError: a file cannot be read.
        """
        for name, run in self.runs.items():
            constants: Json = {RUN: name}
            for key in keys:
                if key not in (RUN, *_OF_EPOCH) and "/" not in key:
                    value = run.value(key)
                    if value is not MISSING:
                        constants[key] = value
            rows = _steps_of(run) if self.by_step else map(_row_of, run.epochs())
            for row in rows:
                yield {**constants, **row}

    def check_keys(self, keys: Sequence[str]) -> None:
        """Check that each key that is asked for has a value in at least one run.

        Raises:
            UsageError: no run has it; the message has the nearest.
        """
        known = [RUN, *self.keys()]
        for key in keys:
            if key not in known and all(run.value(key) is MISSING for run in self.runs.values()):
                raise UsageError(
                    f"{in_one_line(key)!r} is neither recorded nor a key of the "
                    f"config{did_you_mean(key, known)} (--list-keys lists all)"
                )

    def _is_asked(self, key: str) -> bool:
        for what, names in (("stream", self.streams), ("variable", self.variables)):
            if names and not any(self._is_of(key, what, name) for name in names):
                return False
        return True

    def _is_of(self, key: str, what: str, name: str) -> bool:
        """Return whether a column is of a `stream`, or of a `variable`, whose name may contain slashes."""
        stream, _, rest = key.partition("/")
        return stream == name if what == "stream" else f"{key if self.by_step else rest}/".startswith(f"{name}/")

    def _check(self, columns: Sequence[str]) -> None:
        if self.by_step and self.streams:
            raise UsageError("--stream: the steps are those of the train stream; leave it out")
        requested = [("stream", name) for name in self.streams] + [("variable", name) for name in self.variables]
        for what, name in requested:
            if not any(self._is_of(key, what, name) for key in columns):
                names = columns
                if not self.by_step:
                    level = 1 if what == "variable" else 0
                    names = [key.split("/")[level] for key in columns]
                known = [in_one_line(each) for each in dict.fromkeys(names)]
                near = did_you_mean(name, known)
                raise UsageError(
                    f"no run has recorded the {what} {in_one_line(name)!r}{near} (there are {listed(known)})"
                )


def _row_of(epoch: Json) -> Json:
    """Return a line of `metrics.jsonl` as a row: `stream/variable` is a mean or a plain number."""
    row = {name: epoch[name] for name in _OF_EPOCH if number(epoch.get(name)) is not None}
    for stream, variables in epoch["streams"].items():
        for name, value in statistics(variables):
            if number(value) is not None:
                row[f"{stream}/{name}"] = float(value) if isinstance(value, str) else value  # in JSON, NaN is a string
    return row


def _steps_of(run: StoredRun) -> Iterator[Json]:
    for chunk in run.steps():
        names = list(chunk.columns)
        for index, values in enumerate(zip(*chunk.columns.values(), strict=True)):
            row: Json = {ITERATION: chunk.first + chunk.every * index}
            row.update((name, value) for name, value in zip(names, values, strict=True) if value is not None)
            yield row
