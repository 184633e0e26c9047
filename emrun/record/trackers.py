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
from emrun.base.wording import counted, in_one_line
from emrun.record.facts import Facts, facts_of
from emrun.record.metrics_log import MetricsLog
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
        "last": sequence_of(whole(-1)),
        "status": TEXT,
    }
)
_LARGEST = 1_000_000  # bytes of the file
_MOST_ROWS = 1000  # that are sent at once
_Outcome = tuple[str, str | None]  # the status of the run, and why
_Place = tuple[int, int, int]  # in the order of rows, see `_place_of`


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
        objects: dict[str, Any] = {}
        for name, shown in row.shown.items():
            if isinstance(shown, Picture):
                objects[name] = picture(shown.image())
            elif isinstance(shown, Counts):
                objects[name] = histogram(np_histogram=(shown.counts, shown.edges))
            else:
                objects[name] = text(shown.text)
        return objects

    def before_training(self) -> None:
        """Begin to send, and wait for the connection of a new run.

        Raises:
            HookError: the tracker cannot be reached, and this is a new run; or a value of an argument is not possible.
        """
        loop = self.main_loop
        name = type(self).__name__
        if loop.evaluating:
            return
        if not loop.has_run or self.output_dir is None:
            raise HookError(f"{name} needs a run directory, from which it sends metrics")
        loop.rows.sinks.append(lambda rows: None)  # so that what hooks show is recorded
        sender = self._sender_among(loop.hooks)
        is_new = sender.position.identity is None
        if loop.iterations_done or loop.training_epochs_done:
            sender.limit = loop.iterations_done, 0, loop.training_epochs_done

        # a new run waits for its connection
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

    def complete(self, record: MetricsLog, status: str, reason: str | None, sinks: Sequence[AbstractSink]) -> None:
        """Send what is missing of a run that has ended."""
        self.ask(record)
        sender = self._sender_among(sinks)
        if sender.is_behind(status):
            self._sender = sender
            self._end(status, reason)

    def after_checkpoint(self, name: str, directory: Path) -> None:
        """Let the thread send what the checkpoint counts on."""
        manifest = readable_manifest(directory)
        if self._sender is not None and manifest is not None:
            self._sender.limit = manifest.iteration, 0, manifest.epoch
            self._sender.send()

    def after_training(self, success: bool) -> None:
        """Wait for the thread, but not for ever; say what was not sent."""
        self._end(self.main_loop.outcome.status, self.main_loop.outcome.reason)

    def _end(self, status: str, reason: str | None) -> None:
        sender = self._sender
        self._sender = None
        if sender is None:
            return
        if status == "finished":
            sender.limit = sys.maxsize, 0, 0
        ended = sender.send((status, reason))
        sender.stop()
        wait([ended], self._timeout)
        if not ended.done() or ended.exception() is not None:
            iteration = sender.position.last[0]
            _LOG.warning(
                "%s: the tracker did not take all rows%s; `emrun resume %s` sends the others, also of a finished run",
                type(self).__name__,
                "" if iteration < 0 else f" after iteration {iteration}",
                self.output_dir,
            )


@dataclass
class _Position:
    """What a tracker knows of the run.

    Args:
        home: path and inode of the run directory.
        identity: how the tracker names the run; None if it does not know the run.
        last: the place of the last row that was sent.
        status: how the run ended, as the tracker was told.
    """

    home: list[str]
    identity: str | None = None
    last: _Place = (-1, 0, 0)
    status: str = ""


def _read_position(path: Path) -> _Position:
    """Read the file of a position.

    A position counts only in the directory whose run has written it, which has the same path or the same inode: the run
    was restored or moved. Otherwise it is a copy, and the tracker begins a new run; so it does if the file is damaged.

    Raises:
        ReadTimeout: it could not be read in time.
    """
    directory = path.parent.parent.resolve()
    new = _Position([str(directory), str(directory.stat().st_ino)])
    if not path.exists():
        return new
    try:
        content = json.loads(read_regular(path, _LARGEST, depth=2))
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, path)
        content = None
    if not fitting(content, _POSITION) or len(content["last"]) != len(new.last):
        _LOG.warning("%s is damaged; the tracker begins a new run", path)
        return new
    if not any(then == now for then, now in zip(content["home"], new.home, strict=False)):
        _LOG.info("%s is of the run directory that was copied; the copy begins a new run of the tracker", path)
        return new
    return _Position(new.home, content["identity"], tuple(content["last"]), content["status"])


def _place_of(row: Row) -> _Place:
    """Return the place of a row in the order of rows.

    Means come after the epoch of their iteration: an epoch may end with it, and services take an iteration only once.
    """
    if row.at_end:
        return row.iteration, 2, row.epoch
    return (row.iteration, 0, row.epoch) if row.every is None else (row.iteration, 1, 0)


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
        self.path = directory / "trackers" / name
        self.position = _read_position(self.path)
        self.limit: _Place = (-1, 0, 0)
        """The place up to which rows are sent: that of the newest checkpoint."""
        self._tracker = tracker
        self._reader = Reader(directory)
        self._rows: list[Row] = []  # that were read and not sent
        self._facts = facts_of(directory)
        self._is_connected = False
        self._is_down = False
        self._tasks: SimpleQueue[tuple[Future[None], _Place, _Outcome | None] | None] = SimpleQueue()
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
        return self.position.identity is None or self.position.status != status or bool(self._read())

    def _work(self) -> None:
        for done, limit, outcome in iter(self._tasks.get, None):
            try:
                self._do(limit, outcome)
            except BaseException as error:
                self._note(error)
                done.set_exception(error)
            else:
                done.set_result(None)

    def _do(self, limit: _Place, outcome: _Outcome | None) -> None:
        """Connect, if this was not done; send the rows up to a limit; say how the run ended."""
        if not self._is_connected:
            self._connect()
        rows = [row for row in self._read() if _place_of(row) <= limit]
        for first in range(0, len(rows), _MOST_ROWS):
            self._send(rows[first : first + _MOST_ROWS])
        if outcome is not None:
            self._tracker.finish(*outcome)
            self.position.status = outcome[0]
            self._note_position()

    def _connect(self) -> None:
        is_new = self.position.identity is None
        self.position.identity = self._tracker.begin(self._facts, self.position.identity)
        newest = None if is_new else self._tracker.newest()
        if newest is not None and newest != self.position.last[0]:  # a process was killed while it was sending
            self.position.last = newest, 1, 0
        self._note_position()
        self._is_connected = True

    def _read(self) -> list[Row]:
        """Return the recorded rows that were not sent."""
        for row in self._reader.rows():
            if self._tracker.wants(row):
                last = self._rows[-1] if self._rows else row
                if row.every is None and last.every is not None and last.iteration == row.iteration:
                    self._rows[-1] = replace(row, means=last.means)
                else:
                    self._rows.append(row)
        self._rows = [row for row in self._rows if _place_of(row) > self.position.last]
        return self._rows

    def _send(self, rows: list[Row]) -> None:
        """Send some rows, and note how far the tracker has taken them."""
        sent = 0
        try:
            for row in rows:
                has_means = row.iteration <= self.position.last[0]
                self._tracker.write(replace(row, means={}) if has_means else row)
                sent += 1
            self._tracker.flush()
        except BaseException:
            if type(self._tracker).flush is not AbstractSink.flush:  # else each row has arrived by itself
                sent = 0
            raise
        finally:
            self.position.last = max([self.position.last, *map(_place_of, rows[:sent])])
            self._note_position()
        if self._is_down:
            self._is_down = False
            _LOG.info("%s: the tracker is back; %s sent", type(self._tracker).__name__, counted(len(rows), "row"))

    def _note_position(self) -> None:
        make_directory(self.path.parent, exist_ok=True)
        write_atomically(self.path, json.dumps(vars(self.position)))

    def _note(self, error: BaseException) -> None:
        if not self._is_down and self.position.identity is not None:  # of a new run, `before_training` raises it
            _LOG.warning(
                "%s: the tracker cannot be reached: %s; the rows are sent later",
                type(self._tracker).__name__,
                _why(error),
            )
        self._is_down = True


def _why(error: BaseException) -> str:
    """Return the message of an error on one line, with its class."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {in_one_line(message)}"
