"""One pass over a stream, in a form that the loop, a thread or worker processes can read."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from emrun.base.encoding import decode, encode
from emrun.base.errors import StreamError
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.base.randomness import seed_everything
from emrun.base.types import Batch, Reader
from emrun.dataset import asks_model, takes_context
from emrun.ranks.group import Ranks
from emrun.ranks.shares import own_share
from emrun.stream_context import COMPARED, StreamContext, WithLeftOut, beyond_end


class WithState(NamedTuple):
    """A batch of a stream with `state_dict`, and the state of the stream before this batch.

    If the stream asks the model, the method that returns the state after this batch takes its place.
    """

    batch: Batch
    before: Any


@dataclass(frozen=True, slots=True)
class StreamPass:
    """One pass over a stream.

    Args:
        function: returns an iterable of batches; takes no argument, or the `StreamContext`.
        name: the name of the stream.
        seed: the seed of the run.
        number: training passes count from 1, evaluation passes are 0.
        start: the number of batches to leave out.
        state: the state after these batches, for a stream with `state_dict`.
        ranks: the ranks of the run; the batches are the shares of this one.
        in_order: see `StreamContext`.
        read_by: who reads the pass, if it is not read in worker processes.
    """

    function: Callable[..., Iterable[Batch]]
    name: str
    seed: int
    number: int
    start: int = 0
    state: Any = None
    ranks: Ranks = field(default_factory=Ranks)
    in_order: bool = False
    read_by: Reader = "loop"

    def read(self, worker: int = 0, workers: int = 0) -> Iterator[Batch | WithState | WithLeftOut]:
        """Begin the pass and return the batches after `start`; without `ctx.batches`, the stream is read up to `start`.

        Args:
            worker: the index of this worker process; the first one reads all of a stream without `ctx.batches`.
            workers: the number of worker processes, 0 for none; in a worker, the global random generators are seeded.

        Raises:
            StreamError: the function does not return an iterable, or the stream ends before `start`.
        """
        # the stream
        has_context = takes_context(self.function)
        if workers:
            seed_everything(self.seed, self.name, "worker", self.number, devices=False)
        if worker and not has_context:
            return iter(())
        context = StreamContext(
            self.name,
            seed=self.seed,
            epoch=self.number,
            start=self.start,
            worker=worker,
            workers=workers,
            ranks=self.ranks,
            in_order=self.in_order,
            read_by=self.read_by,
        )
        try:
            stream = self.function(context) if has_context else self.function()
        except StopIteration as error:
            raise named(error, self.name) from error
        if not isinstance(stream, Iterable):
            raise StreamError(
                f"stream {self.name!r}: its function returned {type(stream).__name__}; "
                "it must return an iterable of batches (is a `yield` missing?)",
                first_batch=True,
            )

        # a stream with a state of its own
        batches: Iterator[Any]
        if is_stateful(stream):
            if self.state is not None:
                load = stream.load_state_dict  # type: ignore[attr-defined]
                with reading(f"the state of stream {self.name!r}", ANOTHER_CHECKPOINT, load):
                    load(decode(copy.deepcopy(self.state)))
            encode(stream.state_dict(), f"stream {self.name!r}")  # type: ignore[attr-defined]  # may raise
            batches = _with_states(stream, self.ranks, asks=self.asks)
            return batches if self.state is not None or not self.start else self._behind_start(batches)
        if self.asks:
            raise StreamError(
                f"stream {self.name!r} of a dataset that takes the model cannot be read again after updates; return an "
                "object with state_dict and load_state_dict, so that a resume is exact",
                first_batch=True,
            )

        # any other stream, from its beginning or from `start`
        batches = context.counted(stream) if has_context or self.ranks.several else iter(stream)
        if not self.start and not worker:
            return batches
        batches = itertools.chain(list(itertools.islice(batches, 1)), batches)  # this begins the stream
        if context.skips:
            return batches
        return iter(()) if worker else self._behind_start(batches)

    @property
    def asks(self) -> bool:
        """Whether this is a training pass over a stream of a dataset that takes the model."""
        return self.number > 0 and asks_model(getattr(self.function, "__self__", None))

    def has_state(self) -> bool:
        """Begin the pass and return whether the stream has `state_dict` and `load_state_dict`."""
        context = StreamContext(self.name, seed=self.seed, epoch=self.number)
        return is_stateful(self.function(context) if takes_context(self.function) else self.function())

    def _behind_start(self, batches: Iterator[Any]) -> Iterator[Any]:
        done = sum(1 for _ in itertools.islice(batches, self.start))
        if done < self.start:
            raise beyond_end(self.name, done, self.start)
        return batches


def named(error: BaseException, name: str) -> BaseException:
    """Return an error that explains one that a stream raised by mistake; other errors are returned as they are.

    Python turns a `StopIteration` in a generator into a RuntimeError; from another `__next__`, it is the regular end. A
    worker process cannot start processes.

    Args:
        error: the error of the stream.
        name: the name of the stream.
    """
    if isinstance(error, AssertionError) and "daemonic processes" in str(error):
        return StreamError(
            f"stream {name!r} starts processes, such as those of a DataLoader with num_workers, which a worker process "
            "cannot: write main_loop.workers=0, or start none in the stream",
            first_batch=True,
        )
    stop = error if isinstance(error, StopIteration) else error.__cause__
    if not isinstance(stop, StopIteration) or not isinstance(error, StopIteration | RuntimeError):
        return error
    frames = traceback.extract_tb(stop.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return StreamError(
        f"stream {name!r} raised StopIteration{where}, probably from a call of `next` on an iterator that has ended; "
        "give `next` a default, or use `return` to end the stream"
    )


def closable(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the batches; unlike a `for` loop, this closes their generator when it is closed itself."""
    yield from batches


def is_stateful(stream: Any) -> bool:
    """Return whether a stream has `state_dict` and `load_state_dict`."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _with_states(stream: Any, ranks: Ranks, *, asks: bool) -> Iterator[WithState]:
    """Yield each batch, or the share of this rank, with the state of the stream before it, despite read-ahead."""
    before = stream.state_dict if asks else copy.deepcopy(stream.state_dict())
    for number, batch in enumerate(stream):
        yield WithState(own_share(batch, ranks, compares=number < COMPARED) if ranks.several else batch, before)
        before = before if asks else copy.deepcopy(stream.state_dict())
