"""What a run has recorded as curves: a curve for each statistic of its epochs, and for each column of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.cores import cores
from emrun.base.errors import StorageError
from emrun.base.wording import in_one_line
from emrun.epoch_data import named
from emrun.runs.report.thinning import Curve
from emrun.runs.stored_run import StoredRun, number, numbers_of
from emrun.storage.run import STEPS

_MOST_CURVES = 300  # of a run
_MOST_MISSING = 10_000
_MANY = 30_000_000  # bytes of records that are read by several processes
_MOST_PROCESSES = 8


@dataclass(slots=True)
class Marks:
    """The iteration and the time at which epochs ended, so that curves can be drawn over any of the three."""

    epochs: list[int] = field(default_factory=lambda: [0])
    iterations: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    total: float = 0.0
    """The seconds of all epochs."""

    def add(self, epoch: Mapping[str, Any]) -> None:
        """Add a line of `metrics.jsonl`; lines without an iteration, or that go back, are left out."""
        iteration, seconds = epoch.get("iteration"), number(epoch.get("seconds"))
        self.total += seconds if seconds is not None and 0 <= seconds < 1e12 else 0.0
        if type(iteration) is int and epoch["epoch"] > self.epochs[-1] and iteration >= self.iterations[-1]:
            self.epochs.append(epoch["epoch"])
            self.iterations.append(iteration)
            self.seconds.append(self.total)


@dataclass(slots=True)
class Curves:
    """The curves of a run.

    Args:
        epochs: (stream, variable with its aggregation) -> the curve over epochs.
        steps: column -> the curve over iterations.
        marks: where the epochs ended.
        left_out: how many statistics and columns have no curve, because there are too many.
        problems: what cannot be read, each in a sentence.
        most: how many stretches each curve keeps; see `Curve`.
    """

    epochs: dict[tuple[str, str], Curve] = field(default_factory=dict)
    steps: dict[str, Curve] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    left_out: int = 0
    problems: list[str] = field(default_factory=list)
    most: int = 1_000

    @classmethod
    def of(cls, directory: Path, most: int = 1_000) -> Curves:
        """Read the curves of a run; what is damaged is left out, and `problems` says so."""
        found, run = cls(most=most), StoredRun(directory)
        missing: set[Any] = set()
        for read in (found._read_epochs, found._read_steps):
            try:
                read(run, missing)
            except StorageError as error:
                run.note(str(error))
        found.left_out = len(missing)
        found.problems = run.problems
        return found

    def _read_epochs(self, run: StoredRun, missing: set[Any]) -> None:
        for line in run.epochs():
            epoch = line["epoch"]
            self.marks.add(line)
            for address, found in numbers_of(line):
                curve = self._curve_in(self.epochs, named(address), missing)
                if curve is not None and (curve.last is None or curve.last[0] <= epoch):
                    curve.add(epoch, found)

    def _read_steps(self, run: StoredRun, missing: set[Any]) -> None:
        for chunk in run.steps(as_text=True):
            for name, values in chunk.columns.items():
                curve = self._curve_in(self.steps, name, missing)
                if curve is not None:
                    try:
                        curve.add_all(chunk.first, chunk.every, values)
                    except (ValueError, OverflowError):
                        run.note(f"{STEPS}: a value of {in_one_line(name)} is not a number")

    def _curve_in(self, curves: dict[Any, Curve], key: Any, missing: set[Any]) -> Curve | None:
        found = curves.get(key)
        if found is None:
            if len(curves) >= _MOST_CURVES:
                if len(missing) < _MOST_MISSING:
                    missing.add(key)
                return None
            found = curves[key] = Curve(self.most)
        return found


def curves_of(directories: Sequence[Path], most: int) -> Iterator[Curves]:
    """Yield the curves of runs; many records are read by several processes.

    Args:
        directories: the directories of the runs.
        most: how many stretches each curve keeps; see `Curve`.
    """
    yield from _read_by_processes(directories, most) or (Curves.of(each, most) for each in directories)


def _read_by_processes(directories: Sequence[Path], most: int) -> list[Curves] | None:
    """Read the curves of runs with all cores; None if that does not pay, or if there are no more processes."""
    sizes = [StoredRun(directory).record.size for directory in directories]
    if len(directories) == 1 or cores() == 1 or sum(sizes) < _MANY:
        return None
    order = sorted(range(len(directories)), key=lambda index: -sizes[index])
    try:
        with ProcessPoolExecutor(min(cores(), _MOST_PROCESSES, len(directories))) as pool:
            read = pool.map(partial(Curves.of, most=most), [directories[each] for each in order])
            found = dict(zip(order, read, strict=True))
    except (BrokenProcessPool, OSError):
        return None
    return [found[index] for index in range(len(directories))]
