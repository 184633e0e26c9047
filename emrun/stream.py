"""Everything between a dataset's stream function and the loop: passes, epochs, read-ahead, position, errors."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, cast

from emrun.dataset import takes_context
from emrun.errors import StreamError
from emrun.read_ahead import END, INTERRUPTED, ReadAhead
from emrun.state import digest, encode, random_digest, random_state, set_random_state
from emrun.stream_context import StreamContext, beyond_end
from emrun.types import Batch


class StreamPosition(NamedTuple):
    """Where the loop is in a stream: batches handed out of a pass, however many were read ahead."""

    pass_number: int
    batch: int


class StreamWrapper:
    """Iterates a stream epoch by epoch.

    Iterating it hands out the batches of one epoch: those of a pass over the stream, or, with `epoch_size`, that many
    batches of one continuing iteration which starts the next pass when one is exhausted. An epoch that was left early
    goes on where it was left; an evaluation always starts from the beginning. Batches and their order do not
    depend on `buffer_size`.

    Args:
        stream_fn: returns an iterable of batches; takes nothing, or the `StreamContext`.
        buffer_size: how many batches a thread reads ahead; 0 for none. The thread lives for one pass at most, and
            only inside a `with` block.
        epoch_size: how many batches make an epoch; -1 for a whole pass.
        name: the name of the stream.
        profile: gets the seconds that each batch of the epoch took to read, as `read_batch_<name>`.
        seed: the seed of the run.
        training: whether passes are numbered and continued; an evaluation is always the same pass 0.
        interrupted: tells whether to stop waiting for a batch; the epoch then ends early.

    Raises:
        ValueError: on iteration outside a `with` block with a buffer.
        StreamError: the stream function returns no iterable, or breaks the contract of `ctx.batches`.
        BaseException: on iteration, what the stream raises, after the batches that came before it.
    """

    def __init__(
        self,
        stream_fn: Callable[..., Iterable[Batch]],
        buffer_size: int = 0,
        epoch_size: int = -1,
        name: str = "unnamed",
        profile: MutableMapping[str, Any] | None = None,
        *,
        seed: int = 0,
        training: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.profile: MutableMapping[str, Any] = {} if profile is None else profile
        self.training = training
        self._stream_fn = stream_fn
        self._takes_context = takes_context(stream_fn)
        self._buffer_size = buffer_size
        self._epoch_size = epoch_size
        self._seed = seed
        self._interrupted = interrupted
        self._pass_number = 1 if training else 0
        self._batch = 0
        self._epoch_batches = 0
        self.epoch_ended = False
        """Whether the epoch came to its end, and was not interrupted."""
        self._last: Batch | None = None
        self._end_of_pass: Callable[[], dict[str, Any]] | None = None
        self._is_stateful = False
        self._before_last: Any = None
        self._began: dict[str, Any] | None = None
        self._to_restore: dict[str, Any] | None = None
        self._iterator: Iterator[Batch] | None = None
        self._reader: ReadAhead | None = None
        self._read: Callable[[], Any] | None = None
        self._entered = False

    @property
    def position(self) -> StreamPosition:
        """Where the loop is in the stream."""
        return StreamPosition(self._pass_number, self._batch)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on behind the last batch that was handed out."""
        position = {"pass": self._pass_number, "batch": self._batch, "epoch_batches": self._epoch_batches}
        if not self._batch:
            before = self._end_of_pass() if self._end_of_pass is not None else None
            return {**position, "end_of_pass": before}
        return {**position, **self._describe_last(self._began, self._last, self._before_last)}

    def _describe_last(self, began: Any, last: Any, before_last: Any) -> dict[str, Any]:
        """Return the part of the state that tells how to make the last batch of a pass again."""
        return {
            "began": began,
            "digest": digest(last) if last is not None else None,
            "before_last": encode(before_last, f"stream {self.name!r}"),
        }

    def _keep_end_of_pass(self) -> None:
        """Keep what brings a resume to the end of the pass, from where a stream with a memory begins the next one."""
        if not self.training or not self._batch:
            self._end_of_pass = None
            return
        position = {"pass": self._pass_number, "batch": self._batch}
        last = partial(self._describe_last, self._began, self._last, self._before_last)
        self._end_of_pass = lambda: {**position, **last()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where another wrapper of the stream was, when `restore` is called or the stream is iterated."""
        self.close()
        self._pass_number, self._batch = state["pass"], state["batch"]
        self._epoch_batches = state["epoch_batches"]
        self._to_restore = state

    def restore(self) -> bool:
        """Begin the pass of the state that was loaded, up to its position; changes the global random states.

        An object with `state_dict` and `load_state_dict` is set by these; `ctx.batches` leaves out what comes before;
        other streams are read up to there, under the random states that the pass began with. The last batch before the
        position is made again and compared; between two passes, the last one of the pass before.

        Returns:
            Whether that batch is the same, and no batch depends on when it is read.

        Raises:
            StreamError: the stream ends before the position.
        """
        state, self._to_restore = self._to_restore, None
        if state is None:
            return True
        if state["batch"]:
            return self._read_again(state)
        before = state["end_of_pass"]
        if before is None:  # the beginning of the training, or an empty pass
            return True
        self._pass_number = before["pass"]
        try:
            same = self._read_again(before) and next(cast("Iterator[Any]", self._iterator), END) is END
        except StreamError:  # it has become shorter
            same = False
        self._next_pass()
        self._end_of_pass = lambda: before
        return same

    def _read_again(self, state: dict[str, Any]) -> bool:
        """Go to the position of a state by making the last batch before it again; return whether it is the same."""
        if state["began"] is not None:
            set_random_state(state["began"])
        self._batch = state["batch"] - 1
        self._begin_pass(state["before_last"])
        before = random_digest()
        item: Any = next(cast("Iterator[Any]", self._iterator), END)
        if item is END:
            raise beyond_end(self.name, self._batch, state["batch"])
        draws = self._buffer_size > 0 and state["batch"] > 1 and before != random_digest()  # while the model does too
        self._batch = state["batch"]
        self._last = self._opened(item)
        return not draws and (state["digest"] is None or digest(self._last) == state["digest"])

    def seek(self, position: StreamPosition) -> None:
        """Go to a position: `ctx.batches` leaves out what comes before it, other streams are read up to there."""
        self.close()
        self._pass_number, self._batch = position

    def __enter__(self) -> StreamWrapper:
        self._entered = True
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the reader; position and batches that it read are kept."""
        self._entered = False
        self._read = None
        if self._reader is not None and not self._reader.stop():
            self._reader = self._iterator = None

    def close(self) -> None:
        """Stop the reader and drop what was read ahead; the position is kept."""
        reader, iterator = self._reader, self._iterator
        self._reader = self._iterator = self._read = None
        stopped = reader is None or reader.stop()
        close = getattr(iterator, "close", None)
        if stopped and close is not None:
            close()

    def wake(self) -> None:
        """End a wait for the reader, which then looks whether it is interrupted; for signal handlers."""
        if self._reader is not None:
            self._reader.wake()

    def __iter__(self) -> Iterator[Batch]:
        """Hand out the batches of one epoch."""
        if not self.training:
            self.close()
            self._batch = self._epoch_batches = 0
        elif self._to_restore is not None:
            self.restore()
        note = self.profile.setdefault(f"read_batch_{self.name}", array("d")).append
        left = max(0, self._epoch_size - self._epoch_batches) if self._epoch_size > 0 else -1
        self.epoch_ended = False
        while left:
            began = perf_counter()
            try:
                batch = (self._read or self._open())()
            except BaseException as error:
                error.add_note(f"in stream {self.name!r}, batch {self._batch} of the pass (counted from 0)")
                self.close()  # a generator that raised would look like one that ended
                raise
            if batch is END:
                self._keep_end_of_pass()
                if left > 0 and self._batch:  # the epoch goes on in the next pass
                    self._next_pass()
                    continue
                self._next_pass()
                break
            if batch is INTERRUPTED:
                return
            if self._is_stateful:
                batch = self._opened(batch)
            self._last = batch
            self._batch += 1
            self._epoch_batches += 1
            left -= 1
            note(perf_counter() - began)
            yield batch
        self._epoch_batches = 0
        self.epoch_ended = True

    def _open(self) -> Callable[[], Any]:
        """Begin the pass or go on with it; return what returns its next batch, END or INTERRUPTED."""
        if self._buffer_size > 0 and not self._entered:
            raise ValueError(
                f"stream {self.name!r} is buffered: iterate it inside `with stream:`, which ends its thread"
            )
        if self._iterator is None:
            self._begin_pass()
        if self._reader is not None:
            self._reader.start()
            self._read = self._reader.get
        else:
            self._read = partial(next, self._iterator, END)
        return self._read

    def _next_pass(self) -> None:
        self.close()
        self._batch = 0
        self._pass_number += self.training

    def _opened(self, item: Any) -> Batch:
        """Return the batch of what the iterator gave; of a stream with a state, that comes with the state before it."""
        if self._is_stateful:
            item, self._before_last = item
        return item  # type: ignore[no-any-return]

    def _begin_pass(self, state: Any = None) -> None:
        """Begin the pass at the position.

        Args:
            state: the state of a stream that has one, which brings it there.
        """
        if self.training:
            self._began = random_state()
        context = StreamContext(self.name, seed=self._seed, epoch=self._pass_number, start=self._batch)
        stream = self._stream_fn(context) if self._takes_context else self._stream_fn()
        if not isinstance(stream, Iterable):
            raise StreamError(
                f"stream {self.name!r}: its function returned {type(stream).__name__}; "
                "it must return an iterable of batches (is a `yield` missing?)",
                first_batch=True,
            )
        self._is_stateful = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        if self._is_stateful and state is not None:
            stream.load_state_dict(state)  # type: ignore[attr-defined]
        if self._is_stateful:
            encode(stream.state_dict(), f"stream {self.name!r}")  # type: ignore[attr-defined]  # may not be possible
            batches: Iterator[Any] = _with_states(stream)
        else:
            batches = context.counted(stream) if self._takes_context else iter(stream)
        if self._batch and state is None:
            first: Any = next(batches, END)
            if context.skips:
                batches = itertools.chain((first,), batches) if first is not END else iter(())
            else:
                self._discard(batches, first)
        self._iterator = batches
        if self._buffer_size > 0:
            self._reader = ReadAhead(batches, self._buffer_size, self.name, self._interrupted)

    def _discard(self, batches: Iterator[Batch], first: Any) -> None:
        done = 0
        for batch in itertools.chain((first,), itertools.islice(batches, self._batch - 1)):
            done += batch is not END
        if done < self._batch:
            raise beyond_end(self.name, done, self._batch)


def _with_states(stream: Any) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch with the state of the stream before it, however far ahead it is read."""
    before = copy.deepcopy(stream.state_dict())
    for batch in stream:
        yield batch, before
        before = copy.deepcopy(stream.state_dict())
