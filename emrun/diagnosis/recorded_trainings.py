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


class Trainings:
    """Runs trainings in processes of their own.

    Args:
        place: the directory for all that they write.
        config: the config.
        overrides: a list that may grow.
    """

    def __init__(self, place: Path, config: str, overrides: list[str]) -> None:
        self._place = place
        self._config = config
        self._overrides = overrides
        self._temporary = place / "temporary"  # torch leaves a directory in it
        self._temporary.mkdir()

    def run(
        self,
        name: str,
        *,
        end: int | None = None,
        longest: int | None = None,
        point: Point | None = None,
        by: signal.Signals = signal.SIGTERM,
        resume: bool = False,
    ) -> Recording:
        """Run a training, or go on with it.

        Raises:
            VerificationFailed: it failed.
        """
        record = self._place / f"{name}-{'resumed' if resume else 'begun'}.jsonl"
        job = {
            "record": str(record),
            "directory": str(self._place / name),
            "resume": resume,
            "config": self._config,
            "overrides": self._overrides,
            "end": end,
            "longest": longest,
            "point": point and asdict(point),
            "signal": by,
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD.format(path=sys.path), json.dumps(job)],
            env={**os.environ, **_SETTINGS, "TMPDIR": str(self._temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["kind"] == "error":
                raise VerificationFailed(event["text"].replace(str(self._place / name), "RUN_DIR"), event["status"])
        was_killed = by == signal.SIGKILL and done.returncode == -signal.SIGKILL
        if not was_killed and (done.returncode or not {"final", "long"} & {event["kind"] for event in events}):
            last = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
            raise VerificationFailed(f"a training ended by itself, with status {done.returncode}{last}", 1)
        return Recording(events, done.returncode)
