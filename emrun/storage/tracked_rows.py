"""The rows of `metrics.jsonl` and `steps.jsonl` in the order of their iterations, read as the files grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from emrun.epoch_data import statistics
from emrun.storage.files import opened_regular
from emrun.storage.metrics import METRICS, epoch_of
from emrun.storage.steps import STEPS, read_chunk

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")

Values = tuple[int, int | None, dict[str, float]]


class RowReader:
    """Reads the metrics of epochs and, at intervals, the values of steps of a run that is being written.

    Args:
        directory: the run directory.
        every: the distance between two iterations whose values are read; 0 for none.
    """

    def __init__(self, directory: Path, every: int) -> None:
        self._directory = directory
        self._every = every
        self._offsets = {METRICS: 0, STEPS: 0}  # up to which the lines were read
        self._waiting: dict[int, Values] = {}  # rows that were read and not given yet
        self._end: Values | None = None  # the evaluation after a limit, which is part of no checkpoint

    def rows(self, sent: tuple[int, int], upto: tuple[int, int], *, is_end: bool = False) -> Iterator[Values]:
        """Yield iteration, epoch and values of each row, in the order of the iterations.

        Values of steps come when their chunk of 1,000 iterations, or the train stream of their epoch, has ended.

        Args:
            sent: the epoch and the iteration of the last rows that are not needed any more; -1 for none.
            upto: the last epoch and the last iteration to yield.
            is_end: whether no more rows will come. Otherwise the values of the step `upto` wait, because its row gets
                those of the epoch too if that ends with it: a service takes a row of an iteration only once.
        """
        self._read()
        for at, (_, epoch, _) in list(self._waiting.items()):
            if at <= sent[1] and (epoch is None or epoch <= sent[0]):
                del self._waiting[at]
        for at in sorted(self._waiting):
            _, epoch, values = self._waiting[at]
            if epoch is not None and at <= sent[1]:  # the step was sent before the epoch ended
                values = {name: value for name, value in values.items() if not name.startswith("steps/")}
            if (at < upto[1] + is_end) if epoch is None else (at <= upto[1] and epoch <= upto[0]):
                yield at, epoch, values
        if is_end and self._end is not None:
            yield self._end

    def epoch_before(self, iteration: int) -> int:
        """Return the last epoch that ended with an iteration or before it; -1 for none."""
        self._read()
        ended = [epoch for at, epoch, _ in self._waiting.values() if epoch is not None and at <= iteration]
        return max(ended, default=-1)

    def _read(self) -> None:
        """Read what the files have got since the last call."""
        for line in self._new_lines(METRICS):
            found = epoch_of(line)
            if found is not None and isinstance(found.get("iteration"), int):
                values = {
                    f"{stream}/{name}": number
                    for stream, variables in found["streams"].items()
                    for name, value in statistics(variables)
                    if (number := _number(value)) is not None
                }
                if "at_end" in found:
                    self._end = found["iteration"], found["epoch"], values
                else:
                    self._add(found["iteration"], found["epoch"], values)
        for line in self._new_lines(STEPS) if self._every else ():
            chunk = read_chunk(line)
            if chunk is None:
                continue
            for row in range(len(chunk)):
                at = chunk.first + row * chunk.every
                if at % self._every == 0:
                    values = {
                        f"steps/{name}": each
                        for name, column in chunk.columns.items()
                        if (each := column[row]) is not None
                    }
                    self._add(at, None, values)

    def _add(self, iteration: int, epoch: int | None, values: Mapping[str, float]) -> None:
        """Add values to the row of an iteration: an epoch may end with an iteration whose step is read too."""
        _, before, more = self._waiting.get(iteration, (iteration, None, {}))
        self._waiting[iteration] = iteration, before if epoch is None else epoch, {**more, **values}

    def _new_lines(self, name: str) -> Iterator[bytes]:
        path = self._directory / name
        if not path.exists():
            return
        with opened_regular(path) as file:
            file.seek(self._offsets[name])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[name] += len(line)
                yield line


def _number(value: Any) -> float | None:
    if type(value) in (int, float):
        return float(value)
    return float(value) if value in _NOT_FINITE else None
