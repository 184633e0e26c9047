"""One pass over a stream, told so that it can be read anywhere: by the loop, in a thread, in worker processes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from emrun.dataset import takes_context
from emrun.errors import StreamError
from emrun.fields import ANOTHER_CHECKPOINT, reading
from emrun.randomness import seed_everything
from emrun.state import digest, encode
from emrun.stream_context import StreamContext, beyond_end
from emrun.types import Batch

_END = object()
_TRUSTED = 8  # so often an array that is given away again is looked at; then it is a constant
_REMEMBERED = 4  # arrays of a source; their memory is kept as long


class WithState(NamedTuple):
    """A batch of a stream that is an object with `state_dict`, and its state before that batch."""

    batch: Batch
    before: Any


@dataclass(frozen=True, slots=True)
class StreamPass:
    """One pass over a stream.

    Args:
        function: returns an iterable of batches; takes nothing, or the `StreamContext`.
        name: the name of the stream.
        seed: the seed of the run.
        number: training passes count from 1, evaluation passes are 0.
        start: how many batches to leave out.
        state: the state of a stream that has one, which brings it there.
    """

    function: Callable[..., Iterable[Batch]]
    name: str
    seed: int
    number: int
    start: int = 0
    state: Any = None

    def read(self, worker: int = 0, workers: int = 0) -> Iterator[Batch | WithState]:
        """Begin the pass; return the batches behind `start`, which streams without `ctx.batches` are read up to.

        Args:
            worker: which of the worker processes this is; of streams without `ctx.batches`, the first reads all.
            workers: how many worker processes there are, 0 for none; in them, global random generators are seeded.

        Raises:
            StreamError: the function returns no iterable, or the stream ends before `start`.
        """
        has_context = takes_context(self.function)
        if workers:
            seed_everything(self.seed, self.name, "worker", self.number, devices=False)
        if worker and not has_context:
            return iter(())
        context = StreamContext(
            self.name, seed=self.seed, epoch=self.number, start=self.start, worker=worker, workers=workers
        )
        stream = self.function(context) if has_context else self.function()
        if not isinstance(stream, Iterable):
            raise StreamError(
                f"stream {self.name!r}: its function returned {type(stream).__name__}; "
                "it must return an iterable of batches (is a `yield` missing?)",
                first_batch=True,
            )
        batches: Iterator[Any]
        if is_stateful(stream):
            if self.state is not None:
                with reading(f"the state of stream {self.name!r}", ANOTHER_CHECKPOINT):
                    stream.load_state_dict(copy.deepcopy(self.state))  # type: ignore[attr-defined]
            encode(stream.state_dict(), f"stream {self.name!r}")  # type: ignore[attr-defined]  # may not be possible
            batches = _with_states(stream)
            return batches if self.state is not None or not self.start else self._behind_start(batches)
        batches = context.counted(stream) if has_context else iter(stream)
        if not self.start and not worker:
            return batches
        first: Any = next(batches, _END)
        if context.skips:
            return itertools.chain((first,), batches) if first is not _END else iter(())
        if worker:
            return iter(())
        return self._behind_start(itertools.chain((first,), batches) if first is not _END else batches)

    def has_state(self) -> bool:
        """Tell whether the stream is an object with `state_dict` and `load_state_dict`, by beginning the pass."""
        context = StreamContext(self.name, seed=self.seed, epoch=self.number)
        return is_stateful(self.function(context) if takes_context(self.function) else self.function())

    def _behind_start(self, batches: Iterator[Any]) -> Iterator[Any]:
        done = sum(1 for _ in itertools.islice(batches, self.start))
        if done < self.start:
            raise beyond_end(self.name, done, self.start)
        return batches


def is_stateful(stream: Any) -> bool:
    """Tell whether a stream is an object with `state_dict` and `load_state_dict`."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _with_states(stream: Any) -> Iterator[WithState]:
    """Yield each batch with the state of the stream before it, however far ahead it is read."""
    before = copy.deepcopy(stream.state_dict())
    for batch in stream:
        yield WithState(batch, before)
        before = copy.deepcopy(stream.state_dict())


def _closing(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; unlike a loop over them, this ends their generator when it is ended itself."""
    yield from batches


def _place(values: Any) -> Any:
    """Return where an array or tensor lies in memory, and its shape; None for anything else."""
    if isinstance(values, np.ndarray):
        return values.__array_interface__["data"][0], values.shape
    if hasattr(values, "data_ptr"):
        with contextlib.suppress(RuntimeError):  # a tensor without memory of its own
            return values.data_ptr(), values.shape
    return None


def checked_for_reuse(batches: Iterator[Any], name: str, ahead: int) -> Iterator[Any]:
    """Yield batches that are read ahead, and check that the stream leaves alone what it gave away.

    Only arrays and tensors are looked at whose memory it gives away again while a batch with it may wait to be used,
    from the second time on.

    Args:
        batches: what a `StreamPass` reads.
        name: the name of the stream.
        ahead: how many batches before the one that is made may be in use.

    Raises:
        StreamError: it changed one of them.
    """
    most = min(ahead, _REMEMBERED)
    given: dict[str, dict[Any, tuple[Any, list[str]]]] = {}  # source -> the last places -> what is there, its digests
    for item in _closing(batches):
        batch = item.batch if item.__class__ is WithState else item
        if not hasattr(batch, "items"):  # which the loop complains about
            yield item
            continue
        for source, values in batch.items():
            place = _place(values)
            if place is None:
                continue
            places = given.get(source)
            if places is None:
                places = given[source] = {}
            known = places.pop(place, None)
            if known is None:
                if len(places) == most:
                    del places[next(iter(places))]  # the one that was not given for the longest time
                places[place] = values, []  # with them, so that their memory is not used again
                continue
            places[place] = known
            digests = known[1]
            if len(digests) < _TRUSTED:
                digests.append(digest({source: values}))
                if digests[-1] != digests[0]:
                    raise StreamError(
                        f"stream {name!r} changes the {source!r} of a batch that it gave away, and which waits to be "
                        "used, as it is read ahead; make a new array for each batch, or copy it"
                    )
        yield item
