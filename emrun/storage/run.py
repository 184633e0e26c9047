"""The run directory: how one is made, all that a training writes there, and what one holds."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emrun.arguments import safe_component
from emrun.censor import Censor, keep_on_terminal
from emrun.errors import RunExists, UsageError
from emrun.storage.files import check_guards, flush_lines, make_directory, storing, write_atomically
from emrun.storage.lines import Change, Lines
from emrun.storage.lock import EVALUATIONS, RunLock
from emrun.storage.log import LOG, RunLog
from emrun.storage.metrics import METRICS, in_words, is_before, numbers, read_metrics
from emrun.storage.trace import TRACE, Clock, Trace, last_status, local_time, read_trace
from emrun.types import EpochData

_LOG = logging.getLogger(__name__)

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_FORMAT_VARIABLE = "EMRUN_OUTPUT_DIR_FORMAT"
_DEFAULT_FORMAT = "{name}_{timestamp}"


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
        self.trace = Trace(directory / TRACE, seed=seed, command=command, clock=clock, censor=self.censor)
        self.log = RunLog(directory / LOG, self.censor)
        """Writes the log of a `with` block; an error that ends the block is written with its traceback."""

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.directory / CHECKPOINTS

    @property
    def metrics_position(self) -> dict[str, Any]:
        """What a checkpoint keeps of `metrics.jsonl`: its length in bytes, its digest and the first epoch."""
        first = self.metrics[0]["epoch"] if self.metrics else None
        return {"metrics": self._lines.length, "metrics_digest": self._lines.digest, "metrics_first": first}

    def rewind(self, length: int = 0, digest: str | None = None, expected: range = range(1)) -> None:
        """Cut `metrics.jsonl` down to what it held at a checkpoint, with a warning where that is not there any more.

        Args:
            length: its length in bytes then.
            digest: its SHA-256 then, None when that is not known.
            expected: the epochs that it had.
        """
        change = self._lines.go_back_to(length, digest, is_wanted=lambda line: is_before(line, expected.stop))
        self.metrics = read_metrics(self._lines.path)
        there = {line["epoch"] for line in self.metrics}
        missing = [str(epoch) for epoch in expected if epoch not in there]
        if change is Change.LOST and missing:
            _LOG.warning(
                "%s is shorter than the checkpoint counts on; missing epochs: %s. It continues with the next epoch "
                "on a new line; the run itself loses nothing",
                self._lines.path,
                in_words(missing),
            )
        elif change is not Change.NONE:
            _LOG.warning("%s was changed since the checkpoint was saved; it continues as it is", self._lines.path)

    def release(self) -> None:
        """Let others write the directory."""
        if self._lock is not None:
            self._lock.release()

    def record_epoch(self, epoch: int, iteration: int, seconds: float, epoch_data: EpochData) -> None:
        """Append an epoch to `metrics.jsonl` and count it in the trace, which is written now and then.

        Args:
            epoch: training epochs done; 0 for the zeroth.
            iteration: batches of the train stream run.
            seconds: how long the epoch took.
            epoch_data: numbers, or mappings of numbers; whatever else hooks left there is not written.
        """
        streams = {stream: numbers(variables) for stream, variables in epoch_data.items()}
        line = {"epoch": epoch, "iteration": iteration, "seconds": round(seconds, 6), "streams": streams}
        self._lines.append(json.dumps(line, allow_nan=False))
        self.metrics.append(line)
        self.trace.count(epoch, iteration)

    def end(self, status: str, exit_status: int, reason: str | None, *done: int) -> None:
        """Write into the trace how the run ended; the first end counts.

        Args:
            status: finished, interrupted or failed.
            exit_status: what the command ends with.
            reason: why, in one line.
            done: the epochs and iterations done, where they are known.
        """
        if self.trace.has_ended:
            return
        counted = zip(("epochs_done", "iterations_done"), done, strict=False)
        self.trace.end(status=status, exit_status=exit_status, reason=reason, **dict(counted))
        try:
            flush_lines()
            self.trace.write()
        finally:
            self.release()

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
                f"{directory} holds a run already ({last_status(read_trace(directory))}); choose another "
                "--output-dir, go on with it by `emrun resume`, or add --auto-resume"
            )
        write_atomically(directory / CONFIG, config_text)
        run = Run(directory, seed=seed, command=command, clock=clock, lock=lock, censor=censor)
        run.trace.begin()
    except BaseException:
        lock.release()
        raise
    return run


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
    run.trace.begin()
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
        with suppress(FileExistsError):
            make_directory(place)
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
