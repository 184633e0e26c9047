"""The trainings of a verification: each in a process of its own, and what it wrote down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emrun.errors import EmrunError

_CHILD = "import sys; sys.path[:] = {path!r}; from emrun.diagnosis.probe import main; main(sys.argv[1])"
_SETTINGS = {"TQDM_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # nothing beside the config's modules

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """Where a training is interrupted: after a batch of the train stream, or of an evaluation.

    Args:
        name: what it is called.
        iteration: batches of the train stream run.
        stream: the stream of the batch.
        batch: its number in the evaluation, from 1; None for the train stream.
    """

    name: str
    iteration: int
    stream: str
    batch: int | None = None


class VerificationFailed(EmrunError):
    """A training of the verification failed by itself."""

    def __init__(self, text: str, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(text)


class Recording:
    """What a training of the verification wrote down."""

    def __init__(self, events: list[Event], exit_code: int) -> None:
        self.events = events
        self._exit_code = exit_code

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    def one(self, kind: str) -> Event:
        """Return the event that happens once."""
        return next(iter(self.of(kind)), {})

    @property
    def final(self) -> Event:
        """What the training came to: part -> name -> value."""
        return self.one("final")

    @property
    def epoch_ends(self) -> list[int]:
        """The last iterations of the training epochs that came to their end."""
        return [event["iteration"] for event in self.of("epoch") if event["epoch"] > 0] or [0]

    @property
    def end(self) -> int:
        """The last iteration."""
        return max((event["iteration"] for event in self.of("batch")), default=0)

    def was_interrupted(self, kill: bool) -> bool:
        """Tell whether the signal came."""
        return self._exit_code == -signal.SIGKILL if kill else self.one("outcome").get("status") == "interrupted"


@dataclass(frozen=True, slots=True)
class Job:
    """A training of the verification, run in a process of its own.

    Args:
        place: the directory for all that the trainings write.
        config: the config.
        overrides: for the config.
        name: the name of the run's directory.
        resume: whether to go on with the run, or to begin it.
        end: the iteration that ends it; None for the first ones of the third epoch.
        longest: give up when an epoch is longer.
        point: where to interrupt it; None for nowhere.
        by: the number of the signal that comes there; some iterations before SIGKILL a checkpoint is saved.
    """

    place: str
    config: str
    overrides: list[str]
    name: str
    resume: bool = False
    end: int | None = None
    longest: int | None = None
    point: Point | None = None
    by: int = signal.SIGTERM

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return Path(self.place, self.name)

    @property
    def record(self) -> Path:
        """The file for what happens in the training: each event a line of JSON."""
        return Path(self.place, f"{self.name}-{'resumed' if self.resume else 'begun'}.jsonl")

    def run(self) -> Recording:
        """Run the training.

        Raises:
            VerificationFailed: it failed.
        """
        temporary = Path(self.place, "temporary")  # torch leaves a directory in it
        temporary.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD.format(path=sys.path), json.dumps(asdict(self))],
            env={**os.environ, **_SETTINGS, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",  # it is text
            check=False,
        )
        lines = self.record.read_text(encoding="utf-8").splitlines() if self.record.exists() else []
        found = Recording([json.loads(line) for line in lines], done.returncode)
        for event in found.of("error"):
            raise VerificationFailed(event["text"].replace(str(self.directory), "RUN_DIR"), event["status"])
        was_killed = self.by == signal.SIGKILL and done.returncode == -signal.SIGKILL
        if not was_killed and (done.returncode or not (found.final or found.of("long"))):
            last = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
            raise VerificationFailed(f"a training ended by itself, with status {done.returncode}{last}", 1)
        return found
