"""The run directory: one folder that holds all that a training produces, and tells how it went."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import emrun
from emrun.arguments import safe_component
from emrun.censor import Censor, keep_on_terminal
from emrun.errors import RunExists, UsageError, reason_of
from emrun.fields import (
    ANYTHING,
    FLAG,
    TEXT,
    choice,
    fitting,
    mapping_of,
    optional,
    record,
    sequence_of,
    shown,
    whole,
)
from emrun.storage.files import check_guards, flush_lines, make_directory, refuse_timeout, storing, write_atomically
from emrun.storage.lines import Change, Lines
from emrun.storage.lock import EVALUATIONS, RunLock
from emrun.types import EpochData

_LOG = logging.getLogger(__name__)

CONFIG, TRACE, METRICS, LOG, CHECKPOINTS = "config.yaml", "trace.yaml", "metrics.jsonl", "train.log", "checkpoints"
_LOG_FORMAT = "%(asctime)s.%(msecs)03d: %(levelname)-8s@%(module)-14s: %(message)s"
_FORMAT_VARIABLE = "EMRUN_OUTPUT_DIR_FORMAT"
_DEFAULT_FORMAT = "{name}_{timestamp}"

_TEXTS = {"reason", "command", "resumes", "forked_from"}  # entries of the trace that may hold anything

Clock = Callable[[], datetime]


def local_time() -> datetime:
    """Return the time, with the offset of the local time zone."""
    return datetime.now().astimezone()


class Run:
    """A run directory that this process writes.

    Args:
        directory: an existing directory.
        seed: the seed of the run, for the trace.
        command: the command that started it, for the trace.
        clock: tells the time.
        lock: the right to write the directory, released at the end of the run.
        censor: what the log, the trace and the capsules of failed steps go through.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int | None = None,
        command: Sequence[str] = (),
        clock: Clock = local_time,
        lock: RunLock | None = None,
        censor: Censor | None = None,
    ) -> None:
        self.directory = directory
        self.censor = Censor() if censor is None else censor
        places = {directory}
        with suppress(OSError):  # the current directory is gone
            places |= {directory.absolute(), directory.resolve(), Path.cwd()}
        self.censor.keep(*places)
        keep_on_terminal(*places)
        self._lock = lock
        self.metrics: list[dict[str, Any]] = []
        self._lines = Lines(directory / METRICS)
        self._clock = clock
        self._trace: dict[str, Any] = {
            "train_begin": None,
            "train_end": None,
            "epochs_done": 0,
            "iterations_done": 0,
            "exit_status": None,
            "status": "running",
            "reason": None,
            "seed": seed,
            "emrun": emrun.__version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
            "command": list(command),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "git_commit": _git_commit(),
        }
        self._log: _LogSession | None = None
        self._written: dict[str, tuple[Any, str]] = {}  # entry of the trace -> its value, and that in YAML

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.directory / CHECKPOINTS

    @property
    def metrics_position(self) -> dict[str, Any]:
        """What a checkpoint keeps of `metrics.jsonl`: its length in bytes, its digest and the first epoch."""
        first = self.metrics[0]["epoch"] if self.metrics else None
        return {"metrics": self._lines.length, "metrics_digest": self._lines.digest, "metrics_first": first}

    def begin(self) -> None:
        """Write into the trace that the training begins."""
        self._trace["train_begin"] = self._clock().isoformat(timespec="seconds")
        self._write_trace()

    def begin_again(self, previous: dict[str, Any], resumed: dict[str, Any]) -> None:
        """Write into the trace that the training goes on.

        Args:
            previous: the trace as it was.
            resumed: what to add to the list of resumes.
        """
        kept = ("train_begin", "epochs_done", "iterations_done", "seed", "forked_from", "has_checkpoints")
        self._trace.update({key: previous[key] for key in kept if key in previous})
        if resumed.get("checkpoint"):
            self._trace["has_checkpoints"] = True
        self._trace["train_begin"] = self._trace["train_begin"] or self._clock().isoformat(timespec="seconds")
        before = {key: previous.get(key) for key in ("reason", "command", "host", "pid")}
        before = {"status": _status_without_process(previous), **before}
        entry = {"time": self._clock().isoformat(timespec="seconds"), **resumed, "before": before}
        resumes = previous.get("resumes")
        self._trace["resumes"] = [*(resumes if isinstance(resumes, list) else []), entry]
        self._write_trace()

    def add_to_trace(self, **entries: Any) -> None:
        """Write more entries into the trace."""
        self._trace.update(entries)
        self._write_trace()

    def rewind(self, length: int = 0, digest: str | None = None, expected: range = range(1)) -> None:
        """Cut `metrics.jsonl` down to what it held at a checkpoint, with a warning where that is not there any more.

        Args:
            length: its length in bytes then.
            digest: its SHA-256 then, None when that is not known.
            expected: the epochs that it had.
        """
        change = self._lines.go_back_to(length, digest, is_wanted=lambda line: _is_of(line, expected.stop))
        self.metrics = _read_metrics(self._lines.path)
        there = {line["epoch"] for line in self.metrics}
        missing = [str(epoch) for epoch in expected if epoch not in there]
        if change is Change.LOST and missing:
            _LOG.warning(
                "%s is shorter than the checkpoint counts on; missing epochs: %s. It continues with the next epoch "
                "on a new line; the run itself loses nothing",
                self._lines.path,
                _ranges(missing),
            )
        elif change is not Change.NONE:
            _LOG.warning("%s was changed since the checkpoint was saved; it continues as it is", self._lines.path)

    def release(self) -> None:
        """Let others write the directory."""
        if self._lock is not None:
            self._lock.release()

    def record_epoch(self, epoch: int, iteration: int, seconds: float, epoch_data: EpochData) -> None:
        """Append an epoch to `metrics.jsonl` and write its counters into the trace.

        Args:
            epoch: training epochs done; 0 for the zeroth.
            iteration: batches of the train stream run.
            seconds: how long the epoch took.
            epoch_data: numbers, or mappings of numbers; whatever else hooks left there is not written.
        """
        streams = {stream: _numbers(variables) for stream, variables in epoch_data.items()}
        line = {"epoch": epoch, "iteration": iteration, "seconds": round(seconds, 6), "streams": streams}
        self._lines.append(json.dumps(line, allow_nan=False))
        self.metrics.append(line)
        self._trace.update(epochs_done=epoch, iterations_done=iteration)
        self._write_trace(may_go_back=True)

    def end(self, status: str, exit_status: int, reason: str | None, iteration: int | None = None) -> None:
        """Write into the trace how the run ended; the first end counts.

        Args:
            status: finished, interrupted or failed.
            exit_status: what the command ends with.
            reason: why, in one line.
            iteration: batches of the train stream run.
        """
        if self._trace["train_end"] is not None:
            return
        self._trace.update(
            train_end=self._clock().isoformat(timespec="seconds"),
            status=status,
            exit_status=exit_status,
            reason=reason,
        )
        if iteration is not None:
            self._trace["iterations_done"] = iteration
        try:
            flush_lines()
            self._write_trace()
        finally:
            self.release()

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Write the log of the block, from every module, into `train.log`; an error that ends it with its traceback."""
        self.open_log()
        try:
            yield
        except BaseException as error:
            self.close_log(error)
            raise
        self.close_log()

    def open_log(self) -> None:
        """Write the log, from every module, into `train.log` until `close_log`; sessions may lie within each other.

        Other handlers of the root logger get what they got before, also where the log of the run has more.

        Raises:
            StorageError: the file cannot be opened.
        """
        if self._log is None:
            with storing(self.directory / LOG, "write"):
                handler = _LogFile(self.directory / LOG, encoding="utf-8")
            handler.setFormatter(_CensoredFormatter(self.censor))
            self._log = _LogSession(handler)
        self._log.depth += 1

    def close_log(self, error: BaseException | None = None) -> None:
        """End what `open_log` began; the outermost session's error is written with its traceback."""
        session = self._log
        if session is None:
            return
        session.depth -= 1
        if session.depth == 0:
            self._log = None
            session.end(error)
            if error is not None:
                error.__dict__["kept_in"] = self.directory / LOG  # who shows the error may leave out the traceback

    def remove(self, *, only_own_files: bool = False) -> None:
        """Delete the directory, or only what a run writes before it trains.

        Raises:
            RunInUse: another process took the run over; nothing is deleted.
        """
        check_guards(self.directory / TRACE)
        self.release()
        with storing(self.directory, "delete"):
            if not only_own_files:
                shutil.rmtree(self.directory)
                return
            for name in (CONFIG, TRACE, LOG):
                (self.directory / name).unlink(missing_ok=True)

    def _write_trace(self, *, may_go_back: bool = False) -> None:
        written = self._written
        new = {key: value for key, value in self._trace.items() if key not in written or written[key][0] != value}
        shown = {key: self.censor.plain(value) if key in _TEXTS else value for key, value in new.items()}
        written.update((key, (new[key], text)) for key, text in _in_yaml(shown).items())
        text = "".join(written[key][1] for key in self._trace)
        write_atomically(self.directory / TRACE, text, may_go_back=may_go_back)


def _in_yaml(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of each entry."""
    if all(type(value) is int for value in entries.values()):  # after an epoch, without the millisecond of a YAML
        return {key: f"{key}: {value}\n" for key, value in entries.items()}
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(entries, text)
    lines = re.split(r"(?m)^(?=[^\s-])", text.getvalue())[1:]  # what goes on with an entry is indented, or in a list
    return dict(zip(entries, lines, strict=True))


class _CensoredFormatter(logging.Formatter):
    """Writes the lines of the log, with their tracebacks, without what came from the environment."""

    def __init__(self, censor: Censor) -> None:
        super().__init__(_LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        self._censor = censor

    def format(self, record: logging.LogRecord) -> str:
        return self._censor(super().format(record))


class _LogSession:
    """The root logger while a run's log is written.

    Args:
        file: what writes the log.
    """

    def __init__(self, file: logging.Handler) -> None:
        self.depth = 0
        self._root = logging.getLogger()
        self._level = self._root.level
        self._file = file
        self._others = list(self._root.handlers)
        if not self._others and logging.lastResort is not None:  # what shows warnings when nothing is configured
            self._root.addHandler(logging.lastResort)
        if self._root.getEffectiveLevel() > logging.INFO:
            self._root.setLevel(logging.INFO)
            for handler in self._others:
                handler.addFilter(self._passed_before)
        self._root.addHandler(file)

    def end(self, error: BaseException | None) -> None:
        """Leave the root logger as it was; write an error with its traceback."""
        if error is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._file.emit(logging.LogRecord("emrun", logging.ERROR, __file__, 0, text, None, None))
        self._root.removeHandler(self._file)
        if not self._others and logging.lastResort is not None:
            self._root.removeHandler(logging.lastResort)
        for handler in self._others:
            handler.removeFilter(self._passed_before)
        self._root.setLevel(self._level)
        with suppress(OSError):  # what could not be written was told of
            self._file.close()

    def _passed_before(self, record: logging.LogRecord) -> bool:
        """Tell whether a record would have come to the root's handlers at the level that the root logger had."""
        logger = logging.getLogger(record.name)
        while logger.level == logging.NOTSET and logger.parent is not None:
            logger = logger.parent
        return logger is not self._root or record.levelno >= self._level


class _LogFile(logging.FileHandler):
    """Writes the log; when that is not possible any more it says so once, and the training goes on without."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            error = sys.exc_info()[1]
            _LOG.warning("cannot write %s: %s", self.baseFilename, "" if error is None else reason_of(error))


def create_run(
    config_text: str,
    name: str,
    *,
    output_root: Path,
    output_dir: Path | None,
    seed: int,
    command: Sequence[str] = (),
    clock: Clock = local_time,
    censor: Censor | None = None,
) -> Run:
    """Make a new run directory and write its config.

    Args:
        config_text: the content of its `config.yaml`.
        name: the name of the run, part of the directory's.
        output_root: the directory in which it is made, named `{name}_{timestamp}`, with a number when that is taken;
            the environment variable EMRUN_OUTPUT_DIR_FORMAT changes the name.
        output_dir: a path of its own instead; it may exist, but must not hold a run. One whose start failed is taken
            over: its log is kept, its config and its trace are replaced.
        seed: see `Run`, likewise the others.
        command: see `Run`.
        clock: see `Run`.
        censor: see `Run`.

    Raises:
        RunExists: the directory holds a run (a `UsageError`).
        UsageError: the format of its name cannot be used.
        RunInUse: somebody writes it at the moment.
        StorageError: it cannot be made.
    """
    directory = output_dir or output_root / _directory_name(name, clock)
    with storing(directory, "create"):
        if output_dir is not None:
            make_directory(directory, exist_ok=True)
        else:
            others = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
            directory = _make_free(itertools.chain((directory,), others))
    lock = RunLock(directory)
    try:
        if is_failed_start(directory):
            _LOG.info("the start of the run in %s failed: beginning anew, the log is kept", directory)
        elif holds_run(directory):
            raise RunExists(
                f"{directory} holds a run already ({_status_without_process(read_trace(directory))}); choose another "
                "--output-dir, go on with it by `emrun resume`, or add --auto-resume"
            )
        write_atomically(directory / CONFIG, config_text)
        run = Run(directory, seed=seed, command=command, clock=clock, lock=lock, censor=censor)
        run.begin()
    except BaseException:
        lock.release()
        raise
    return run


def _status_without_process(trace: Mapping[str, Any]) -> str:
    """Return how a run ended that nobody holds the lock of."""
    status = str(trace.get("status", "unknown"))
    return "killed" if status == "running" else status


_TRACE = {
    "train_begin": optional(TEXT),
    "train_end": optional(TEXT),
    "epochs_done": whole(),
    "iterations_done": whole(),
    "exit_status": optional(whole(most=255)),
    "status": choice("running", "finished", "interrupted", "failed"),
    "reason": optional(TEXT),
    "seed": optional(whole(-(2**63))),
    "command": sequence_of(TEXT),
    "host": TEXT,
    "pid": whole(),
    "forked_from": record({"directory": TEXT, "checkpoint": optional(TEXT)}),
    "has_checkpoints": FLAG,
    "resumes": sequence_of(mapping_of(ANYTHING)),
}
"""Field of a trace -> what it may hold, as far as anything reads it."""

_EPOCH = record({"epoch": whole(), "streams": mapping_of(mapping_of(ANYTHING))})
"""A line of `metrics.jsonl`, as far as it is read again."""


def read_trace(directory: Path) -> dict[str, Any]:
    """Return the trace of a run; nothing where there is none or it is damaged.

    Nothing depends on a trace but what is said of a run, and it has no checksum. So a field with a value that it cannot
    have is left out, with a warning.
    """
    try:
        trace = YAML(typ="safe", pure=True).load((directory / TRACE).read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        refuse_timeout(error, directory / TRACE)
        return {}
    except Exception as error:  # what the library raises for what it does not expect
        _LOG.warning("%s is damaged (%s)", directory / TRACE, type(error).__name__)
        return {}
    if not isinstance(trace, dict):
        return {}
    known = {}
    for name, value in trace.items():
        kind = _TRACE.get(name) if isinstance(name, str) else None
        if kind is None or fitting(value, kind):
            known[name] = value
        else:
            _LOG.warning("%s: %s is %s, but must be %s", directory / TRACE, name, shown(value), kind.allowed)
    return known


def recorded_epochs(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl` that tell of an epoch."""
    return _read_metrics(directory / METRICS)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; with a warning, those that are not whole or not of an epoch are left out."""
    lines: list[dict[str, Any]] = []
    with storing(path, "read"):
        content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.splitlines(), start=1):
        epoch = _epoch_of(line)
        if epoch is None:
            _LOG.warning("%s: line %d is damaged: it does not tell of an epoch", path, number)
        else:
            lines.append(epoch)
    return lines


def _epoch_of(line: bytes) -> dict[str, Any] | None:
    """Return what a line of `metrics.jsonl` says; None when it is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if fitting(content, _EPOCH) else None


def _is_of(line: bytes, end: int) -> bool:
    """Tell whether a line is whole and not of an epoch from `end` on."""
    epoch = _epoch_of(line)
    return line.endswith(b"\n") if epoch is None else bool(epoch["epoch"] < end)


def _ranges(names: Sequence[str]) -> str:
    """Return epochs as they stand in a message."""
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:9])}, ..., {names[-1]} ({len(names)} in all)"


def create_evaluation(
    root: Path,
    stream: str,
    config_text: str,
    command: Sequence[str] = (),
    clock: Clock = local_time,
    censor: Censor | None = None,
) -> Run:
    """Make the directory `<stream>-<n>` for the results of an evaluation.

    Args:
        root: the directory in which it is made.
        stream: the name of the stream.
        config_text: the content of its `config.yaml`.
        command: see `Run`.
        clock: see `Run`.

    Raises:
        StorageError: it cannot be made.
    """
    with storing(root, "create"):
        make_directory(root, exist_ok=True)
        stem = safe_component("stream", stream)
        directory = _make_free(root / f"{stem}-{number}" for number in itertools.count(1))
    write_atomically(directory / CONFIG, config_text)
    run = Run(directory, command=command, clock=clock, censor=censor)
    run.begin()
    return run


def holds_run(directory: Path) -> bool:
    """Tell whether a directory is that of a run."""
    return (directory / CONFIG).exists() or (directory / TRACE).exists()


def is_failed_start(directory: Path) -> bool:
    """Tell whether a directory holds a run that failed or was interrupted before it came to anything worth keeping.

    That is: before the first training batch, without metrics, checkpoints and evaluations, as its trace says.
    """
    trace = read_trace(directory)
    return (
        trace.get("status") in ("failed", "interrupted")
        and trace.get("epochs_done") == trace.get("iterations_done") == 0
        and not any((directory / name).exists() for name in (METRICS, CHECKPOINTS, EVALUATIONS))
    )


def no_run(place: Path) -> UsageError:
    """Return the error for a path that was given for the directory of a run and is something else."""
    if not place.is_file():
        return UsageError(f"{place} is no run directory: it has no {CONFIG}")
    if (place.parent / TRACE).exists():
        return UsageError(f"{place} is a file; name the directory of the run: {place.parent}")
    begin = f"; to begin a run with it: emrun train {place}" if place.suffix in (".yaml", ".yml") else ""
    return UsageError(f"{place} is a file; name the directory of a run, such as log/NAME_TIME{begin}")


def _make_free(candidates: Iterable[Path]) -> Path:
    """Make the first of these directories that does not exist."""
    for place in candidates:
        try:
            make_directory(place)
        except FileExistsError:
            continue
        return place
    raise AssertionError("candidates never end")


def _directory_name(name: str, clock: Clock) -> str:
    pattern = os.environ.get(_FORMAT_VARIABLE, _DEFAULT_FORMAT)
    fields = {"name": safe_component("name", name), "timestamp": clock().strftime("%Y%m%d-%H%M%S")}
    try:
        return safe_component(_FORMAT_VARIABLE, pattern.format(**fields))
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{_FORMAT_VARIABLE}={pattern!r} cannot be used for {name!r}; its fields are {{name}}, {{timestamp}}"
        ) from error


def _numbers(value: Any) -> Any:
    """Return numbers as JSON has them: what is not finite as a string, what is no number left out."""
    if isinstance(value, Mapping):
        entries = {str(key): _numbers(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a tensor's or an array's only number
        value = value.item()
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    return None


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
