"""Sinks: what is made from the rows of a run. This file has what all share, and what those have that write files."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emrun.base.errors import ArgumentError, HookError, RunInUse
from emrun.hook import AbstractHook, Loop
from emrun.record.facts import Facts, facts_of
from emrun.record.intervals import Every
from emrun.record.metrics_log import MetricsLog
from emrun.record.rows import Reader, Row
from emrun.storage.files import aside_of, check_owner, flush_file, make_directory, storing, written_aside

_LOG = logging.getLogger(__name__)


class AbstractSink(AbstractHook):
    """Base class of hooks that write the rows of a run elsewhere.

    The rows are recorded in the run directory, exactly, so a sink only has to write them. A derived class overrides
    `write`, and perhaps `flush`.

    Args:
        every: when a row of means between epochs is due, such as `50 updates`; by default never.

    Raises:
        ArgumentError: `every` is not an interval of updates, iterations or minutes.
    """

    reads = ()

    def __init__(self, every: str | None = None, output_dir: str | Path | None = None) -> None:
        super().__init__(output_dir=output_dir)
        self._every = Every("every", every) if every is not None else None
        self._interval = ""
        if self._every is not None and not self._every.is_within_epochs:
            raise ArgumentError("every", f"{every!r} is an interval of epochs, which are written anyway; use updates")

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row. Rows come in the order of their iterations."""

    def flush(self) -> None:
        """Complete what `write` has begun; called after some rows, and before anything counts on them."""

    def register_mainloop(self, main_loop: Loop) -> None:
        """Ask for the rows between epochs."""
        super().register_mainloop(main_loop)
        self.ask(main_loop.rows)

    def ask(self, record: MetricsLog) -> None:
        """Ask a record for the rows between epochs."""
        self._interval = record.intervals.ask(type(self).__name__, self._every)

    def wants(self, row: Row) -> bool:
        """Return whether a row is one to write."""
        return row.every in (None, self._interval)

    @abstractmethod
    def complete(self, record: MetricsLog, status: str, reason: str | None, sinks: Sequence[AbstractSink]) -> None:
        """Write what is missing of a run that has ended.

        Args:
            record: the record of the run.
            status: how the run ended.
            reason: why.
            sinks: those of the run, in their order.
        """


class FileSink(AbstractSink):
    """Base class of sinks that write a file, which is made from the record.

    Each start of the run makes the file from the recorded rows: beside the old file, flushed to disk, then renamed. So
    a kill leaves the old file or the new one, whole, and what others have added to the file is lost. Later rows are
    appended as soon as they are recorded. What cannot be written is a warning: the run goes on, and its next start
    makes the file again. A file that the run has not written is an error.

    A derived class overrides `begin` and `write`, and perhaps `flush`. They write to `file`.

    Args:
        name: the name of the file; for a folder with the file, a slash at its end, see `make`.
        every: see `AbstractSink`.
        output_dir: the run directory.
    """

    def __init__(self, name: str, every: str | None = None, output_dir: str | Path | None = None) -> None:
        super().__init__(every, output_dir)
        self.files = (name,)
        self.path = Path(output_dir or ".") / name
        """The file, or the folder with the file."""
        self.place = self.path
        """The path of the file."""
        self.file = self.path
        """The file to write: `place`, or while it is made, a file beside it."""
        self._has_all = False  # the rows that the run has recorded

    @abstractmethod
    def begin(self, facts: Facts) -> None:
        """Begin the empty file.

        Args:
            facts: name, config, command and git commit of the run; empty without a run directory.
        """

    def register_mainloop(self, main_loop: Loop) -> None:
        """Without a run directory, check that there is no file yet; with one, `Run.claim` checks it.

        Raises:
            HookError: there is a file.
        """
        super().register_mainloop(main_loop)
        if not main_loop.has_run and os.path.lexists(self.path):
            raise HookError(
                f"{type(self).__name__}: {self.path} exists; move it elsewhere, or choose another name or directory"
            )

    def before_training(self) -> None:
        """Make the file from the recorded rows; a later session without a run directory continues it."""
        record = self.main_loop.rows
        if record.directory is not None or not self._has_all:
            with self._or_warning():
                self.make(record)
        record.sinks.append(self.take)

    def make(self, record: MetricsLog) -> None:
        """Make the file that the recorded rows give.

        Raises:
            StorageError: it cannot be written; the old file, if there is one, is unchanged.
        """
        directory = record.directory
        facts = facts_of(directory) if directory is not None else Facts("", {}, "", None, None, "")
        rows = Reader(directory).rows() if directory is not None else ()
        check_owner(self.place)
        aside = aside_of(self.path)
        with storing(self.place, "write"), written_aside(self.place, aside) as self.file:
            make_directory(self.place.parent, exist_ok=True)
            aside.touch()
            self.begin(facts)
            self._write(rows)
            flush_file(aside)
        self.file = self.place
        self._has_all = True

    def take(self, rows: Iterable[Row]) -> None:
        """Append new rows."""
        if self._has_all:
            with self._or_warning():
                self._write(rows)

    def _write(self, rows: Iterable[Row]) -> None:
        for row in filter(self.wants, rows):
            self.write(row)
        self.flush()

    def after_training(self, success: bool) -> None:
        """Append rows that are still waiting."""
        self.take(())

    def complete(self, record: MetricsLog, status: str, reason: str | None, sinks: Sequence[AbstractSink]) -> None:
        """Make the file of a run that has ended."""
        self.ask(record)
        with self._or_warning():
            self.make(record)

    @contextmanager
    def _or_warning(self) -> Iterator[None]:
        """Log an error of the file system in this block, and write nothing more to the file."""
        try:
            yield
        except RunInUse:
            raise
        except OSError as error:
            self._has_all = False
            _LOG.warning(
                "%s: %s; the run goes on without this file, and the next start of the run completes it",
                type(self).__name__,
                error,
            )
