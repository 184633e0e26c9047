"""The step record: the loss and the learning rates of every iteration, and what hooks add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from torch import Tensor

from emrun.base.arguments import check_count
from emrun.base.errors import HookError
from emrun.epoch_data import LEARNING_RATE, is_rate, named_rates
from emrun.loop.slots import Slots, read
from emrun.model import AbstractModel
from emrun.storage.steps import ITERATION, KEYS, Chunk, StepsFile, read_chunk

CHUNK_LENGTH = 1_000
"""A chunk ends with the iterations that are multiples of this."""

THINNING = ((100_000, 1), (1_000_000, 10))
"""Up to which iteration -> every how many iterations are recorded; afterwards, every 100th."""
_AT_LAST = 100

_OF_THE_LOOP = ("loss", LEARNING_RATE, ITERATION, *KEYS)


class StepRecord:
    """Collects the values of each iteration and writes them to `steps.jsonl`, in chunks.

    Values that are on a GPU stay there until their chunk ends, with every 1,000th iteration and with the train stream
    of an epoch; so a chunk costs one wait for the device. A checkpoint has the values of the chunk that has not ended.
    Which iterations are recorded, and where chunks end, depends on the iteration alone: the file of a resumed run is
    that of an uninterrupted run.

    Args:
        model: the model, whose `step_values` are recorded.
        file: the file; None without a run.
        every: record every n-th iteration; 0 for none.
    """

    def __init__(self, model: AbstractModel, file: StepsFile | None, every: int) -> None:
        check_count("record_steps", every)
        self.due = 0
        """The next iteration to record; 0 if none is."""
        self.given: dict[str, float | Tensor] = {}
        """What hooks have added in the current iteration."""
        self._model = model
        self._file = file
        self._every = every if file is not None else 0
        self._slots = Slots()
        self._next = self._first = self._step = self._end = 0  # of the chunk: next and first iteration, distance, end
        self._losses: list[float | Tensor | None] = []  # one for each iteration of the chunk
        self._rates: list[Any] = []  # the same: the learning rates of the groups
        self._added: dict[str, list[float | Tensor | None]] = {}  # of hooks; shorter if the last values are missing
        self._last: tuple[int, dict[str, float]] | None = None  # the last row of the chunk that was ended last
        self._has_begun = False
        self._written: tuple[int, str] | None = None  # the position before a chunk that has been written too early

    def begin(self, iterations_done: int) -> None:
        """Continue after a number of iterations, at the beginning of a train stream."""
        if self._file is None:
            return
        if self._written is not None:  # `close` was called, but the training continues in this process
            self._file.rewind(*self._written, self._first)
            self._written = None
        if not self._every:
            return
        if not self._has_begun:
            self._has_begun = True
            self._file.begin()
        self.given.clear()  # of a step that failed
        if self._file.refusal is not None:
            self.due = 0
            return
        self.due, distance = _following(iterations_done, self._every)
        if distance != self._step:  # a resume has changed it
            self._next = 0

    def add(self, name: str, value: Any, iterations_done: int) -> None:
        """Add a value of the current iteration; see `Loop.record`."""
        if iterations_done + 1 < self.due or not self.due:
            return
        if not isinstance(name, str) or (name not in self._added and (name in _OF_THE_LOOP or is_rate(name))):
            taken = ", ".join(map(repr, _OF_THE_LOOP))
            raise HookError(
                f"record: {name!r} cannot be the name of a value that a hook adds to the steps; use another string "
                f"than {taken}, and none that begins with '{LEARNING_RATE}_'"
            )
        try:
            self.given[name] = self._slots.keep(value)
        except TypeError as error:
            raise HookError(f"record: the value {name!r} {error}") from error

    def take(self, iteration: int) -> None:
        """Record the values of an iteration, if it is the next one to record; else forget what hooks have added."""
        if iteration != self.due:
            self.given.clear()
            return
        if iteration != self._next:
            self._begin_chunk(iteration)
        values = self._model.step_values()
        loss = values.get("loss")
        if loss.__class__ is not float:
            loss = self._number(loss)
        self._losses.append(loss)
        self._rates.append(values.get(LEARNING_RATE))
        if self.given:
            self._take_given()
        self.due = self._next = iteration + self._step
        if self._next > self._end:
            self.due = _following(iteration, self._every)[0]
            if self._model.is_accumulating:
                self._next = 0  # the chunk ends with the next step: the window may end before, and add values
            else:
                self.end_chunk()

    @contextmanager
    def reopened(self, iteration: int) -> Iterator[None]:
        """Add what hooks give in this block to the values of the last iteration, if it was recorded."""
        due, is_recorded = self.due, self._first + self._step * (len(self._losses) - 1) == iteration and self._losses
        self.due = iteration if is_recorded else 0
        try:
            yield
        finally:
            self.due = due
            if self.given:
                self._take_given()

    def end_chunk(self) -> None:
        """Write the values since the last chunk, if there are any."""
        chunk = self._pending()
        if chunk is not None and self._file is not None:
            self._file.append(chunk)
            self._last = chunk.first + chunk.every * (len(chunk) - 1), _last_row(chunk)
        self._forget()

    @property
    def is_on(self) -> bool:
        """Whether values are recorded."""
        return bool(self._every) and self._file is not None and self._file.refusal is None

    @property
    def last(self) -> tuple[int, dict[str, float]] | None:
        """The last recorded iteration and its values by name; None if there is none since the chunk of a checkpoint."""
        if not self._losses:
            return self._last
        row, losses, rates = len(self._losses) - 1, self._losses, self._rates
        self._losses, self._rates, added = losses[-1:], rates[-1:], self._added
        self._added = {name: values[row:] for name, values in added.items()}
        try:
            chunk = self._pending()
        finally:
            self._losses, self._rates, self._added = losses, rates, added
        return self._first + self._step * row, _last_row(chunk)

    def close(self) -> None:
        """Write the pending values too, so that the file is complete; a resume begins before them."""
        chunk = self._pending()
        if chunk is not None and self._file is not None and self._written is None:
            self._written = self._file.position
            self._file.append(chunk)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position in the file, and the line of the chunk that has not ended; this waits for the device."""
        if self._file is None or self._file.refusal is not None:
            return None
        length, digest = self._file.position if self._written is None else self._written
        chunk = self._pending()
        return {"length": length, "digest": digest, "pending": chunk.line() if chunk is not None else ""}

    def load_state_dict(self, state: Mapping[str, Any] | None, iterations_done: int) -> None:
        """Restore what `state_dict` returned, and cut the file down to its content at that time.

        Args:
            state: the state; None if the checkpoint does not have it.
            iterations_done: the iterations that were done at that time.
        """
        self._forget()
        self._written = None
        if self._file is None:
            return
        chunk = read_chunk(state["pending"]) if state is not None else None
        end = iterations_done + 1 if chunk is None else chunk.first
        length, digest = (None, None) if state is None else (state["length"], state["digest"])
        self._file.rewind(length, digest, end)
        if chunk is not None:
            self._restore(chunk)

    def _begin_chunk(self, iteration: int) -> None:
        self.end_chunk()
        self._first = iteration
        self._step = _following(iteration - 1, self._every)[1]
        self._end = _end_of_chunk(iteration)

    def _number(self, value: Any) -> float | Tensor | None:
        """Return the loss as a number or in a slot; None if the model reports no loss, or one without a value."""
        if value is None:
            return None
        try:
            return self._slots.keep(value)
        except TypeError:
            return None

    def _take_given(self) -> None:
        before = len(self._losses) - 1
        for name, value in self.given.items():
            values = self._added.setdefault(name, [])
            values += [None] * (before - len(values))
            values[before:] = [value]
        self.given.clear()

    def _pending(self) -> Chunk | None:
        """Return the chunk that has not ended, from its first step that has a value; None if there is none."""
        count = len(self._losses)
        columns = {"loss": read(self._losses)}
        rows = [each.values() if isinstance(each, Mapping) else each or () for each in self._rates]
        names = next((each for each in self._rates if isinstance(each, Mapping)), None)
        rates = zip_longest(*rows)
        by_name = named_rates(rates if names is None else dict(zip(names, rates, strict=False)))
        columns |= {name: self._read_rates(values) for name, values in by_name.items()}
        for name, added in self._added.items():
            columns[name] = read([*added, *[None] * (count - len(added))])
        columns = {name: values for name, values in columns.items() if values.count(None) < count}
        if not columns:
            return None
        first = next(row for row in range(count) if any(values[row] is not None for values in columns.values()))
        columns = {name: values[first:] for name, values in columns.items()}
        return Chunk(self._first + self._step * first, self._step, columns)

    def _read_rates(self, rates: Iterable[Any]) -> list[float | None]:
        return read([rate if rate.__class__ is float else self._number(rate) for rate in rates])

    def _restore(self, chunk: Chunk) -> None:
        """Continue a chunk that had not ended at a checkpoint."""
        self._first, self._step, self._end = chunk.first, chunk.every, _end_of_chunk(chunk.first)
        self._next = chunk.first + chunk.every * len(chunk)
        added = dict(chunk.columns)
        self._losses = [*added.pop("loss", [None] * len(chunk))]
        rates = {name: added.pop(name) for name in chunk.columns if is_rate(name)}
        rows: list[Any] = list(zip(*rates.values(), strict=True)) or [None] * len(chunk)
        if rates and LEARNING_RATE not in rates:  # several optimizers with names
            names = [name.removeprefix(f"{LEARNING_RATE}_") for name in rates]
            rows = [dict(zip(names, row, strict=True)) for row in rows]
        self._rates = rows
        self._added = {name: [*values] for name, values in added.items()}

    def _forget(self) -> None:
        self._losses, self._rates, self._added = [], [], {}
        self._next = 0


def _last_row(chunk: Chunk | None) -> dict[str, float]:
    columns = chunk.columns if chunk is not None else {}
    return {name: values[-1] for name, values in columns.items() if values and values[-1] is not None}


def _following(iterations_done: int, every: int) -> tuple[int, int]:
    """Return the next iteration to record, and the distance between such iterations there."""
    for limit, thinning in THINNING:
        step = every * thinning
        iteration = (iterations_done // step + 1) * step
        if iteration <= limit:
            return iteration, step
    step = every * _AT_LAST
    return (iterations_done // step + 1) * step, step


def _end_of_chunk(iteration: int) -> int:
    """Return the last iteration that may be in a chunk with this iteration."""
    return -(-iteration // CHUNK_LENGTH) * CHUNK_LENGTH
