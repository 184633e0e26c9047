"""The runs of a verification: each is a process, a fork of this one or a new Python, and is recorded."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emrun.base.errors import EmrunError, RankFailed
from emrun.launch.jobs import Jobs
from emrun.launch.ranks import ranks_directory, run_processes

_CHILD = "from emrun.diagnosis.probe import main; main(sys.argv[1:])"
TEMPORARY = "temporary"
"""The directory for temporary files of the runs; torch leaves a directory in it."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is interrupted: after a batch of the train stream or of an evaluation.

    Args:
        name: description of the point, as it is shown.
        iteration: number of iterations done at the point.
        stream: the stream of the batch.
        batch: number of the batch in the evaluation, from 1; None for the train stream.
    """

    name: str
    iteration: int
    stream: str
    batch: int | None = None


class VerificationFailed(EmrunError):
    """A run of the verification failed for another reason than a difference.

    Args:
        text: the message, or the traceback of an error with exit status 1.
        exit_status: the exit status of the run.
    """

    def __init__(self, text: str, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(text)


class Recording:
    """The recorded events of a run of the verification.

    Args:
        events: the events of the run, in its only process or on rank 0.
        exit_code: the exit status of the process that failed first, negative for a signal; 0 for none.
        of_others: the events of the other ranks.
    """

    def __init__(self, events: list[Event], exit_code: int, of_others: Sequence[list[Event]] = ()) -> None:
        self.events = events
        self._exit_code = exit_code
        self.of_others = of_others

    @property
    def batches(self) -> list[list[Event]]:
        """The events of batches of each rank."""
        return [[event for event in events if event["kind"] == "batch"] for events in (self.events, *self.of_others)]

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    def one(self, kind: str) -> Event:
        """Return the only event of a kind, or an empty one."""
        return next(iter(self.of(kind)), {})

    @property
    def final(self) -> Event:
        """The final state of the run: part -> name -> value."""
        return self.one("final")

    @property
    def epoch_ends(self) -> list[int]:
        """The last iteration of each training epoch that ended; [0] if there is none."""
        return [event["iteration"] for event in self.of("epoch") if event["epoch"] > 0] or [0]

    @property
    def end(self) -> int:
        """The last iteration."""
        return max((event["iteration"] for event in self.of("batch")), default=0)

    def was_interrupted(self, kill: bool) -> bool:
        """Return whether the signal ended the run."""
        return self._exit_code == -signal.SIGKILL if kill else self.one("outcome").get("status") == "interrupted"


@dataclass(frozen=True, slots=True)
class Job:
    """A run of the verification, or an evaluation, in its own process.

    Args:
        place: the directory for all files of the verification.
        config: path of the config.
        overrides: overrides of the config.
        name: name of the run directory.
        resume: whether to resume the run or to start it.
        is_moved: whether it is resumed on another number of ranks; the weights are then compared with the checkpoint.
        end: the iteration after which the run ends; None for a few iterations into the third epoch.
        longest: the most iterations of an epoch; the run gives up when an epoch is longer.
        is_shortened: whether the config has shorter epochs than the user's; its schedule need not fit.
        point: where to interrupt the run; None to not interrupt it.
        by: number of the signal; some iterations before SIGKILL, a checkpoint is saved.
        ranks: the number of processes that train together.
        checkpoint: the checkpoint of the run `config` that is evaluated, instead of a training; None for a training.
        streams: the streams on which the checkpoint is evaluated.
        prepared: the directory of the run that is trained again, whose preparation the dataset has; None for a new one.
        measures: whether the gradients of a batch are measured instead, see `emrun.diagnosis.numerics.on_ranks`.
    """

    place: str
    config: str
    overrides: list[str]
    name: str
    resume: bool = False
    is_moved: bool = False
    end: int | None = None
    longest: int | None = None
    is_shortened: bool = False
    point: Point | None = None
    by: int = signal.SIGTERM
    ranks: int = 1
    checkpoint: str | None = None
    streams: Sequence[str] = ()
    prepared: str | None = None
    measures: bool = False

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.place, self.name)

    def record(self, rank: int = 0) -> Path:
        """Return the file of the recorded events of a rank: each line is an event as JSON."""
        of_rank = f"-{rank}" if rank else ""
        return Path(self.place, f"{self.name}-{'resumed' if self.resume else 'begun'}{of_rank}.jsonl")

    def run(self, forks: Jobs | None = None) -> Recording:
        """Run the process and return its recording.

        Args:
            forks: makes the process as a fork of this one; None for new processes.

        Raises:
            VerificationFailed: the run failed.
        """
        temporary = Path(self.place, TEMPORARY)
        temporary.mkdir(exist_ok=True)
        arguments = [json.dumps(asdict(self))]
        if forks is not None:
            exit_code, said = forks.start(arguments, 0, None).result()
        else:
            with ranks_directory() as place, (temporary / "errors").open("w+b") as errors:
                failures = run_processes(self.ranks, _CHILD, arguments, place, errors=errors)
                errors.seek(0)
                said = errors.read().decode(errors="replace")
            exit_code = next(iter(failures.values()), 0)
        events = [_events(self.record(rank)) for rank in range(self.ranks)]
        recording = Recording(events[0], exit_code, events[1:])
        if self.point is not None and recording.was_interrupted(kill=self.by == signal.SIGKILL):
            return recording
        errors_of_ranks = [event for of_rank in events for event in of_rank if event["kind"] == "error"]
        if errors_of_ranks:  # that a rank misses others is not the cause
            cause = min(errors_of_ranks, key=lambda event: event["error"] == RankFailed.__name__)
            raise VerificationFailed(cause["text"].replace(str(self.directory), "RUN_DIR"), cause["status"])
        if exit_code or not (recording.final or recording.of("long")):
            lines = said.strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
            raise VerificationFailed(f"a run ended early, with exit status {exit_code}{last}", 1)
        return recording


def _events(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
