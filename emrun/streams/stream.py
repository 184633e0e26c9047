"""Connects a dataset's stream function to the loop: passes, epochs, read-ahead, position, errors."""

from __future__ import annotations

import faulthandler
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, cast

from emrun.base.encoding import random_digest, random_state, set_random_state
from emrun.base.errors import StreamError
from emrun.base.randomness import preserved_randomness
from emrun.base.sources import NEW
from emrun.base.types import Batch, Reader
from emrun.base.wording import few
from emrun.ranks.group import Ranks, ranks as ranks_of_run
from emrun.stream_context import BeyondEnd, WithLeftOut, beyond_end
from emrun.streams.bookmark import Bookmark, different
from emrun.streams.read_ahead import END, INTERRUPTED, PreparedAhead, ReadAhead
from emrun.streams.reading import Reading
from emrun.streams.reuse import copied
from emrun.streams.stream_pass import StreamPass, WithState, named
from emrun.streams.workers import Workers

_LOG = logging.getLogger(__name__)
_WITH_MORE = (WithState, WithLeftOut)
_NO_BATCHES = frozenset((END.__class__, INTERRUPTED.__class__, *_WITH_MORE))
_MOST_LEFT_OUT = 0.01  # of the examples of a pass
_TOLD_ONE_BY_ONE = 3


class StreamPosition(NamedTuple):
    """The position of the loop in a stream: the batches of a pass that the loop has taken, without those read ahead."""

    pass_number: int
    batch: int


class StreamWrapper:
    """Iterates a stream epoch by epoch.

    Iterating the wrapper yields the batches of one epoch: those of one pass over the stream or, with `epoch_size`, that
    many batches, where a new pass starts whenever a pass ends. An epoch that was left early continues at the same
    position. An evaluation always starts from the beginning, and is one pass at most. Batches and their order do not
    depend on `reading`.

    Args:
        stream_fn: returns an iterable of batches; takes no argument, or the `StreamContext`.
        name: the name of the stream.
        epoch_size: the number of batches of an epoch; -1 for a whole pass.
        seed: the seed of the run.
        training: whether passes are numbered and continued; an evaluation is always the same pass 0.
        interrupted: returns whether to stop waiting for a batch; the epoch then ends early.
        reading: how the stream is read, by default by the loop itself. A thread runs for one pass at most, and only
            inside a `with` block. Of several workers, one reads a stream without `ctx.batches`; a thread reads an
            object with `state_dict`. The time limit has no effect while a resume reads up to its position.
        context_name: the name of the stream in the `StreamContext`; by default `name`.
        ranks: the ranks that share the batches; by default those of the run. A stream that another stream is made of
            gets those of its context.
        in_order: see `StreamContext`.
        read_by: who reads the stream that this stream is a part of; None if it is not a part of one.

    Raises:
        ValueError: on iteration outside a `with` block with a buffer or workers.
        StreamError: the stream function does not return an iterable, or breaks the contract of `ctx.batches`; a worker
            process ended early, or no batch came within the time limit.
        BaseException: on iteration, the error of the stream, after the batches before it.
    """

    def __init__(
        self,
        stream_fn: Callable[..., Iterable[Batch]],
        name: str = "unnamed",
        *,
        epoch_size: int = -1,
        seed: int = 0,
        training: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
        reading: Reading | None = None,
        context_name: str | None = None,
        ranks: Ranks | None = None,
        in_order: bool = False,
        read_by: Reader | None = None,
    ) -> None:
        self.name = name
        self._context_name = context_name or name
        self.training = training
        self._stream_fn = stream_fn
        self._reading = reading or Reading()
        self.epoch_size = epoch_size
        self._seed = seed
        self._ranks = ranks
        self._in_order = in_order
        self._read_by = read_by
        self._interrupted = interrupted
        self._workers: Workers | None = None
        self._pass_number = 1 if training else 0
        self._batch = 0
        self._epoch_start = 0  # where the epoch has begun in the pass; below 0 if in an earlier pass
        self.epoch_ended = False
        """Whether the epoch reached its end, without an interruption."""
        self.last_pass: StreamPosition | None = None
        """The end of the last pass that this wrapper has read to its end."""
        self.different: list[str] = []
        """The sources of the last batch that differed when the stream was restored."""
        self.change = ""
        """How the length of a pass differed when the stream was restored: `has 2 batches, and had 4 or more`."""
        self.left_out: dict[str, str] = {}
        """Name -> why it cannot be read, of the examples that were left out in this epoch."""
        self.rows = 0
        """The number of examples of the pass, as far as `ctx.batches` was told; 0 if this is not known."""
        self._bookmark = Bookmark()
        self._end_of_pass: Callable[[], dict[str, Any] | None] = lambda: None
        self._to_restore: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._reader: ReadAhead | None = None
        self._read: Callable[[], Any] | None = None
        self._entered = False

    @property
    def position(self) -> StreamPosition:
        """The position of the loop in the stream."""
        return StreamPosition(self._pass_number, self._batch)

    @property
    def last_batch(self) -> Batch | None:
        """The last batch of the pass that was yielded; None before the first one."""
        return self._bookmark.last

    @property
    def has_begun(self) -> bool:
        """Whether a batch of the current epoch was read, which did not end."""
        return self._batch > self._epoch_start

    @property
    def batches_of_epoch(self) -> int:
        """Number of batches of the current epoch that were yielded."""
        return self._batch - self._epoch_start

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues after the last batch that was yielded."""
        place = {"pass": self._pass_number, "batch": self._batch, "epoch_batches": self._batch - self._epoch_start}
        position: dict[str, Any] = place | ({"left_out": dict(self.left_out)} if self.left_out else {})
        if not self._batch:
            return {**position, "end_of_pass": self._end_of_pass()}
        return {**position, **self._bookmark.state(self.name, self._batch)}

    def _keep_end_of_pass(self) -> None:
        """Save the state at the end of the pass; a stream that keeps state begins the next pass from there."""
        self._end_of_pass = lambda: None
        self.last_pass = self.position
        if self.training and self._batch:
            position = {"pass": self._pass_number, "batch": self._batch}
            bookmark = self._bookmark
            self._end_of_pass = lambda: {**position, **bookmark.state(self.name, position["batch"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position of another wrapper of the stream; `restore` or the first iteration goes there."""
        self.seek(StreamPosition(state["pass"], state["batch"]))
        self._epoch_start = state["batch"] - state["epoch_batches"]
        self.left_out = dict(state.get("left_out", {}))
        self._to_restore = state

    def restore(self, *, may_be_shorter: bool = False) -> bool:
        """Begin the pass of the loaded state and go to its position; this changes the global random states.

        An object with `state_dict` and `load_state_dict` gets its state back; `ctx.batches` leaves out the batches
        before the position; other streams are read up to the position, with the random states that the pass began with.
        The last batch before the position (between two passes, of the previous pass) is made again and compared, unless
        the stream asks the model, which has other weights by now. So is the end of the previous pass.

        Args:
            may_be_shorter: whether a pass that ends before the position counts as read to its end.

        Returns:
            Whether this batch is the same, and no batch depends on the time at which it is read.

        Raises:
            BeyondEnd: the stream ends before the position.
        """
        state, self._to_restore = self._to_restore, None
        self.different = []
        self.change = ""
        if state is None:
            return True
        place = state if state["batch"] else state["end_of_pass"]
        if place is None:  # the beginning of the run, or an empty pass
            return True
        self._pass_number = place["pass"]
        try:
            same = self._read_again(place)
        except BeyondEnd as error:
            same = False
            self.change = f"has {error.batches} batches, and had {place['batch']} or more"
            if place is state and not (may_be_shorter and error.batches):
                raise
            if place is state:
                self._go_to_end(state, error.batches)
        if place is state:
            return same
        if same and place.get("after") is None and next(cast("Iterator[Any]", self._iterator), END) is not END:
            self.change = f"has more than {place['batch']} batches, and had {place['batch']}"
        epoch_start = self._epoch_start
        self._next_pass()
        self._epoch_start = epoch_start
        self._end_of_pass = lambda: place
        return same and not self.change

    def _go_to_end(self, state: dict[str, Any], batches: int) -> None:
        """Go to the end of a pass that has fewer batches than before a state."""
        self.close()
        self._epoch_start -= state["batch"] - batches
        before = state["before_first"]
        state = {**state, "batch": batches, "digest": None}
        self._make_again(state, before, batches - 1 if before is None else 0)

    def _read_again(self, state: dict[str, Any]) -> bool:
        """Go to the position of a state by making the last batch before it again; return whether this is the same.

        If the state of a stream does not lead there, the stream is read from the beginning of the pass.
        """
        if (after := state.get("after")) is not None:  # the weights that made the last batch are gone
            self._batch = state["batch"]
            self._begin_pass(after)
            self._bookmark.after = after
            return True
        has_state = state["before_last"] is not None and state["batch"] > 1
        try:
            same = self._make_again(state, state["before_last"], state["batch"] - 1)
            if same or not (has_state and self.different):
                return same
        except BeyondEnd:
            if not has_state:
                raise
        _LOG.info("stream %r: its state does not lead back to its position, so the pass is read again", self.name)
        self.close()
        return self._make_again(state, state["before_first"], 0)

    def _make_again(self, state: dict[str, Any], before: Any, start: int) -> bool:
        """Make the last batch before the position of a state again, from what the stream had before batch `start`."""
        if state["began"] is not None:
            set_random_state(state["began"])
        self._batch = start
        self._begin_pass(before)
        self._bookmark.before_first = state["before_first"]
        batches = cast("Iterator[Any]", self._iterator)
        drawn = random_digest()
        skipped = sum(1 for _ in islice(batches, state["batch"] - 1 - start))
        item: Any = next(batches, END)
        if item is END:
            raise beyond_end(self.name, start + skipped, state["batch"])
        in_thread = self._reader is not None and self._workers is None
        draws = in_thread and state["batch"] > 1 and drawn != random_digest()  # while the model draws too
        self._batch = state["batch"]
        if item.__class__ is WithLeftOut:
            self.rows = item.rows
        self._bookmark.last = self._opened(item)
        self.different = different(self._bookmark.last, state["digest"])
        return not (draws or self.different)

    def seek(self, position: StreamPosition) -> None:
        """Go to a position: `ctx.batches` leaves out the batches before it, other streams are read up to it."""
        self.close()
        self._epoch_start += position.batch - self._batch
        self._pass_number, self._batch = position

    def __enter__(self) -> StreamWrapper:
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the reader; the position and the batches that a thread has read are kept. Worker processes end."""
        self._entered = False
        self._read = None
        if self._workers is not None:
            self.close()
        elif self._reader is not None and not self._reader.stop():
            self._reader = self._iterator = None

    def is_at_end(self) -> bool:
        """Return whether the epoch of a training has no further batch.

        If only the next batch can tell, the batch is read under random states that are restored, and dropped; the
        position and the state stay. If the batch cannot be read, the epoch counts as not ended.
        """
        if self.epoch_size > 0:
            return self._batch - self._epoch_start >= self.epoch_size
        state = self.state_dict()
        item = None
        with preserved_randomness(), suppress(Exception):  # the next epoch will raise the error, if there is one
            item = (self._read or self._open())()
        if item is not END:
            self.load_state_dict(state)
        return item is END

    def close(self) -> None:
        """Stop the reader and drop the batches that were read ahead; the position is kept."""
        reader, iterator, workers = self._reader, self._iterator, self._workers
        self._reader = self._iterator = self._read = self._workers = None
        if workers is not None:
            workers.close()  # this ends a wait of the reader
        stopped = reader is None or reader.stop()
        close = getattr(iterator, "close", None)
        if stopped and close is not None:
            close()

    def wake(self) -> None:
        """End a wait for the reader, so that the loop checks for an interruption; for signal handlers."""
        if self._reader is not None:
            self._reader.wake()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        if not self.training:
            self.close()
            self._batch = self._epoch_start = 0
        elif self._to_restore is not None:
            with preserved_randomness():
                self.restore()
        if self._batch == self._epoch_start:
            self.left_out = {}
        left = max(0, self.epoch_size - self._batch + self._epoch_start) if self.epoch_size > 0 else -1
        self.epoch_ended = False
        while left:
            try:
                batch = (self._read or self._open())()
            except BaseException as raised:
                error = named(raised, self.name)
                error.add_note(f"in stream {self.name!r}, batch {self._batch} of the pass")
                self.close()  # otherwise the generator that raised would look exhausted
                if error is raised:
                    raise
                raise error from raised
            if batch.__class__ in _NO_BATCHES:
                if batch is INTERRUPTED:
                    return
                if batch is END:
                    self._keep_end_of_pass()
                    goes_on = left > 0 and self._batch and self.training
                    self._next_pass()
                    if goes_on:  # the epoch continues in the next pass
                        continue
                    break
                if batch.__class__ is WithLeftOut:
                    self._note_left_out(batch)
                batch = self._opened(batch)
            self._bookmark.last = batch
            self._batch += 1
            left -= 1
            yield batch
        if not self.training:
            self.close()  # the pass may have more batches
        self._epoch_start = self._batch
        self.epoch_ended = True

    def _note_left_out(self, item: WithLeftOut) -> None:
        """Note which examples were left out of a batch.

        Raises:
            StreamError: too many were left out.
        """
        before = len(self.left_out)
        self.left_out |= item.left_out
        self.rows = item.rows
        if self._reading.on_bad_example == "warn":
            for name in list(self.left_out)[before:_TOLD_ONE_BY_ONE]:
                _LOG.warning("stream %r: left out %s: %s", self.name, name, self.left_out[name])
        if self._reading.on_bad_example != "error":
            check_left_out(self.name, self.left_out, self.rows)

    def _open(self) -> Callable[[], Any]:
        """Begin or continue the pass; return a function that returns its next batch, END or INTERRUPTED."""
        if self._reading.ahead and not self._entered:
            raise ValueError(
                f"stream {self.name!r} is read ahead: iterate it inside `with stream:`, which ends the reader thread"
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
        self._epoch_start -= self._batch
        self._batch = 0
        self._pass_number += self.training

    def _opened(self, item: Any) -> Batch:
        """Return the batch from an item of the iterator; for a stream with a state, the item has the state too."""
        if item.__class__ is WithState and callable(item.before):
            self._bookmark.after = item.before
        elif item.__class__ is WithState:
            self._bookmark.before_last = item.before
            if not self._batch:
                self._bookmark.before_first = item.before
        return item.batch if item.__class__ in _WITH_MORE else item

    def _begin_pass(self, state: Any = None) -> None:
        """Begin the pass at the position.

        Args:
            state: the state at the position, for a stream with `state_dict`.
        """
        self._bookmark = Bookmark(random_state() if self.training else None)
        self.rows = 0
        reading = self._reading
        size = reading.ahead
        own_ranks = replace(
            self._ranks or ranks_of_run(), group=None, background=None
        )  # which processes cannot be given
        stream_pass = StreamPass(
            self._stream_fn,
            self._context_name,
            self._seed,
            self._pass_number,
            self._batch,
            state,
            own_ranks,
            self._in_order,
            self._read_by or ("thread" if size else "loop"),
        )
        batches: Iterator[Any]
        prefetch = reading.prefetch()
        if reading.workers and not self._is_read_here:
            batches = self._workers = Workers(stream_pass, reading.workers, reading.ahead_of_each, reading.start_method)
            size = 1
        else:
            batches = stream_pass.read()
            if size and not getattr(getattr(self._stream_fn, "__self__", None), "fresh_batches", False):
                batches = copied(batches)
        self._iterator = batches
        if size:
            reader = ReadAhead if prefetch is None else partial(PreparedAhead, prefetch)
            self._reader = reader(batches, size, self.name, self._interrupted, self._watch)

    @cached_property
    def _is_read_here(self) -> bool:
        """Whether this process reads the stream: a worker would only have a copy of a stream with a state."""
        with preserved_randomness():
            has_state = StreamPass(self._stream_fn, self._context_name, self._seed, self._pass_number).has_state()
        if has_state:
            _LOG.info("stream %r has a state_dict: a thread reads it ahead instead of worker processes", self.name)
        return has_state

    def _watch(self, seconds: float) -> None:
        """Check the time limit while the loop waits for a batch.

        Raises:
            StreamError: the batch did not come within the limit.
        """
        timeout = self._reading.timeout
        if timeout is not None and seconds > timeout:
            advice = "with `workers: 0` and a `buffer`, the log shows where it hangs"
            if self._workers is None:
                _LOG.error("stream %r hangs; the stacks of its threads:\n%s", self.name, _stacks())
                advice = "the log shows where it hangs"
            raise StreamError(
                f"stream {self.name!r} yielded no batch for {timeout:g} seconds (`main_loop.stream_timeout`); {advice}"
            )


def check_left_out(stream: str, left_out: Mapping[str, str], rows: int) -> None:
    """Check how many bad examples of an epoch were left out; of new data, any number may be.

    Args:
        stream: the name of the stream.
        left_out: name -> reason of each example.
        rows: the number of examples of a pass.

    Raises:
        StreamError: they are more than 1 % of the examples of a pass.
    """
    if stream != NEW and rows and len(left_out) > _MOST_LEFT_OUT * rows:
        (name, why), *_ = left_out.items()
        raise StreamError(
            f"stream {stream!r}: {len(left_out)} of its {rows} examples cannot be read, but main_loop.on_bad_example "
            f"leaves out at most 1 % of a pass: {few(left_out)}; {name}: {why}"
        )


def _stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
