"""The step log: the loss and the learning rates of every iteration, and what hooks add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from emrun.base.arguments import check_count
from emrun.base.errors import HookError
from emrun.epoch_data import LEARNING_RATE, is_rate, named_rates, number
from emrun.loop.progress import Progress
from emrun.model import AbstractModel
from emrun.record.steps import ITERATION, KEYS, Chunk, StepsFile, read_chunk

CHUNK_LENGTH = 1_000
"""A chunk ends with the iterations that are multiples of this."""

THINNING = ((100_000, 1), (1_000_000, 10))
"""Up to which iteration -> every how many iterations are recorded; afterwards, every 100th."""
_AT_LAST = 100

_TOGETHER = 64  # slots that are allocated together
_OF_THE_LOOP = ("loss", LEARNING_RATE, ITERATION, *KEYS)


class StepLog:
    """Collects the values of each iteration and writes them to `steps.jsonl`, in chunks.

    Values that are on a GPU stay there until their chunk ends, with every 1,000th iteration and with the train stream
    of an epoch; so a chunk costs one wait for the device. A checkpoint has the values of the chunk that has not ended.
    Which iterations are recorded, and where chunks end, depends on the iteration alone: the file of a resumed run is
    that of an uninterrupted run.

    Args:
        model: its `step_values` are recorded.
        progress: counts the iterations.
        file: the file; None without a run.
        every: record every n-th iteration; 0 for none.
    """

    def __init__(self, model: AbstractModel, progress: Progress, file: StepsFile | None, every: int) -> None:
        check_count("record_steps", every)
        self.given: dict[str, float | Tensor] = {}
        """What hooks have added in the current iteration."""
        self._model = model
        self._ask = model.step_values
        self._progress = progress
        self._file = file
        self._every = every if file is not None else 0
        self._waiting = WaitingNumbers()
        self._due = 0  # the next iteration to record, if `_chunk` is not to have it; 0 if none is
        self._chunk = _Pending(range(0))
        self._has_begun = False
        self._written: tuple[int, str] | None = None  # the position before a chunk that has been written too early

    def begin_stream(self) -> Callable[[], None] | None:
        """Return what records each step of a train stream; None if none is recorded."""
        self.begin()
        return self.take if self.due else None

    def end_stream(self, *, epoch_ended: bool) -> None:
        """End the chunk with the epoch of a train stream."""
        if epoch_ended:
            self.end_chunk()

    def begin(self) -> None:
        """Continue at the beginning of a train stream."""
        if self._file is None:
            return
        if self._written is not None:  # `close` was called, but the training continues in this process
            self._file.rewind(*self._written, self._chunk.steps.start)
            self._written = None
        if self._every and not self._has_begun:
            self._has_begun = True
            self._file.begin()
        self.given.clear()  # of a step that failed
        is_on = self._every and self._file.refusal is None
        following = _following(self._progress.iterations_done, self._every) if is_on else (0, 0)
        if following != (self._chunk.next, self._chunk.steps.step):  # a resume has changed it
            self._chunk.close()
        self._due = following[0]

    def add(self, name: str, value: Any) -> None:
        """Add a value of the current iteration; see `Loop.record`."""
        iteration = self._progress.iterations_done + 1
        is_last = iteration == self._chunk.last  # which is recorded already, and whose update ends that of an epoch
        if not self.due or not (is_last or iteration >= self.due):
            return
        if not isinstance(name, str) or (name not in self._chunk.added and (name in _OF_THE_LOOP or is_rate(name))):
            taken = ", ".join(map(repr, _OF_THE_LOOP))
            raise HookError(
                f"record: {name!r} cannot be the name of a value that a hook adds to the steps; use another string "
                f"than {taken}, and none that begins with '{LEARNING_RATE}_'"
            )
        try:
            self.given[name] = self._waiting.keep(value)
        except TypeError as error:
            raise HookError(f"record: the value {name!r} {error}") from error
        if is_last:
            self._chunk.add(self.given)

    def take(self) -> None:
        """Record the values of the iteration that is done, if it is due."""
        iteration = self._progress.iterations_done
        chunk = self._chunk
        if iteration not in chunk.steps:
            if iteration != self._due:
                self.given.clear()
                return
            self.end_chunk()
            distance = _following(iteration - 1, self._every)[1]
            chunk = self._chunk = _Pending(range(iteration, _end_of_chunk(iteration) + 1, distance))
        values = self._ask()
        try:
            loss: Any = values["loss"]
            if not loss.is_cpu:
                loss = self._waiting.keep(loss)
            else:
                loss = loss.item()
        except (AttributeError, KeyError, RuntimeError, TypeError):  # not a tensor, or not one number
            loss = self._number(values.get("loss"))
        chunk.values.append((loss, values.get(LEARNING_RATE)))
        if self.given:
            chunk.add(self.given)
        if iteration == chunk.end:
            self._due = _following(iteration, self._every)[0]
            if not self._model.is_accumulating:
                self.end_chunk()
            # else the chunk ends with the next step: the window may end before, and add values

    @property
    def due(self) -> int:
        """The next iteration to record; 0 if none is."""
        return self._chunk.next or self._due

    def losses_after(self, iteration: int) -> dict[int, float]:
        """Return iteration -> loss of those after an iteration that are not written yet; this waits for the device."""
        values = self._chunk.values
        steps = self._chunk.steps[self._chunk.done - len(values) :]
        losses = read_waiting([self._number(loss) for loss, _ in values])
        return {step: loss for step, loss in zip(steps, losses, strict=False) if loss is not None and step > iteration}

    def end_chunk(self) -> None:
        """Write the values since the last chunk, if there are any."""
        chunk = self._pending()
        if chunk is not None and self._file is not None:
            self._file.append(chunk)
        self._chunk = _Pending(range(0))

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
        self._chunk = _Pending(range(0))
        self._written = None
        if self._file is None:
            return
        chunk = read_chunk(state["pending"]) if state is not None else None
        end = iterations_done + 1 if chunk is None else chunk.first
        length, digest = (None, None) if state is None else (state["length"], state["digest"])
        self._file.rewind(length, digest, end)
        if chunk is not None:
            self._chunk = _Pending(range(chunk.first, _end_of_chunk(chunk.first) + 1, chunk.every), chunk)

    def _pending(self) -> Chunk | None:
        """Return the chunk that has not ended, from its first step that has a value; None if there is none."""
        pending = self._chunk
        count = len(pending.values)
        losses = [loss for loss, _ in pending.values]
        given = [rates for _, rates in pending.values]
        rows = [rates.values() if isinstance(rates, Mapping) else rates or () for rates in given]
        names = next((rates for rates in given if isinstance(rates, Mapping)), None)
        rates = zip_longest(*rows)
        by_name = named_rates(rates if names is None else dict(zip(names, rates, strict=False)))
        numbers = {
            "loss": [loss if isinstance(loss, Tensor) else self._number(loss) for loss in losses],
            **{name: [*map(self._number, values)] for name, values in by_name.items()},
            **{name: [*added, *[None] * (count - len(added))] for name, added in pending.added.items()},
        }
        columns = pending.joined({name: read_waiting(values) for name, values in numbers.items()}, count)
        columns = {name: values for name, values in columns.items() if values.count(None) < len(values)}
        if not columns:
            return None
        first = next(row for row in range(pending.done) if any(values[row] is not None for values in columns.values()))
        columns = {name: values[first:] for name, values in columns.items()}
        return Chunk(pending.steps[first], pending.steps.step, columns)

    def _number(self, value: Any) -> float | Tensor | None:
        """Return a number, or a slot with it; None for another value, as of a group that is not there."""
        if value.__class__ is float:
            return value
        with suppress(TypeError):
            return self._waiting.keep(value)
        return None


class _Pending:
    """The values since the last chunk.

    Args:
        steps: the iterations that the chunk may have.
        loaded: the first ones of them, from a checkpoint.
    """

    def __init__(self, steps: range, loaded: Chunk | None = None) -> None:
        self.steps = steps
        self._loaded = Chunk(0, 1, {}) if loaded is None else loaded
        self.end = steps[-1] if steps else 0
        """The last of them."""
        self.values: list[tuple[float | Tensor | None, Any]] = []
        """For each iteration in this process, the loss and the learning rates of the groups."""
        self.added: dict[str, list[float | Tensor | None]] = {}
        """What hooks have added; shorter if the last values are missing."""

    @property
    def done(self) -> int:
        """The number of iterations so far."""
        return len(self._loaded) + len(self.values)

    @property
    def next(self) -> int:
        """The next iteration of the chunk; 0 if it has all."""
        return next(iter(self.steps[self.done :]), 0)

    @property
    def last(self) -> int:
        """The last iteration so far; 0 before the first."""
        return self.steps[self.done - 1] if self.done else 0

    def close(self) -> None:
        """Let the chunk have no further iteration."""
        self.steps = self.steps[: self.done]

    def joined(self, columns: Mapping[str, list[float | None]], count: int) -> dict[str, list[float | None]]:
        """Return the columns of `count` iterations behind those that were loaded: the loss, the rates, the others."""
        loaded = self._loaded.columns
        before = [None] * len(self._loaded)
        new = [None] * count
        names = sorted({**loaded, **columns}, key=lambda name: (name != "loss", not is_rate(name)))
        return {name: [*loaded.get(name, before), *columns.get(name, new)] for name in names}

    def add(self, given: dict[str, float | Tensor]) -> None:
        """Add what hooks have added in the last iteration, and forget it."""
        before = len(self.values) - 1
        for name, value in given.items():
            values = self.added.setdefault(name, [])
            values += [None] * (before - len(values))
            values[before:] = [value]
        given.clear()


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


class WaitingNumbers:
    """Keeps the values of one-element tensors without waiting for their device.

    A tensor on a GPU is copied to a slot, a tensor without dimensions on the same device, because the model may reuse
    its memory. A tensor on the CPU is read at once, which takes less time than a copy.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def keep(self, value: Any) -> float | Tensor:
        """Return the number, or a slot with it, which `read_waiting` reads later.

        Args:
            value: a number, or a tensor with one element.

        Raises:
            TypeError: the value is not a real number.
        """
        if value.__class__ is float:
            return value
        if not isinstance(value, Tensor):
            try:
                real = number(value)
                if real is not None:
                    return float(real)
            except OverflowError as error:
                raise TypeError("is a number that is too large") from error
            except ValueError as error:
                raise TypeError(str(error)) from error
            what = f"{value!r:.80}" if isinstance(value, str | bytes | None) else type(value).__name__
            raise TypeError(f"is {what}, not a number")
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise TypeError(f"is a tensor of shape {tuple(value.shape)} and {value.dtype}, not one real number")
        if value.is_cpu:
            return float(value.item())
        key = value.dtype, value.device
        if not self._free.get(key):
            with torch.inference_mode(mode=False):
                self._free[key] = list(torch.empty(_TOGETHER, dtype=value.dtype, device=value.device).unbind())
        slot = self._free[key].pop()
        slot.copy_(value.detach().reshape(()))
        return slot


def read_waiting(values: Sequence[float | Tensor | None]) -> list[float | None]:
    """Return the numbers, with those in slots; this waits once for each device."""
    results: list[Any] = list(values)
    waiting: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            waiting.setdefault((value.dtype, value.device), []).append(index)
    for indices in waiting.values():
        numbers = torch.stack([results[index] for index in indices]).cpu().double().tolist()
        for index, result in zip(indices, numbers, strict=True):
            results[index] = result
    return results
