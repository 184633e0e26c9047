"""Trackers: services that get the metrics of a run, and that cannot take back what they were sent."""

from __future__ import annotations

import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from emrun.base.arguments import check_seconds
from emrun.base.errors import ArgumentError, HookError, MissingExtra
from emrun.base.fields import TEXT, fitting, mapping_of, record, whole
from emrun.base.types import Interval
from emrun.base.wording import counted
from emrun.hook import AbstractHook
from emrun.same_hooks import Arguments, arguments_of, matched
from emrun.shown import Shown
from emrun.storage.checkpoints.manifest import readable_manifest
from emrun.storage.facts import Facts, facts_of
from emrun.storage.files import make_directory, write_atomically
from emrun.storage.tracked_rows import RowReader

_LOG = logging.getLogger(__name__)

_POSITION = record({"identity": TEXT, "epoch": whole(-1), "iteration": whole(-1), "arguments": mapping_of(TEXT)})
_MOST_ROWS = 1000  # that are sent at once
_RETRY = 30.0  # seconds until a tracker that is down is tried again


@dataclass(frozen=True)
class TrackedRow:
    """The values of an iteration that a tracker gets.

    Args:
        iteration: the number of batches that the model was trained on; rows come in its order.
        epoch: the epoch that ended with the iteration; None within an epoch.
        values: name -> number: `STREAM/VARIABLE` for means and plain numbers of an epoch, `STREAM/VARIABLE/AGGREGATION`
            for others, `steps/NAME` for the step record.
        shown: name -> what hooks have shown in the epoch: a `Picture`, a `Text` or a `Histogram`.
    """

    iteration: int
    epoch: int | None
    values: Mapping[str, float]
    shown: Mapping[str, Shown] = field(default_factory=dict)


class AbstractTracker(AbstractHook):
    """Base class of hooks that send the metrics of a run to a tracker.

        hooks:
          - my_trackers.Mine: {every: 50 updates}

    A tracker is sent only what a saved checkpoint counts on: the lines of `metrics.jsonl` and, with `every`, values of
    `steps.jsonl` up to its iteration. So nothing has to be taken back after a resume, and a resume continues the same
    run of the tracker: `RUN_DIR/trackers/CLASS.json` has its identity and the last iteration, `CLASS-2.json` that of a
    second hook of the class, whatever the order of the two later. A run that is forked begins a new one.

    A thread does the sending; the training never waits for it. If the tracker cannot be reached at the start of a new
    run, this is an error. Later it is a warning, and the rows are sent when the tracker can be reached again. At the
    end, the run waits at most `timeout` seconds; `emrun resume RUN_DIR` of a finished run sends what is still missing.

    A derived class overrides `start` and `send`, and perhaps `newest` and `finish`. They are called in the thread.

    Args:
        every: how often values of steps are sent: `50 updates` or `500 iterations`; by default never. An update counts
            as `model.accumulate` iterations.
        timeout: how many seconds to wait for the tracker at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the tracker cannot be reached at the start of a new run, or there is no run directory, or no step
            record for `every`.
    """

    def __init__(self, every: str | None = None, timeout: float = 20.0, output_dir: str | Path | None = None) -> None:
        super().__init__(output_dir=output_dir)
        check_seconds("timeout", timeout)
        self._every = Interval.parse("every", every, ("updates", "iterations")) if every is not None else None
        self._timeout = timeout
        self._thread: _Sender | None = None
        self._seen: Path | None = None

    @abstractmethod
    def start(self, facts: Facts, identity: str | None) -> str:
        """Connect to the tracker; begin a run there, or continue one.

        Args:
            facts: name, config, command and git commit of the run.
            identity: what this method returned in an earlier process of the run; None in a new run.

        Returns:
            By which name or number the tracker knows the run.

        Raises:
            Exception: the tracker cannot be reached.
        """

    @abstractmethod
    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Send rows, in the order of their iterations.

        Raises:
            Exception: the rows could not be sent; all of them will be sent again.
        """

    def newest(self) -> int | None:
        """Return the newest iteration that the tracker has of the run; None if it cannot tell.

        A process that is killed while it sends leaves open what has arrived; this says it. Called after `start`, if
        that continues a run.
        """
        return None

    def finish(self, status: str, reason: str | None) -> None:
        """Tell the tracker how the run ended: `finished`, `interrupted` or `failed`, and why."""

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
        if self._every is not None and not loop.records_steps:
            raise HookError(
                f"{name}: `every` sends values of the step record; set main_loop.record_steps, or remove it"
            )
        directory = Path(self.output_dir)
        alike = [hook for hook in loop.hooks if type(hook) is type(self)]
        position = _position(
            directory / "trackers", name, list(map(arguments_of, alike)), [hook is self for hook in alike].index(True)
        )
        every = 0 if self._every is None else int(self._every.count)
        if self._every is not None and self._every.unit == "updates":
            every *= loop.model.iterations_per_update
        self._thread = thread = _Sender(self, directory, position, RowReader(directory, every))
        if loop.iterations_done or loop.training_epochs_done:
            thread.allow(loop.training_epochs_done, loop.iterations_done)
        thread.start()
        if position.identity is None:
            thread.connected.wait(self._timeout)
            if thread.error is not None or not thread.connected.is_set():
                self._thread = None  # so that nothing waits for it at the end
                thread.give_up()
                why = f"no answer in {self._timeout:g} seconds" if thread.error is None else _why(thread.error)
                if isinstance(thread.error, ArgumentError | HookError | MissingExtra):
                    raise thread.error
                raise HookError(f"{name} cannot reach the tracker: {why}; start it, correct its address, or remove it")

    def after_epoch_profile(self, epoch_id: int, profile: Any, streams: Sequence[str]) -> None:
        """Keep what hooks have shown until a checkpoint counts on the epoch."""
        if self._thread is not None and self.main_loop.shown:
            self._thread.keep(self.main_loop.iterations_done, dict(self.main_loop.shown))

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
        thread, self._thread = self._thread, None
        if thread is None:
            return
        outcome = self.main_loop.outcome
        thread.outcome = (outcome.status, outcome.reason) if outcome is not None else ("finished", None)
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
        arguments: those of the hook.
        identity: how the tracker names the run; None if it does not know the run.
        epoch: the last epoch that was sent; -1 for none.
        iteration: the iteration of the last row that was sent; -1 for none.
    """

    path: Path
    arguments: Arguments = field(default_factory=dict)
    identity: str | None = None
    epoch: int = -1
    iteration: int = -1

    @classmethod
    def of(cls, path: Path) -> _Position:
        """Read the file; a missing or damaged one begins a new run of the tracker."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError):
            found = None
        if not fitting(found, _POSITION):
            _LOG.warning("%s is damaged; the tracker begins a new run", path)
            return cls(path)
        return cls(path, found["arguments"], found["identity"], found["epoch"], found["iteration"])

    def write(self) -> None:
        make_directory(self.path.parent, exist_ok=True)
        write_atomically(self.path, json.dumps({name: each for name, each in vars(self).items() if name != "path"}))


def _position(directory: Path, name: str, hooks: Sequence[Arguments], index: int) -> _Position:
    """Return what the tracker knows of the run from one of the hooks of a class, given by its index."""

    def path(number: int) -> Path:
        return directory / (f"{name}-{number}.json" if number > 1 else f"{name}.json")

    there = [_Position.of(path(number)) for number in takewhile(lambda number: path(number).exists(), count(1))]
    found = matched([each.arguments for each in there], hooks)
    before, number = found[index], len(there) + 1 + found[:index].count(None)
    position = there[before] if before is not None else _Position(path(number))
    position.arguments = hooks[index]
    return position


class _Sender(threading.Thread):
    """The thread that talks to a tracker.

    Args:
        tracker: the hook.
        directory: the run directory.
        position: what the tracker knows of the run.
        reader: reads the rows.
    """

    def __init__(self, tracker: AbstractTracker, directory: Path, position: _Position, reader: RowReader) -> None:
        super().__init__(name=f"emrun {type(tracker).__name__}", daemon=True)
        self.position = position
        self.connected = threading.Event()
        self.error: BaseException | None = None
        self.outcome: tuple[str, str | None] = ("failed", None)
        self._tracker, self._directory, self._reader = tracker, directory, reader
        self._facts = facts_of(directory)
        self._news = threading.Condition()
        self._limit: tuple[int, int] | None = None  # epoch and iteration of the newest checkpoint
        self._shown: dict[int, dict[str, Shown]] = {}
        self._is_ending = False
        self._is_given_up = False
        self._is_done = False
        self._is_down = False

    def allow(self, epoch: int, iteration: int) -> None:
        """Let everything up to a checkpoint be sent."""
        with self._news:
            self._limit = epoch, iteration
            self._news.notify()

    def keep(self, iteration: int, shown: dict[str, Shown]) -> None:
        """Keep what hooks have shown, to be sent with the row of the iteration."""
        with self._news:
            self._shown[iteration] = shown

    def end(self, seconds: float) -> bool:
        """Let the thread send the rest and end; return whether it did so in time."""
        with self._news:
            self._is_ending = True
            self._news.notify()
        self.join(seconds)
        return self._is_done

    def give_up(self) -> None:
        """Let the thread end without another word to the tracker; it may wait for an answer until then."""
        with self._news:
            self._is_given_up = self._is_ending = True
            self._news.notify()

    def run(self) -> None:
        """Connect, send what is allowed, begin again after an error, until the run ends."""
        seen: tuple[int, int] | None = None
        while True:
            with self._news:
                waits = self.connected.is_set() and self._limit == seen and not self._is_ending
                if waits or self._is_down:
                    self._news.wait_for(
                        lambda: self._is_ending or (not self._is_down and self._limit != seen),  # noqa: B023
                        _RETRY if self._is_down else None,
                    )
                limit, is_ending = self._limit, self._is_ending
            try:
                if not self.connected.is_set():
                    self._connect()
                if self._is_given_up:
                    return
                if limit is not None:
                    self._send(limit, is_end=is_ending and self.outcome[0] == "finished")
                seen = limit
                if is_ending:
                    self._tracker.finish(*self.outcome)
                    self._is_done = True
            except Exception as error:  # a library of a tracker may raise anything
                self._note(error)
                if self.position.identity is None:  # `before_training` raises it
                    self.connected.set()
                    return
            if is_ending:
                return

    def _connect(self) -> None:
        is_new = self.position.identity is None
        self.position.identity = self._tracker.start(self._facts, self.position.identity)
        newest = None if is_new else self._tracker.newest()
        if newest is not None and newest != self.position.iteration:  # a process was killed while it was sending
            self.position.iteration = newest
            self.position.epoch = self._reader.epoch_before(newest)
        self.position.write()
        self.connected.set()

    def _send(self, limit: tuple[int, int], *, is_end: bool) -> None:
        rows: list[TrackedRow] = []
        for each in self._reader.rows((self.position.epoch, self.position.iteration), limit, is_end=is_end):
            rows.append(TrackedRow(*each, self._shown.get(each[0], {}) if each[1] is not None else {}))
            if len(rows) == _MOST_ROWS:
                self._send_part(rows)
                rows = []
        if rows:
            self._send_part(rows)

    def _send_part(self, rows: list[TrackedRow]) -> None:
        self._tracker.send(rows)
        self.position.iteration = rows[-1].iteration
        self.position.epoch = max([self.position.epoch, *(row.epoch for row in rows if row.epoch is not None)])
        self.position.write()
        with self._news:
            for number in [number for number in self._shown if number <= rows[-1].iteration]:
                del self._shown[number]
        if self._is_down:
            self._is_down, self.error = False, None
            _LOG.info("%s: the tracker is back; %s sent", type(self._tracker).__name__, counted(len(rows), "row"))

    def _note(self, error: Exception) -> None:
        self.error = error
        if not self._is_down and self.position.identity is not None:
            name = type(self._tracker).__name__
            _LOG.warning("%s: the tracker cannot be reached: %s; the rows are sent later", name, _why(error))
        self._is_down = True


def _why(error: BaseException) -> str:
    """Return the first line of an error, with its class."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
