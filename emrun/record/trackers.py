"""Trackers: services that get the rows of a run, and that cannot take back what they were sent."""

from __future__ import annotations

import json
import logging
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from emrun.base.arguments import check_seconds
from emrun.base.errors import ArgumentError, HookError, MissingExtra
from emrun.base.fields import TEXT, fitting, record, sequence_of, whole
from emrun.base.wording import counted
from emrun.record.facts import Facts, facts_of
from emrun.record.record import Record
from emrun.record.rows import Reader, Row
from emrun.record.sinks import AbstractSink
from emrun.shown import Counts, Picture
from emrun.storage.checkpoints.manifest import readable_manifest
from emrun.storage.files import make_directory, read_regular, refuse_timeout, write_atomically

_LOG = logging.getLogger(__name__)

_POSITION = record(
    {
        "home": sequence_of(TEXT),
        "identity": TEXT,
        "status": TEXT,
        "epoch": whole(-1),
        "iteration": whole(-1),
        "at_end": whole(-1),
    }
)
_LARGEST = 1_000_000  # bytes of the file
_MOST_ROWS = 1000  # that are sent at once
_Outcome = tuple[str, str | None]  # the status of the run, and why
_Task = tuple[Future[None], tuple[int, int], _Outcome | None]


class AbstractTracker(AbstractSink):
    """Base class of hooks that send the rows of a run to a tracker.

        hooks:
          - my_trackers.Mine: {every: 50 updates}

    A tracker is sent only what a saved checkpoint counts on. So nothing has to be taken back after a resume, and a
    resume continues the same run of the tracker: `RUN_DIR/trackers/CLASS.json` has its identity and the last iteration,
    `CLASS-2.json` that of the second hook of the class. A copy of the run directory begins a new one.

    A thread does the sending; the training never waits for it. If the tracker cannot be reached at the start of a new
    run, this is an error. Later it is a warning, and the rows are sent with the next checkpoint for which the tracker
    can be reached. At the end, the run waits at most `timeout` seconds; `emrun resume RUN_DIR` sends what is still
    missing, also of a finished run.

    A derived class overrides `begin`, `newest` and `write`, and perhaps `flush` and `finish`. They are called in the
    thread. An error of any of them is a warning; the rows since the last `flush` are sent again.

    Args:
        every: how often means between epochs are sent: `50 updates`, `500 iterations` or `5 minutes`; by default never.
        timeout: how many seconds to wait for the tracker at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the tracker cannot be reached at the start of a new run, or there is no run directory.
    """

    files: Sequence[str] = ("trackers/",)

    def __init__(self, every: str | None = None, timeout: float = 20.0, output_dir: str | Path | None = None) -> None:
        super().__init__(every, output_dir)
        check_seconds("timeout", timeout)
        self._timeout = timeout
        self._sender: _Sender | None = None

    @abstractmethod
    def begin(self, facts: Facts, identity: Any) -> Any:
        """Begin, or continue.

        Args:
            facts: name, config, command and git commit of the run.
            identity: what was returned in an earlier process of the run; None in a new run.

        Returns:
            What identifies the written rows, a text: a later process of the run gets it as `identity`.
        """

    @abstractmethod
    def newest(self) -> int | None:
        """Return the newest iteration that the tracker has of the run; -1 for none, None if it cannot tell.

        A process that is killed while it sends leaves open what has arrived; this says it. With None, up to 1,000 rows
        come twice then. Called after `begin`, if that continues a run.
        """

    def finish(self, status: str, reason: str | None) -> None:
        """Note how the run ended: `finished`, `interrupted` or `failed`, and why."""

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
        """Begin to send, and wait for the connection of a new run.

        Raises:
            HookError: the tracker cannot be reached, and this is a new run; or a value of an argument is not possible.
        """
        loop, name = self.main_loop, type(self).__name__
        if loop.evaluating:
            return
        if not loop.has_run or self.output_dir is None:
            raise HookError(f"{name} needs a run directory, from which it sends metrics")
        loop.rows.sinks.append(lambda rows: None)  # so that what hooks show is recorded
        sender = self._sender_among(loop.hooks)
        is_new = sender.position.identity is None
        if loop.iterations_done or loop.training_epochs_done:
            sender.limit = loop.training_epochs_done, loop.iterations_done
        begun = sender.send()
        if is_new:
            wait([begun], self._timeout)
            error = begun.exception() if begun.done() else TimeoutError(f"no answer in {self._timeout:g} seconds")
            if error is not None:
                sender.stop()
            if isinstance(error, ArgumentError | HookError | MissingExtra):
                raise error
            if error is not None:
                why = _why(error)
                raise HookError(f"{name} cannot reach the tracker: {why}; start it, correct its address, or remove it")
        self._sender = sender

    def _sender_among(self, hooks: Sequence[Any]) -> _Sender:
        """Return what sends, with the position of this hook, by its order among those of its class."""
        number = [hook for hook in hooks if type(hook) is type(self)].index(self) + 1
        name = f"{type(self).__name__}-{number}.json" if number > 1 else f"{type(self).__name__}.json"
        return _Sender(self, Path(str(self.output_dir)), name)

    def complete(self, record: Record, status: str, reason: str | None, alike: Sequence[Any]) -> None:
        """Send what is missing of a run that has ended."""
        self.ask(record)
        sender = self._sender_among(alike)
        if sender.is_behind(status):
            sender.limit = sys.maxsize, sys.maxsize
            self._sender = sender
            self._end(status, reason)

    def after_checkpoint(self, name: str, directory: Path) -> None:
        """Let the thread send what the checkpoint counts on."""
        manifest = readable_manifest(directory)
        if self._sender is not None and manifest is not None:
            self._sender.limit = manifest.epoch, manifest.iteration
            self._sender.send()

    def after_training(self, success: bool) -> None:
        """Wait for the thread, but not for ever; say what was not sent."""
        outcome = self.main_loop.outcome
        self._end(*((outcome.status, outcome.reason) if outcome is not None else ("finished", None)))

    def _end(self, status: str, reason: str | None) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        ended = sender.send((status, reason))
        sender.stop()
        wait([ended], self._timeout)
        if not ended.done() or ended.exception() is not None:
            _LOG.warning(
                "%s: the tracker did not take all rows%s; `emrun resume %s` sends the others, also of a finished run",
                type(self).__name__,
                "" if sender.position.iteration < 0 else f" after iteration {sender.position.iteration}",
                self.output_dir,
            )


@dataclass
class _Position:
    """What a tracker knows of the run; the file is written by the thread.

    Args:
        path: the file.
        home: path and inode of the run directory. The file counts if one of them is that of the directory in which it
            lies: the run was moved or restored, not copied.
        identity: how the tracker names the run; None if it does not know the run.
        epoch: the last epoch that was sent; -1 for none.
        iteration: the iteration of the last row that was sent; -1 for none.
        at_end: the iteration of the evaluation after a limit that was sent; -1 for none.
        status: how the run ended, as the tracker was told.
    """

    path: Path
    home: list[str]
    identity: str | None = None
    epoch: int = -1
    iteration: int = -1
    at_end: int = -1
    status: str = ""

    @classmethod
    def of(cls, path: Path) -> _Position:
        """Read the file; without one, with that of another directory or a damaged one, begin a new run of the tracker.

        Raises:
            ReadTimeout: it could not be read in time.
        """
        directory = path.parent.parent.resolve()
        new = cls(path, [str(directory), str(directory.stat().st_ino)])
        if not path.exists():
            return new
        try:
            found = json.loads(read_regular(path, _LARGEST, depth=2))
        except (OSError, ValueError, RecursionError) as error:
            refuse_timeout(error, path)
            found = None
        if not fitting(found, _POSITION):
            _LOG.warning("%s is damaged; the tracker begins a new run", path)
            return new
        if not any(then == now for then, now in zip(found["home"], new.home, strict=False)):
            _LOG.info("%s is of the run directory that was copied; the copy begins a new run of the tracker", path)
            return new
        return cls(path, **{**found, "home": new.home})

    def write(self) -> None:
        make_directory(self.path.parent, exist_ok=True)
        write_atomically(self.path, json.dumps({name: each for name, each in vars(self).items() if name != "path"}))


class _Sender:
    """Talks to a tracker in a thread of its own, one task after another.

    The thread is a daemon, so that a tracker that hangs does not keep the process: Python waits at its exit for the
    threads of an executor.

    Args:
        tracker: the hook.
        directory: the run directory.
        name: the name of the file with the position.
    """

    def __init__(self, tracker: AbstractTracker, directory: Path, name: str) -> None:
        self.position = _Position.of(directory / "trackers" / name)
        self.limit = -1, -1
        """Epoch and iteration of the newest checkpoint: up to them, rows are sent."""
        self._tracker, self._reader = tracker, Reader(directory)
        self._waiting: list[Row] = []  # that were read and not sent
        self._facts = facts_of(directory)
        self._is_connected = False
        self._is_down = False
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"emrun {type(tracker).__name__}", daemon=True)

    def send(self, outcome: _Outcome | None = None) -> Future[None]:
        """Begin to send what is recorded up to the limit, and at the end of the run how it ended."""
        if not self._thread.is_alive():
            self._thread.start()
        done: Future[None] = Future()
        self._tasks.put((done, self.limit, outcome))
        return done

    def stop(self) -> None:
        """Let the thread end after the tasks that it has."""
        self._tasks.put(None)

    def is_behind(self, status: str) -> bool:
        """Return whether the tracker lacks rows, or how the run ended."""
        has_all = all(map(self._has, self._read()))
        return self.position.identity is None or self.position.status != status or not has_all

    def _has(self, row: Row) -> bool:
        """Return whether a tracker has a row."""
        position = self.position
        if row.at_end:
            return position.at_end == row.iteration
        return row.iteration <= position.iteration and (row.every is not None or row.epoch <= position.epoch)

    def _work(self) -> None:
        for done, limit, outcome in iter(self._tasks.get, None):
            try:
                self._do(limit, outcome)
            except BaseException as error:
                self._note(error)
                done.set_exception(error)
            else:
                done.set_result(None)

    def _do(self, limit: tuple[int, int], outcome: _Outcome | None) -> None:
        """Connect, if this was not done; send what is allowed; say how the run ended."""
        if not self._is_connected:
            self._connect()
        self._send(limit, is_end=outcome is not None and outcome[0] == "finished")
        if outcome is not None:
            self._tracker.finish(*outcome)
            self.position.status = outcome[0]
            self.position.write()

    def _connect(self) -> None:
        is_new = self.position.identity is None
        self.position.identity = self._tracker.begin(self._facts, self.position.identity)
        newest = None if is_new else self._tracker.newest()
        if newest is not None and newest != self.position.iteration:  # a process was killed while it was sending
            self.position.iteration = newest
            ended = [row.epoch for row in self._read() if row.every is None and row.iteration <= newest]
            self.position.epoch = max(ended, default=-1)
        self.position.write()
        self._is_connected = True

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
        arrives_at_once = type(self._tracker).flush is AbstractSink.flush
        written = 0
        try:
            for row in rows:
                self._tracker.write(row)
                written += 1
            self._tracker.flush()
        except Exception:
            self._advance(rows[:written] if arrives_at_once else [])
            raise
        self._advance(rows)
        if self._is_down:
            self._is_down = False
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
        if not self._is_down and self.position.identity is not None:  # of a new run, `before_training` raises it
            name = type(self._tracker).__name__
            _LOG.warning("%s: the tracker cannot be reached: %s; the rows are sent later", name, _why(error))
        self._is_down = True


def _why(error: BaseException) -> str:
    """Return the first line of an error, with its class."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
