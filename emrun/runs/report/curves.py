"""What a run has recorded as curves: a curve for each statistic of its epochs, and for each column of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.cores import cores
from emrun.base.errors import StorageError
from emrun.epoch_data import named
from emrun.runs.report.thinning import Curve
from emrun.runs.stored_run import StoredRun, number, numbers_of

_MOST_CURVES = 300  # of a run
_MOST_LEFT_OUT = 10_000
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
        iteration = epoch.get("iteration")
        seconds = number(epoch.get("seconds"))
        self.total += seconds if seconds is not None and 0 <= seconds < 1e12 else 0.0
        if epoch["epoch"] == 0:
            self.seconds[0] = self.total
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
        left_out: the statistics and columns that have no curve, because there are too many.
        problems: what cannot be read, each in a sentence.
        most: how many stretches each curve keeps; see `Curve`.
    """

    epochs: dict[tuple[str, str], Curve] = field(default_factory=dict)
    steps: dict[str, Curve] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    left_out: set[Any] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    most: int = 1_000

    @classmethod
    def of(cls, directory: Path, most: int = 1_000) -> Curves:
        """Read the curves of a run; what is damaged is left out, and `problems` says so."""
        curves = cls(most=most)
        run = StoredRun(directory)
        for read in (curves._read_epochs, curves._read_steps):
            try:
                read(run)
            except StorageError as error:
                run.note(str(error))
        curves.problems = run.problems
        return curves

    def _read_epochs(self, run: StoredRun) -> None:
        for line in run.epochs():
            epoch = line["epoch"]
            self.marks.add(line)
            for address, value in numbers_of(line):
                curve = self._curve_in(self.epochs, named(address))
                if curve is not None and (curve.last is None or curve.last[0] <= epoch):
                    curve.add(epoch, value)

    def _read_steps(self, run: StoredRun) -> None:
        for chunk in run.steps():
            for name, values in chunk.columns.items():
                curve = self._curve_in(self.steps, name)
                if curve is not None:
                    curve.add_all(chunk.first, chunk.every, values)

    def _curve_in(self, curves: dict[Any, Curve], key: Any) -> Curve | None:
        curve = curves.get(key)
        if curve is None and len(curves) < _MOST_CURVES:
            curve = curves[key] = Curve(self.most)
        elif curve is None and len(self.left_out) < _MOST_LEFT_OUT:
            self.left_out.add(key)
        return curve


def curves_of(directories: Sequence[Path], most: int) -> list[Curves]:
    """Return the curves of runs; many records are read by several processes.

    Args:
        directories: the directories of the runs.
        most: how many stretches each curve keeps; see `Curve`.
    """
    count = min(cores(), _MOST_PROCESSES, len(directories))
    read = partial(Curves.of, most=most)
    if count > 1 and sum(StoredRun(directory).record.size for directory in directories) >= _MANY:
        with suppress(BrokenProcessPool, OSError), ProcessPoolExecutor(count) as pool:  # or there are no more processes
            return list(pool.map(read, directories))
    return list(map(read, directories))
