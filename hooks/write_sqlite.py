"""Write statistics and means between epochs to an SQLite database."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.epoch_data import as_float
from emrun.record.facts import Facts
from emrun.record.rows import Row
from emrun.record.sinks import FileSink

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the tables, as `PRAGMA user_version`
_OWNER = 0x656D7275  # `PRAGMA application_id`: "emru"
_TABLES = {
    "epochs": "epoch INTEGER, iteration INTEGER, updates INTEGER, seconds REAL, written REAL",
    "epoch_values": "epoch INTEGER, stream TEXT, variable TEXT, aggregation TEXT, value REAL",
    "step_values": "iteration INTEGER, updates INTEGER, name TEXT, value REAL",
}
_WAIT = 5.0  # seconds for a reader to finish


class WriteSQLite(FileSink):
    """Writes the statistics of each epoch, and means between epochs, to an SQLite database in the run directory.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteSQLite: {file: metrics.sqlite, every: 50 updates}

    The tables are:

    - `epochs`: `epoch`, `iteration`, `updates`, `seconds`, `written` (the time, in seconds since 1970),
    - `epoch_values`: `epoch`, `stream`, `variable`, `aggregation` (null for a plain number), `value`,
    - `step_values`, with `every`: `iteration`, `updates`, `name`, `value`: the means of the train stream since the last
      such row, of learning rates the last values.

    A value that is NaN is null, because SQLite has no NaN. A statistic that is not a number is left out.

        sqlite3 log/run/metrics.sqlite "SELECT epoch, value FROM epoch_values WHERE stream = 'valid'"

    Other programs can read the database while it is written: the rows of an epoch appear together, and means at most
    once a second. A reader that keeps the database locked for more than five seconds does not stop the run; the rows
    are written with the next ones. A resume deletes the rows after the checkpoint, and makes rows that were lost again.

    Args:
        file: the name of the database.
        every: how often means are written: `50 updates`, `500 iterations` or `1 minutes`; by default never.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the file is not a database of this hook.
    """

    def __init__(
        self, file: str = "metrics.sqlite", every: str | None = None, output_dir: str | Path | None = None
    ) -> None:
        if not isinstance(file, str) or safe_component("file", file) != file:
            raise ArgumentError("file", f"{file!r} is not a file name of letters, digits, '.', '_' and '-'")
        super().__init__(Path(output_dir or ".") / file, every, output_dir)
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._rows: dict[str, int] = {}  # that the database has

    def begin(self, facts: Facts, identity: Any) -> bool:
        """Create the tables, or delete the rows after a place.

        Raises:
            HookError: the file is not a database of this hook.
            StorageError: the database cannot be written.
        """
        if identity is not None and not self.path.exists():
            return False
        rows = identity or dict.fromkeys(_TABLES, 0)
        try:
            with self._errors(), closing(self._connect()) as database, database:
                self._check(database)
                for name, columns in _TABLES.items():
                    database.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
                there = {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _TABLES}
                if any(there[name] < rows[name] for name in _TABLES):
                    return False
                for name in _TABLES:
                    database.execute(f"DELETE FROM {name} WHERE rowid > ?", [rows[name]])
        except HookError:
            if identity is None:
                raise
            return False
        self._rows, self._pending = dict(rows), {name: [] for name in _TABLES}
        return True

    def keep_aside(self, *, is_known: bool) -> None:
        """Rename a database that has lost rows.

        Raises:
            HookError: the file is not a database of this hook.
        """
        if not is_known:
            with self._errors(), closing(self._connect()) as database, database:
                self._check(database)
        super().keep_aside(is_known=is_known)

    def _check(self, database: sqlite3.Connection) -> None:
        """Check that the tables are those of this hook, or mark a new database."""
        marks = {"application_id": _OWNER, "user_version": _VERSION}
        is_new = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and marks != {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in marks}:
            message = f"WriteSQLite: {self.path} was not written by this hook"
            raise HookError(f"{message}; choose another name with `file`")
        for name, value in marks.items():
            database.execute(f"PRAGMA {name} = {value}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite into those of emrun."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StorageError(0, f"cannot write {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            message = f"WriteSQLite: {self.path} is not an SQLite database ({error})"
            raise HookError(f"{message}; choose another name with `file`") from error

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=_WAIT)

    def place(self) -> Any:
        """Return the numbers of rows; None if rows are waiting."""
        return None if any(self._pending.values()) else dict(self._rows)

    def write(self, row: Row) -> None:
        """Add a row to those that are waiting."""
        for name, value in row.means.items():
            self._pending["step_values"].append((row.iteration, row.updates, name, _without_nan(value)))
        if row.every is None:
            self._pending["epochs"].append((row.epoch, row.iteration, row.updates, row.seconds, row.time))
            self._pending["epoch_values"] += _values(row)

    def flush(self) -> None:
        """Write the rows that are waiting in one transaction; a locked database is a warning.

        Raises:
            StorageError: the database cannot be written.
        """
        if not any(self._pending.values()):
            return
        try:
            with closing(self._connect()) as database, database:
                for name, pending in self._pending.items():
                    places = ", ".join("?" * (_TABLES[name].count(",") + 1))
                    database.executemany(f"INSERT INTO {name} VALUES ({places})", pending)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                _LOG.warning("WriteSQLite: another program locks %s; the rows are written later", self.path)
                return
            raise StorageError(0, f"cannot write {self.path}: {error}") from error
        for name, pending in self._pending.items():
            self._rows[name] += len(pending)
            pending.clear()


def _values(row: Row) -> Iterator[tuple[int, str, str, str | None, float | None]]:
    """Yield the rows of `epoch_values` for an epoch."""
    for stream, variables in row.streams.items():
        for variable, value in variables.items():
            for aggregation, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
                if not isinstance(each, Mapping):
                    yield row.epoch, stream, variable, aggregation, _without_nan(as_float(each))


def _without_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
