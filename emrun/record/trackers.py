"""Trackers: services that get the rows of a run, and that cannot take back what they were sent."""

from __future__ import annotations

import json
import logging
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from emrun.base.arguments import check_seconds
from emrun.base.errors import ArgumentError, HookError, MissingExtra
from emrun.base.fields import TEXT, fitting, record, whole
from emrun.base.wording import counted
from emrun.record.facts import facts_of
from emrun.record.record import Record
from emrun.record.rows import Reader, Row
from emrun.record.sinks import AbstractSink
from emrun.shown import Counts, Picture
from emrun.storage.checkpoints.manifest import readable_manifest
from emrun.storage.files import make_directory, read_regular, refuse_timeout, write_atomically

_LOG = logging.getLogger(__name__)

_POSITION = record(
    {
        "identity": TEXT,
        "status": TEXT,
        "epoch": whole(-1),
        "iteration": whole(-1),
        "at_end": whole(-1),
    }
)
_LARGEST = 1_000_000  # bytes of the file
_MOST_ROWS = 1000  # that are sent at once
_RETRY = 30.0  # seconds until a tracker that is down is tried again


class AbstractTracker(AbstractSink):
    """Base class of hooks that send the rows of a run to a tracker.

        hooks:
          - my_trackers.Mine: {every: 50 updates}

    A tracker is sent only what a saved checkpoint counts on. So nothing has to be taken back after a resume, and a
    resume continues the same run of the tracker: `RUN_DIR/trackers/CLASS.json` has its identity and the last iteration,
    `CLASS-2.json` that of a second hook of the class: list new ones after the others. A run that is forked begins a new
    one.

    A thread does the sending; the training never waits for it. If the tracker cannot be reached at the start of a new
    run, this is an error. Later it is a warning, and the rows are sent when the tracker can be reached again. At the
    end, the run waits at most `timeout` seconds; `emrun resume RUN_DIR` sends what is still missing, also of a finished
    run.

    A derived class overrides `begin`, `newest` and `write`, and perhaps `flush` and `finish`. They are called in the
    thread. An error of any of them is a warning; the rows since the last `flush` are sent again.

    Args:
        every: how often means between epochs are sent: `50 updates`, `500 iterations` or `5 minutes`; by default never.
        timeout: how many seconds to wait for the tracker at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the tracker cannot be reached at the start of a new run, or there is no run directory.
    """

    def __init__(self, every: str | None = None, timeout: float = 20.0, output_dir: str | Path | None = None) -> None:
        super().__init__(every, output_dir)
        check_seconds("timeout", timeout)
        self._timeout = timeout
        self._thread: _Sender | None = None
        self._seen: Path | None = None

    @abstractmethod
    def newest(self) -> int | None:
        """Return the newest iteration that the tracker has of the run; -1 for none, None if it cannot tell.

        A process that is killed while it sends leaves open what has arrived; this says it. With None, up to 1,000 rows
        come twice then. Called after `begin`, if that continues a run.
        """

    @staticmethod
    def objects_of(
        row: Row, picture: Callable[..., Any], histogram: Callable[..., Any], text: Callable[..., Any]
    ) -> dict[str, Any]:
        """Return what hooks have shown as objects of a service.

        Args:
            row: the row of an epoch.
            picture: makes an object of an image of Pillow.
            histogram: makes an object of a histogram of NumPy, its argument `np_histogram`.
            text: makes an object of a text in Markdown.
        """
        found: dict[str, Any] = {}
        for name, shown in row.shown.items():
            if isinstance(shown, Picture):
                found[name] = picture(shown.image())
            elif isinstance(shown, Counts):
                found[name] = histogram(np_histogram=(shown.counts, shown.edges))
            else:
                found[name] = text(shown.text)
        return found

    def before_training(self) -> None:
        """Start the thread, and wait for the connection of a new run.

        Raises:
            HookError: the tracker cannot be reached, and this is a new run; or a value of an argument is not possible.
        """
        loop, name = self.main_loop, type(self).__name__
        if loop.evaluating:
            return
        if not loop.has_run or self.output_dir is None:
            raise HookError(f"{name} needs a run directory, from which it sends metrics")
        loop.rows.sinks.append(lambda rows: None)  # so that what hooks show is recorded
        thread = self._start([hook for hook in loop.hooks if type(hook) is type(self)])
        if loop.iterations_done or loop.training_epochs_done:
            thread.allow(loop.training_epochs_done, loop.iterations_done)
        thread.start()
        if thread.position.identity is None:
            thread.connected.wait(self._timeout)
            if thread.error is not None or not thread.connected.is_set():
                self._thread = None  # so that nothing waits for it at the end
                thread.give_up()
                why = f"no answer in {self._timeout:g} seconds" if thread.error is None else _why(thread.error)
                if isinstance(thread.error, ArgumentError | HookError | MissingExtra):
                    raise thread.error
                raise HookError(f"{name} cannot reach the tracker: {why}; start it, correct its address, or remove it")

    def _start(self, alike: Sequence[Any]) -> _Sender:
        directory = Path(str(self.output_dir))
        own = [hook is self for hook in alike].index(True)
        position = _position(directory / "trackers", type(self).__name__, own)
        self._thread = _Sender(self, directory, position)
        return self._thread

    def complete(self, record: Record, status: str, reason: str | None, alike: Sequence[Any]) -> None:
        """Send what is missing of a run that has ended."""
        self.ask(record)
        thread = self._start(alike)
        if not thread.is_behind(status):
            self._thread = None
            return
        thread.allow(sys.maxsize, sys.maxsize)
        thread.start()
        self._end(status, reason)

    def after_checkpoint(self, name: str, directory: Path) -> None:
        """Let the thread send what the checkpoint counts on."""
        if self._thread is None or directory == self._seen:
            return
        self._seen = directory
        manifest = readable_manifest(directory)
        if manifest is not None:
            self._thread.allow(manifest.epoch, manifest.iteration)

    def after_training(self, success: bool) -> None:
        """Wait for the thread, but not for ever; say what was not sent."""
        outcome = self.main_loop.outcome
        self._end(*((outcome.status, outcome.reason) if outcome is not None else ("finished", None)))

    def _end(self, status: str, reason: str | None) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.outcome = status, reason
        if not thread.end(self._timeout):
            _LOG.warning(
                "%s: the tracker did not take all rows%s; `emrun resume %s` sends the others, also of a finished run",
                type(self).__name__,
                "" if thread.position.iteration < 0 else f" after iteration {thread.position.iteration}",
                self.output_dir,
            )


@dataclass
class _Position:
    """What a tracker knows of the run; the file is written by the thread.

    Args:
        path: the file.
        identity: how the tracker names the run; None if it does not know the run.
        epoch: the last epoch that was sent; -1 for none.
        iteration: the iteration of the last row that was sent; -1 for none.
        at_end: the iteration of the evaluation after a limit that was sent; -1 for none.
        status: how the run ended, as the tracker was told.
    """

    path: Path
    identity: str | None = None
    epoch: int = -1
    iteration: int = -1
    at_end: int = -1
    status: str = ""

    @classmethod
    def of(cls, path: Path) -> _Position:
        """Read the file; a damaged one begins a new run of the tracker.

        Raises:
            ReadTimeout: it could not be read in time.
        """
        try:
            found = json.loads(read_regular(path, _LARGEST, depth=2))
        except (OSError, ValueError, RecursionError) as error:
            refuse_timeout(error, path)
            found = None
        if not fitting(found, _POSITION):
            _LOG.warning("%s is damaged; the tracker begins a new run", path)
            return cls(path)
        return cls(path, **found)

    def write(self) -> None:
        make_directory(self.path.parent, exist_ok=True)
        write_atomically(self.path, json.dumps({name: each for name, each in vars(self).items() if name != "path"}))


def _position(directory: Path, name: str, index: int) -> _Position:
    """Return what the tracker knows of the run from one of the hooks of a class, given by its index."""
    path = directory / (f"{name}-{index + 1}.json" if index else f"{name}.json")
    return _Position.of(path) if path.exists() else _Position(path)


class _Sender(threading.Thread):
    """The thread that talks to a tracker.

    Args:
        tracker: the hook.
        directory: the run directory.
        position: what the tracker knows of the run.
    """

    def __init__(self, tracker: AbstractTracker, directory: Path, position: _Position) -> None:
        super().__init__(name=f"emrun {type(tracker).__name__}", daemon=True)
        self.position = position
        self.connected = threading.Event()
        self.error: BaseException | None = None  # since which the tracker is down
        self.outcome: tuple[str, str | None] = ("failed", None)
        self._tracker, self._reader = tracker, Reader(directory)
        self._waiting: list[Row] = []  # that were read and not sent
        self._facts = facts_of(directory)
        self._news: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # epoch and iteration of checkpoints; None: end
        self._is_given_up = False
        self._is_done = False

    def allow(self, epoch: int, iteration: int) -> None:
        """Let everything up to a checkpoint be sent."""
        self._news.put((epoch, iteration))

    def is_behind(self, status: str) -> bool:
        """Return whether the tracker lacks rows, or how the run ended."""
        has_all = all(map(self._has, self._read()))
        return self.position.identity is None or self.position.status != status or not has_all

    def _has(self, row: Row) -> bool:
        """Return whether the tracker has a row."""
        position = self.position
        if row.at_end:
            return position.at_end == row.iteration
        return row.iteration <= position.iteration and (row.every is not None or row.epoch <= position.epoch)

    def end(self, seconds: float) -> bool:
        """Let the thread send the rest and end; return whether it did so in time."""
        self._news.put(None)
        self.join(seconds)
        return self._is_done

    def give_up(self) -> None:
        """Let the thread end without another word to the tracker; it may wait for an answer until then."""
        self._is_given_up = True
        self._news.put(None)

    def run(self) -> None:
        """Connect, send what is allowed, begin again after an error, until the run ends."""
        limit: tuple[int, int] | None = None
        is_ending = False
        while True:
            try:
                if not self.connected.is_set():
                    self._connect()
                if self._is_given_up:
                    return
                if limit is not None:
                    self._send(limit, is_end=is_ending and self.outcome[0] == "finished")
                if is_ending:
                    self._tracker.finish(*self.outcome)
                    self.position.status = self.outcome[0]
                    self.position.write()
                    self._is_done = True
            except BaseException as error:
                self._note(error)
                if self.position.identity is None:  # `before_training` raises it
                    self.connected.set()
                    return
            if is_ending:
                return
            with suppress(Empty):  # a tracker that is down is tried again
                news = self._news.get(timeout=None if self.error is None else _RETRY)
                limit, is_ending = news or limit, news is None

    def _connect(self) -> None:
        is_new = self.position.identity is None
        self.position.identity = self._tracker.begin(self._facts, self.position.identity)
        newest = None if is_new else self._tracker.newest()
        if newest is not None and newest != self.position.iteration:  # a process was killed while it was sending
            self.position.iteration = newest
            ended = [row.epoch for row in self._read() if row.every is None and row.iteration <= newest]
            self.position.epoch = max(ended, default=-1)
        self.position.write()
        self.connected.set()

    def _read(self) -> list[Row]:
        """Return the rows that are waiting, with those that were written since the last call."""
        for row in self._reader.rows():
            if self._tracker.wants(row):
                last = self._waiting[-1] if self._waiting else row
                if row.every is None and last.every is not None and last.iteration == row.iteration:
                    self._waiting[-1] = replace(row, means=last.means)  # services take an iteration only once
                else:
                    self._waiting.append(row)
        return self._waiting

    def _send(self, limit: tuple[int, int], *, is_end: bool) -> None:
        rows: list[Row] = []
        self._waiting = [row for row in self._read() if not self._has(row)]
        for row in self._waiting:
            if row.at_end or row.every is not None:  # the means of the last step wait: an epoch may end with it
                is_allowed = is_end or (row.iteration < limit[1] and not row.at_end)
            else:
                is_allowed = row.iteration <= limit[1] and row.epoch <= limit[0]
            if not is_allowed:
                break
            rows.append(replace(row, means={}) if row.iteration <= self.position.iteration else row)
        for first in range(0, len(rows), _MOST_ROWS):
            self._send_part(rows[first : first + _MOST_ROWS])

    def _send_part(self, rows: list[Row]) -> None:
        written = 0
        try:
            for row in rows:
                self._tracker.write(row)
                written += 1
            self._tracker.flush()
        except Exception:
            if type(self._tracker).flush is AbstractSink.flush:  # each row has arrived by itself
                self._advance(rows[:written])
            raise
        self._advance(rows)
        if self.error is not None:
            self.error = None
            _LOG.info("%s: the tracker is back; %s sent", type(self._tracker).__name__, counted(len(rows), "row"))

    def _advance(self, rows: list[Row]) -> None:
        """Note that rows have arrived."""
        position = self.position
        for row in rows:
            position.iteration = max(position.iteration, row.iteration)
            if row.at_end:
                position.at_end = row.iteration
            elif row.every is None:
                position.epoch = max(position.epoch, row.epoch)
        position.write()

    def _note(self, error: BaseException) -> None:
        if self.error is None and self.position.identity is not None:
            name = type(self._tracker).__name__
            _LOG.warning("%s: the tracker cannot be reached: %s; the rows are sent later", name, _why(error))
        self.error = error


def _why(error: BaseException) -> str:
    """Return the first line of an error, with its class."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
