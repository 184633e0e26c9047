"""The step record: the loss and the learning rates of every iteration, and what hooks add."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from torch import Tensor

from emrun.base.arguments import check_count
from emrun.base.errors import HookError
from emrun.epoch_data import LEARNING_RATE, is_rate, named_rates
from emrun.hook import Loop
from emrun.loop.batch_calls import Calls
from emrun.loop.slots import Slots, read
from emrun.record.steps import ITERATION, KEYS, Chunk, StepsFile, read_chunk
from emrun.streams.stream import StreamWrapper

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
        loop: has the model, whose `step_values` are recorded, and counts the iterations.
        file: the file; None without a run.
        every: record every n-th iteration; 0 for none.
    """

    def __init__(self, loop: Loop, file: StepsFile | None, every: int) -> None:
        check_count("record_steps", every)
        self._due = 0  # the next iteration to record, if it is not `_next`; 0 if none is
        self.given: dict[str, float | Tensor] = {}
        """What hooks have added in the current iteration."""
        self._loop = loop
        self._file = file
        self._every = every if file is not None else 0
        self._slots = Slots()
        self._next = self._first = self._step = self._end = 0  # of the chunk: next and first iteration, distance, end
        self._losses: list[float | Tensor | None] = []  # one for each iteration of the chunk
        self._rates: list[Any] = []  # the same: the learning rates of the groups
        self._added: dict[str, list[float | Tensor | None]] = {}  # of hooks; shorter if the last values are missing
        self._has_begun = False
        self._written: tuple[int, str] | None = None  # the position before a chunk that has been written too early

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Record the values of a stream on which the model is trained; a chunk ends with an epoch of the stream."""
        if train:
            self.begin()
            calls.end.append(lambda: self.end_chunk() if stream.epoch_ended else None)
            if self.due:
                calls.after.append(self.take)

    def begin(self) -> None:
        """Continue at the beginning of a train stream."""
        if self._file is None:
            return
        if self._written is not None:  # `close` was called, but the training continues in this process
            self._file.rewind(*self._written, self._first)
            self._written = None
        if not self._every:
            self._next = self._due = 0  # where the checkpoint has a chunk that has not ended
            return
        if not self._has_begun:
            self._has_begun = True
            self._file.begin()
        self.given.clear()  # of a step that failed
        if self._file.refusal is not None:
            self._next = self._due = 0
            return
        self._due, distance = _following(self._loop.iterations_done, self._every)
        if distance != self._step or self._due != self._next:  # a resume has changed it
            self._next = 0

    def add(self, name: str, value: Any) -> None:
        """Add a value of the current iteration; see `Loop.record`."""
        iteration = self._loop.iterations_done + 1
        is_last = iteration == self._last  # which has been recorded, and whose update ends the window of an epoch
        if not self.due or not (is_last or iteration >= self.due):
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
        if is_last:
            self._take_given()

    def take(self, *_: object) -> None:
        """Record the values of the iteration that is done, if it is due."""
        iteration = self._loop.iterations_done
        if iteration != self._next:
            if iteration != self.due:
                self.given.clear()
                return
            self._begin_chunk(iteration)
        values = self._loop.model.step_values()
        loss = values.get("loss")
        if loss.__class__ is Tensor and loss.is_cpu and not loss.ndim:  # the usual case, without a call
            loss = loss.item()
        if loss.__class__ is not float:
            try:
                loss = self._slots.keep(loss)
            except TypeError:  # no loss, or one without a value
                loss = None
        self._losses.append(loss)
        self._rates.append(values.get(LEARNING_RATE))
        if self.given:
            self._take_given()
        self._next = following = iteration + self._step
        if following > self._end:
            self._due = _following(iteration, self._every)[0]
            if self._loop.model.is_accumulating:
                self._next = 0  # the chunk ends with the next step: the window may end before, and add values
            else:
                self.end_chunk()

    @property
    def due(self) -> int:
        """The next iteration to record; 0 if none is."""
        return self._next or self._due

    @property
    def _last(self) -> int | None:
        """The last iteration of the chunk that has not ended."""
        return self._first + self._step * (len(self._losses) - 1) if self._losses else None

    def end_chunk(self) -> None:
        """Write the values since the last chunk, if there are any."""
        chunk = self._pending()
        if chunk is not None and self._file is not None:
            self._file.append(chunk)
        self._forget()

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
        columns |= {
            name: read([each if each.__class__ is float else self._rate(each) for each in values])
            for name, values in by_name.items()
        }
        for name, added in self._added.items():
            columns[name] = read([*added, *[None] * (count - len(added))])
        columns = {name: values for name, values in columns.items() if values.count(None) < count}
        if not columns:
            return None
        first = next(row for row in range(count) if any(values[row] is not None for values in columns.values()))
        columns = {name: values[first:] for name, values in columns.items()}
        return Chunk(self._first + self._step * first, self._step, columns)

    def _rate(self, rate: Any) -> float | Tensor | None:
        with suppress(TypeError):  # None, of an iteration without this group
            return self._slots.keep(rate)
        return None

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
