"""Everything between a dataset's stream function and the loop: passes, epochs, read-ahead, position, errors."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from emrun.dataset import takes_context
from emrun.errors import StreamError
from emrun.read_ahead import END, INTERRUPTED, ReadAhead
from emrun.stream_context import StreamContext, beyond_end
from emrun.types import Batch


class StreamPosition(NamedTuple):
    """Where the loop is in a stream: batches handed out of a pass, however many were read ahead."""

    pass_number: int
    batch: int


class StreamWrapper:
    """Iterates a stream epoch by epoch.

    Iterating it hands out the batches of one epoch: those of a pass over the stream, or, with `epoch_size`, that many
    batches of one continuing iteration which starts the next pass when one is exhausted. An iteration that was left
    early goes on where it was left; an evaluation always starts from the beginning. Batches and their order do not
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
        self._iterator: Iterator[Batch] | None = None
        self._reader: ReadAhead | None = None
        self._read: Callable[[], Any] | None = None
        self._entered = False

    @property
    def position(self) -> StreamPosition:
        """Where the loop is in the stream."""
        return StreamPosition(self._pass_number, self._batch)

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
            self._batch = 0
        note = self.profile.setdefault(f"read_batch_{self.name}", array("d")).append
        left = self._epoch_size if self._epoch_size > 0 else -1
        while left:
            began = perf_counter()
            try:
                batch = (self._read or self._open())()
            except BaseException as error:
                error.add_note(f"in stream {self.name!r}, batch {self._batch} of the pass (counted from 0)")
                self.close()  # a generator that raised would look like one that ended
                raise
            if batch is END:
                if left > 0 and self._batch:  # the epoch goes on in the next pass
                    self._next_pass()
                    continue
                self._next_pass()
                return
            if batch is INTERRUPTED:
                return
            self._batch += 1
            left -= 1
            note(perf_counter() - began)
            yield batch

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

    def _begin_pass(self) -> None:
        context = StreamContext(self.name, seed=self._seed, epoch=self._pass_number, start=self._batch)
        stream = self._stream_fn(context) if self._takes_context else self._stream_fn()
        if not isinstance(stream, Iterable):
            raise StreamError(
                f"stream {self.name!r}: its function returned {type(stream).__name__}; "
                "it must return an iterable of batches (is a `yield` missing?)",
                first_batch=True,
            )
        batches = context.counted(stream) if self._takes_context else iter(stream)
        if self._batch:
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
