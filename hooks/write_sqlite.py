"""Write statistics and values of steps to an SQLite database."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic, time
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.base.types import EpochData, Profile
from emrun.base.wording import counted
from emrun.hook import AbstractHook
from emrun.hooks._step_points import StepPoint, StepPoints
from emrun.storage.files import check_guards
from emrun.storage.metrics import numbers

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the tables, as `PRAGMA user_version`
_OWNER = 0x656D7275  # `PRAGMA application_id`: "emru"
_TABLES = {
    "epochs": "epoch INTEGER, iteration INTEGER, updates INTEGER, seconds REAL, written REAL",
    "epoch_values": "epoch INTEGER, stream TEXT, variable TEXT, aggregation TEXT, value REAL",
    "step_values": "iteration INTEGER, updates INTEGER, name TEXT, value REAL",
}
_WAIT = 5.0  # seconds for a reader to finish
_PAUSE = 1.0  # seconds between two commits of values of steps

Row = tuple[Any, ...]


class WriteSQLite(AbstractHook):
    """Writes the statistics of each epoch, and values of steps, to an SQLite database in the run directory.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteSQLite: {file: metrics.sqlite, every: 50 updates}

    The tables are:

    - `epochs`: `epoch`, `iteration`, `updates`, `seconds`, `written` (the time, in seconds since 1970),
    - `epoch_values`: `epoch`, `stream`, `variable`, `aggregation` (null for a plain number), `value`,
    - `step_values`, with `every`: `iteration`, `updates`, `name`, `value` of the step record.

    A value that is NaN is null, because SQLite has no NaN. A statistic that is not a number is left out.

        sqlite3 log/run/metrics.sqlite "SELECT epoch, value FROM epoch_values WHERE stream = 'valid'"

    Other programs can read the database while it is written: the rows of an epoch appear together, and values of steps
    at most once a second. A reader that keeps the database locked for more than five seconds does not stop the run; the
    rows are written with the next ones. A resume deletes the rows after the checkpoint.

    Args:
        file: the name of the database.
        every: how often values of steps are written: `50 updates`, `500 iterations` or `1 minutes`; by default never.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the file is not a database of this hook, or there is no step record for `every`.
        StorageError: the database cannot be written.
    """

    def __init__(
        self, file: str = "metrics.sqlite", every: str | None = None, output_dir: str | Path | None = None
    ) -> None:
        super().__init__(output_dir=output_dir)
        if not isinstance(file, str) or safe_component("file", file) != file:
            raise ArgumentError("file", f"{file!r} is not a file name of letters, digits, '.', '_' and '-'")
        self._path = Path(output_dir or ".") / file
        self._points = StepPoints("WriteSQLite", every)
        self._pending: dict[str, list[Row]] = {name: [] for name in _TABLES}
        self._rows = dict.fromkeys(_TABLES, 0)  # that the database has, or has at the checkpoint
        self._written = 0.0  # when rows were written last, in seconds of `monotonic`
        self._epoch_data: EpochData = {}
        if not self._points.listens:  # these would do nothing
            self.after_batch = self.after_stream = None  # type: ignore[method-assign, assignment]

    def before_training(self) -> None:
        """Create the tables, or delete the rows after the checkpoint.

        Raises:
            HookError: the file is not a database of this hook, or there is no step record for `every`.
            StorageError: the database cannot be written.
        """
        self._points.start(self.main_loop)
        check_guards(self._path)
        try:
            with closing(self._connect()) as database, database:
                self._check(database)
                for name, columns in _TABLES.items():
                    database.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
                    database.execute(f"DELETE FROM {name} WHERE rowid > ?", [self._rows[name]])
                    there = database.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
                    if there < self._rows[name]:
                        lost = counted(self._rows[name] - there, "row")
                        _LOG.warning("WriteSQLite: %s has lost %s of %s since the checkpoint", self._path, lost, name)
                    self._rows[name] = there
        except sqlite3.OperationalError as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            message = f"WriteSQLite: {self._path} is not an SQLite database ({error})"
            raise HookError(f"{message}; choose another name with `file`") from error

    def _check(self, database: sqlite3.Connection) -> None:
        """Check that the tables are those of this hook, or mark a new database."""
        marks = {"application_id": _OWNER, "user_version": _VERSION}
        is_new = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and marks != {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in marks}:
            message = f"WriteSQLite: {self._path} was not written by this hook"
            raise HookError(f"{message}; choose another name with `file`")
        for name, value in marks.items():
            database.execute(f"PRAGMA {name} = {value}")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_WAIT)

    def after_batch(self, stream_name: str) -> None:  # type: ignore[override]
        """Take the values of the step before, if they are due."""
        self._take_point(self._points.after_batch(self.main_loop, stream_name))

    def after_stream(self, stream_name: str) -> None:
        """Take the values of the last step, if they are due."""
        self._take_point(self._points.after_stream(self.main_loop, stream_name))

    def _take_point(self, point: StepPoint | None) -> None:
        if point is None:
            return
        for name, value in point.values.items():
            self._pending["step_values"].append((point.iteration, point.updates, name, value))
        if monotonic() - self._written > _PAUSE:  # a commit waits for the disk, some milliseconds
            self._write()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Note the data of the epoch, to which later hooks may add statistics."""
        self._epoch_data = epoch_data

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Write the rows of the epoch."""
        loop = self.main_loop
        epoch = epoch_id if loop.at_end else loop.training_epochs_done
        self._write(
            epochs=[(epoch, loop.iterations_done, loop.updates_done, loop.epoch_seconds, time())],
            epoch_values=[
                (epoch, stream, variable, aggregation, number)
                for stream, variables in self._epoch_data.items()
                for variable, value in variables.items()
                for aggregation, number in _numbers(value)
            ],
        )

    def after_training(self, success: bool) -> None:
        """Write the rows that are waiting."""
        if any(self._pending.values()):
            self._write()

    def _write(self, **rows: Iterable[Row]) -> None:
        """Write rows in one transaction, after those that are waiting; a locked database is a warning.

        Raises:
            StorageError: the database cannot be written.
        """
        self._written = monotonic()
        for name, more in rows.items():
            self._pending[name] += more
        try:
            with closing(self._connect()) as database, database:
                for name, pending in self._pending.items():
                    places = ", ".join("?" * (_TABLES[name].count(",") + 1))
                    database.executemany(f"INSERT INTO {name} VALUES ({places})", pending)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                _LOG.warning("WriteSQLite: another program locks %s; the rows are written later", self._path)
                return
            raise StorageError(f"cannot write {self._path}: {error}") from error
        for name, pending in self._pending.items():
            self._rows[name] += len(pending)
            pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of rows, the rows that are waiting as JSON, and what the next points need."""
        return {
            "rows": dict(self._rows),
            "pending": json.dumps(self._pending),
            "points": self._points.state_dict(self.main_loop),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; `before_training` deletes later rows."""
        pending = json.loads(state["pending"])
        self._pending = {name: [tuple(row) for row in pending[name]] for name in _TABLES}
        self._rows = dict(state["rows"])
        self._points.load_state_dict(state["points"])


def _numbers(value: Any) -> Iterator[tuple[str | None, float | None]]:
    """Yield (aggregation, number) for what the data of an epoch has for a variable; NaN is None."""
    named = value.items() if isinstance(value, Mapping) else [(None, value)]
    for aggregation, each in named:
        number = numbers(each)
        if number is not None and not isinstance(number, Mapping):
            yield aggregation, None if number == "NaN" else float(number)
