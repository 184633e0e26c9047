"""Write statistics and means between epochs to an SQLite database."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, StorageError
from emrun.epoch_data import as_float
from emrun.record.facts import Facts
from emrun.record.rows import Row
from emrun.record.sinks import FileSink

_LOG = logging.getLogger(__name__)
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
    are written with the next ones. A resume makes the database again, with the rows up to the checkpoint: tables, rows
    and indexes that others have added are lost.

    Args:
        file: the name of the database.
        every: how often means are written: `50 updates`, `500 iterations` or `1 minutes`; by default never.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: there is a file that the run has not written.
    """

    def __init__(
        self, file: str = "metrics.sqlite", every: str | None = None, output_dir: str | Path | None = None
    ) -> None:
        if not isinstance(file, str) or safe_component("file", file) != file:
            raise ArgumentError("file", f"{file!r} is not a file name of letters, digits, '.', '_' and '-'")
        super().__init__(file, every, output_dir)
        self._pending: dict[str, list[tuple[Any, ...]]] = {}

    def begin(self, facts: Facts) -> None:
        """Create the tables.

        Raises:
            StorageError: the database cannot be written.
        """
        self._close_old()
        self._pending = {name: [] for name in _TABLES}
        with self._opened() as database:
            for name, columns in _TABLES.items():
                database.execute(f"CREATE TABLE {name} ({columns})")

    def _close_old(self) -> None:
        """Leave no journal beside the old database, which SQLite would apply to the new one."""
        if self.path.exists():
            with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(self.path, timeout=_WAIT)) as database:
                database.execute("SELECT count(*) FROM sqlite_master")
        for kind in ("journal", "wal", "shm"):
            self.path.with_name(f"{self.path.name}-{kind}").unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the database for a transaction, and turn errors of SQLite into those of emrun."""
        try:
            with closing(sqlite3.connect(self.file, timeout=_WAIT)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise StorageError(0, f"cannot write {self.path}: {error}") from error

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
            with self._opened() as database:
                for name, pending in self._pending.items():
                    places = ", ".join("?" * (_TABLES[name].count(",") + 1))
                    database.executemany(f"INSERT INTO {name} VALUES ({places})", pending)
        except StorageError as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            _LOG.warning("WriteSQLite: another program locks %s; the rows are written later", self.path)
            return
        for pending in self._pending.values():
            pending.clear()


def _values(row: Row) -> Iterator[tuple[int, str, str, str | None, float | None]]:
    """Yield the rows of `epoch_values` for an epoch."""
    for stream, variables in row.streams.items():
        for variable, value in variables.items():
            entries = value.items() if isinstance(value, Mapping) else [(None, value)]
            for aggregation, entry in entries:
                if not isinstance(entry, Mapping):
                    yield row.epoch, stream, variable, aggregation, _without_nan(as_float(entry))


def _without_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
