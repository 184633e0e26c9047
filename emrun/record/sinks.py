"""Sinks: what is made from the rows of a run. This file has what all share, and what those have that write files."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError, RunInUse
from emrun.hook import AbstractHook, Loop
from emrun.record.facts import Facts, facts_of
from emrun.record.intervals import Every
from emrun.record.record import Record
from emrun.record.rows import Reader, Row
from emrun.storage.files import PLACES, append_line, check_owner, read_regular, storing, write_atomically

_LOG = logging.getLogger(__name__)
_LARGEST = 500_000_000  # bytes of a list of places


class AbstractSink(AbstractHook):
    """Base class of hooks that write the rows of a run elsewhere.

    The rows are recorded in the run directory, exactly, so a sink only has to write them. A derived class overrides
    `begin` and `write`, and perhaps `finish`.

    Args:
        every: when a row of means between epochs is due, such as `50 updates`; by default never.

    Raises:
        ArgumentError: `every` is not an interval of updates, iterations or minutes.
    """

    reads = ()
    counts_examples = False
    """Whether the rows need the number of examples."""

    def __init__(self, every: str | None = None, output_dir: str | Path | None = None) -> None:
        super().__init__(output_dir=output_dir)
        self._every = Every("every", every) if every is not None else None
        self._interval = ""
        if self._every is not None and not self._every.is_within_epochs:
            raise ArgumentError("every", f"{every!r} is an interval of epochs, which are written anyway; use updates")

    @abstractmethod
    def begin(self, facts: Facts, identity: Any) -> Any:
        """Begin, or continue.

        Args:
            facts: name, config, command and git commit of the run.
            identity: what was returned in an earlier process of the run; None in a new run.

        Returns:
            What identifies the written rows: a later process of the run gets it as `identity`.
        """

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row. Rows come in the order of their iterations."""

    def flush(self) -> None:
        """Complete what `write` has begun; called after some rows, and before anything counts on them."""

    def finish(self, status: str, reason: str | None) -> None:
        """Note how the run ended: `finished`, `interrupted` or `failed`, and why."""

    def register_mainloop(self, main_loop: Loop) -> None:
        """Ask for the rows between epochs."""
        super().register_mainloop(main_loop)
        self.ask(main_loop.rows)

    def ask(self, record: Record) -> None:
        """Ask a record for the rows between epochs."""
        self._interval = record.intervals.ask(type(self).__name__, self._every, counts=self.counts_examples)

    def wants(self, row: Row) -> bool:
        """Return whether a row is one to write."""
        return row.every in (None, self._interval)

    @abstractmethod
    def complete(self, record: Record, status: str, reason: str | None, alike: Sequence[Any]) -> None:
        """Write what is missing of a run that has ended.

        Args:
            record: the record of the run.
            status: how the run ended.
            reason: why.
            alike: the hooks of this class, in their order.
        """


class FileSink(AbstractSink):
    """Base class of sinks that write files, which a resume can take back.

    Rows are written as soon as they are recorded. A list beside the file, `.NAME.places`, says where the file ended
    when the rows had a certain length; there is an entry for each checkpoint. So a resume cuts the file down to its
    content at the checkpoint, and makes a file that was damaged, or that has other arguments now, from the rows again.
    What cannot be written is a warning: the run goes on, and the next start completes the file.

    A derived class overrides `begin`, `write` and `place`, and perhaps `flush`.

    Args:
        path: the file.
        every: see `AbstractSink`.
        output_dir: the run directory.
    """

    def __init__(self, path: Path, every: str | None = None, output_dir: str | Path | None = None) -> None:
        super().__init__(every, output_dir)
        self.path = path
        self._places = path.with_name(f".{path.name}{PLACES}")
        self._record: Record | None = None
        self._last: dict[str, Any] | None = None  # the last entry of the list
        self._has_failed = False

    @abstractmethod
    def begin(self, facts: Facts, identity: Any) -> bool:
        """Begin a new file, or continue at a place.

        Args:
            facts: name, config, command and git commit of the run.
            identity: a place, see `place`; None for a new file.

        Returns:
            Whether the file had the content that it had at the place. If not, nothing was changed.
        """

    @abstractmethod
    def place(self) -> Any:
        """Return where the content of the file ends, in types of JSON; None if rows are waiting to be written."""

    def before_training(self) -> None:
        """Begin the file, or take it back to the checkpoint."""
        self._come_back(self.main_loop.rows)
        self.main_loop.rows.sinks.append(self.take)

    def _come_back(self, record: Record) -> None:
        """Make the file that which the recorded rows give."""
        self._record, self._has_failed = record, False
        with self._or_warning():
            facts = facts_of(record.directory) if record.directory is not None else Facts("", {}, "", None, None, "")
            places = list(self._read_places()) if record.directory is not None else []
            fitting = [number for number, each in enumerate(places) if each["rows"] == record.counted_on]
            check_owner(self.path)
            for number in reversed(fitting):
                if self.begin(facts, places[number]["place"]):
                    self._last = places[number]
                    if number + 1 < len(places):
                        lines = "".join(f"{json.dumps(each)}\n" for each in places[: number + 1])
                        write_atomically(self._places, lines)
                    return
            self._make_again(facts, record, places)

    def _make_again(self, facts: Facts, record: Record, places: list[dict[str, Any]]) -> None:
        if places and not self.path.exists():
            _LOG.warning("%s: %s is gone; it is made again", type(self).__name__, self.path)
        # an empty list: a process was killed while it made the file
        is_begun = record.directory is not None and self._places.is_file() and not self._places.stat().st_size
        if self.path.exists() and not is_begun and not (places and self.begin(facts, places[-1]["place"])):
            self.keep_aside(is_known=bool(places))
        if record.directory is not None:
            write_atomically(self._places, "")
        self.begin(facts, None)
        if record.directory is not None:
            self._write(Reader(record.directory).rows())
            self._note_place()

    def keep_aside(self, *, is_known: bool) -> None:
        """Rename a file that somebody has changed.

        Args:
            is_known: whether the run has written a file of this name.
        """
        names = (self.path.with_name(f"{self.path.stem}-kept-{number}{self.path.suffix}") for number in count(1))
        aside = next(each for each in names if not each.exists())
        with storing(self.path, "rename"):
            self.path.rename(aside)
        _LOG.warning(
            "%s: %s is not as this run has written it; it is kept as %s, and made again",
            *(type(self).__name__, self.path, aside.name),
        )

    def take(self, rows: Iterable[Row]) -> None:
        """Write new rows."""
        if not self._has_failed:
            with self._or_warning():
                self._write(rows)

    def _write(self, rows: Iterable[Row]) -> None:
        for row in filter(self.wants, rows):
            self.write(row)
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Note the place for the checkpoint that is about to be saved; nothing is in the checkpoint."""
        self._note_place()
        return {}

    def after_training(self, success: bool) -> None:
        """Write the rows that are waiting."""
        self._note_place()

    def complete(self, record: Record, status: str, reason: str | None, alike: Sequence[Any]) -> None:
        """Make the file of a run that has ended complete; one that has more than the record is left alone."""
        last = next(reversed(list(self._read_places())), None)
        if last is not None and any(now < then for now, then in zip(record.position, last["rows"], strict=False)):
            return
        self.ask(record)
        self._come_back(record)
        self._note_place()

    def _note_place(self) -> None:
        record = self._record
        if record is not None:
            record.flush()
        if self._has_failed or record is None:
            return
        with self._or_warning():
            self.flush()
            entry = {"rows": record.position, "place": self.place()}
            if record.directory is not None and entry["place"] is not None and entry != self._last:
                append_line(self._places, json.dumps(entry))
                self._last = entry

    def _read_places(self) -> Iterator[dict[str, Any]]:
        if not self._places.exists():
            return
        for line in read_regular(self._places, _LARGEST).splitlines():
            try:
                entry = json.loads(line)
                sum(entry["rows"]), entry["place"]  # the rows are numbers
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            yield entry

    @contextmanager
    def _or_warning(self) -> Iterator[None]:
        """Log an error of the file system in this block, and write nothing more to the file."""
        try:
            yield
        except RunInUse:
            raise
        except OSError as error:
            self._has_failed = True
            _LOG.warning(
                "%s: %s; the run goes on without this file, and the next start of the run completes it",
                *(type(self).__name__, error),
            )
