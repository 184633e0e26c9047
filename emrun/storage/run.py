"""The run directory: one folder that holds all that a training produces, and tells how it went."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emrun.censor import Censor, keep_on_terminal
from emrun.storage.files import check_guards, flush_lines, storing
from emrun.storage.lines import Change, Lines
from emrun.storage.lock import RunLock
from emrun.storage.log import LOG, RunLog
from emrun.storage.metrics import METRICS, in_words, is_before, numbers, read_metrics
from emrun.storage.trace import TRACE, Clock, Trace, local_time
from emrun.types import EpochData

_LOG = logging.getLogger(__name__)

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"


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

    def end(self, status: str, exit_status: int, reason: str | None, iteration: int | None = None) -> None:
        """Write into the trace how the run ended; the first end counts.

        Args:
            status: finished, interrupted or failed.
            exit_status: what the command ends with.
            reason: why, in one line.
            iteration: batches of the train stream run.
        """
        if self.trace.has_ended:
            return
        counted = {} if iteration is None else {"iterations_done": iteration}
        self.trace.end(status=status, exit_status=exit_status, reason=reason, **counted)
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
