"""The context of a pass that a stream function receives: its number, random generators and row indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emrun.base.encoding import digest
from emrun.base.errors import StreamError
from emrun.base.randomness import Key, derived_seed, seed_everything
from emrun.base.sources import examples_of
from emrun.base.types import Batch, Reader
from emrun.ranks.group import Ranks
from emrun.ranks.shares import Share, own_share, share_of

if TYPE_CHECKING:
    import torch

COMPARED = 2
"""The number of first batches of a pass that all ranks compare."""
Rows = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, Any]


class WithLeftOut(NamedTuple):
    """A batch, and what its stream tells with it: the bad examples that were left out of it, and the rows so far."""

    batch: Any
    left_out: dict[str, str]
    """Name of an example -> why it cannot be read."""
    rows: int
    """The number of examples of the pass, on all ranks, as far as `batches` was told."""


class StreamContext:
    """One pass over a stream.

    All random numbers of the context are a pure function of (seed, stream, kind of the pass, number of the pass), and
    those of `rng` and `torch_generator` also of the rank. So the order of the data depends neither on read-ahead, nor
    on other code that draws random numbers, nor on the number of ranks.

    Args:
        stream_name: the name of the stream.
        seed: the seed of the run.
        epoch: the number of this pass: training passes count from 1, evaluation passes are 0.
        start: the number of batches to leave out; only `batches` can leave them out without making them.
        worker: the index of the worker process that reads the pass; `batches` leaves out the batches of other workers,
            and seeds the global generators of Python, NumPy and torch for each batch.
        workers: the number of worker processes; 0 if the pass is read in the process of the loop.
        ranks: the ranks of the run; `batches` yields only the rows of this one.
        in_order: whether `batches` gives all rows in their order, whatever it is asked for, as a prediction needs.
        read_by: who makes the batches, see `Reader`; with `workers`, it is a worker.
    """

    allocate: Callable[..., Array] = np.empty
    """Makes the arrays of `empty`; worker processes set another function."""

    def __init__(
        self,
        stream_name: str,
        *,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        worker: int = 0,
        workers: int = 0,
        ranks: Ranks | None = None,
        in_order: bool = False,
        read_by: Reader = "loop",
    ) -> None:
        self.stream_name = stream_name
        self.seed = seed
        self.epoch = epoch
        self.start = start
        self._worker = worker
        self.in_order = in_order
        """Whether `batches` gives all rows in their order, as for a prediction."""
        self.read_by: Reader = "worker" if workers else read_by
        """Who makes the batches: the thread of the loop, another thread, or a worker process."""
        self._stride = max(1, workers)
        self._is_in_worker = workers > 0
        self._key = (seed, stream_name, "train" if epoch else "eval", epoch)
        self.ranks = ranks or Ranks()
        self._share: tuple[bool, int] | None = None  # whether this rank has rows of the current set, and all its rows
        self._digest: str | None = None  # of the current set of rows
        self._compared = 0  # batches that are compared between ranks
        self._is_cut = False  # whether all that is left to do is to cut the rows of this rank out of whole batches
        self._rng: np.random.Generator | None = None
        self._torch_generator: torch.Generator | None = None
        self._place: tuple[Key, ...] = ("batch", 0)  # the key that the generators are seeded for
        self._orders = 0
        self.rows = 0
        """The number of examples of the pass, as far as `batches` was told; 0 if it is not known."""
        self._left_out: dict[str, str] = {}  # of the current batch
        self._has_news = False  # that go with the next batch
        self._handed_out: int | None = None
        self._yielded = start
        self._unfinished = False  # whether a call of `batches` has rows left
        self._is_counted = False

    @property
    def rng(self) -> np.random.Generator:
        """A NumPy generator for this pass; inside `batches`, the same object is reseeded for each batch."""
        self._rng = self._rng or np.random.Generator(np.random.PCG64(self.batch_seed))
        return self._rng

    @property
    def torch_generator(self) -> torch.Generator:
        """A torch generator for this pass; inside `batches`, the same object is reseeded for each batch."""
        if self._torch_generator is None:
            import torch

            self._torch_generator = torch.Generator().manual_seed(self.batch_seed % 2**63)
        return self._torch_generator

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """Return a new array, without values, for a batch; in a worker process, it lies in shared memory.

        The loop gets the array itself when it is yielded, not a copy. So the array can then no longer be written to.
        Views of the array, and an array that is yielded again, are copied.
        """
        return StreamContext.allocate(shape, dtype)

    def rng_for(self, index: int) -> np.random.Generator:
        """Return a NumPy generator for the example `index` of the data; it does not depend on the example's batch."""
        return np.random.Generator(np.random.PCG64(self.seed_for(index)))

    def seed_for(self, index: int) -> int:
        """Return the seed of the example `index` of the data, of 128 bits; it does not depend on the example's batch.

        The transforms of an example draw what they draw after `torch.manual_seed(ctx.seed_for(index) % 2**63)`.
        """
        return derived_seed(*self._key, "example", int(index))

    def batches(
        self,
        n: int,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> Iterator[Rows]:
        """Yield the row indices of each batch, int64 of shape (batch_size,); the last batch may be shorter.

        The caller must yield exactly one batch for each set of rows, including the last; `counted` checks this. A
        second call within the pass continues to count.

        Args:
            n: the number of examples.
            batch_size: the number of examples in a batch.
            shuffle: use an order that is a pure function of (seed, stream, pass), instead of 0 to n - 1.
            drop_last: leave out a last, shorter batch. A prediction has all rows, in the order 0 to n - 1.
            blocks: the number of examples in each part of the data, such as a row group or a shard, in the order of the
                parts. `shuffle` then shuffles the parts, and the examples within each part, so that one part is read
                after the other.

        Raises:
            StreamError: an argument is invalid, or the stream did not yield one batch for each previous set of rows.
        """
        if not all(isinstance(each, Integral) for each in (n, batch_size)) or n < 0 or batch_size < 1:
            raise StreamError(
                f"stream {self.stream_name!r}: ctx.batches(n={n!r}, batch_size={batch_size!r}) is invalid; "
                "n must be a whole number, 0 or more, and batch_size a whole number, 1 or more"
            )
        if blocks is not None and sum(blocks) != n:
            raise StreamError(
                f"stream {self.stream_name!r}: the blocks of ctx.batches must have {n} rows in total, not {sum(blocks)}"
            )
        self._orders += 1
        self.rows += n
        self._has_news = True
        if self.in_order:
            shuffle = drop_last = False
        if self.ranks.several:
            self._share = (False, 0)  # from now on, the batches are those of this rank
            self._is_cut = False
        if self._unfinished or (self._handed_out is None and self._yielded != self.start):
            raise self._miscounted()
        self._handed_out = self._handed_out or 0
        order = self._shuffled(n, blocks) if shuffle else np.arange(n, dtype=np.int64)
        stop = n - n % batch_size if drop_last else n
        count = -(-stop // batch_size)
        skipped = min(max(self.start - self._handed_out, 0), count)
        before = self._handed_out  # sets of rows of the pass in previous calls
        self._handed_out += skipped
        first = skipped + (self._worker + self.start - before - skipped) % self._stride
        for number in range(first, count, self._stride):
            if self._handed_out != self._yielded and self._is_counted:
                raise self._miscounted()
            self._leave_out(before + number - self._handed_out)
            self._handed_out += 1
            self._move("batch", self._handed_out)
            is_last = number + self._stride >= count
            self._unfinished = self._is_counted and not is_last
            if is_last:  # before the stream may stop iterating
                self._leave_out(before + count - self._handed_out)
            rows = order[number * batch_size : min((number + 1) * batch_size, stop)]
            yield rows if self.ranks.size == 1 else self._own(rows)
        self._leave_out(before + count - self._handed_out)
        self._move("after", self._orders)

    def leave_out(self, name: str, reason: str) -> None:
        """Tell that an example is left out of the next batch that the stream yields, for the record of the run.

        Args:
            name: the name of the example, such as its `id`.
            reason: why it cannot be read.
        """
        self._left_out[name] = reason
        self._has_news = True

    def _own(self, rows: Rows) -> Rows:
        """Return the rows of this rank; the first row if it has none, as it must take part in each batch."""
        begin, end = self.ranks.share(len(rows))
        self._share = begin < end, len(rows)
        if self._compared < COMPARED:
            self._digest = digest(rows)
        return rows[begin:end] if begin < end else rows[:1]

    def _leave_out(self, count: int) -> None:
        """Count sets of rows that belong to other workers."""
        self._handed_out = (self._handed_out or 0) + count
        self._yielded += count

    def _shuffled(self, n: int, blocks: Sequence[int] | None) -> Rows:
        rng = np.random.Generator(np.random.PCG64(derived_seed(*self._key, "order", self._orders)))
        if blocks is None:
            return rng.permutation(n)
        ends = np.cumsum(blocks)
        orders = (
            ends[block] - blocks[block] + rng.permutation(blocks[block]) for block in rng.permutation(len(blocks))
        )
        return np.concatenate([np.empty(0, np.int64), *orders])

    @property
    def skips(self) -> bool:
        """Whether the stream uses `batches`, which leaves out the first `start` batches itself."""
        return self._handed_out is not None

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch | WithLeftOut]:
        """Yield the batches of the stream that received this context, and check the contract of `batches`.

        The first batch after each call of `batches` comes with the number of rows.

        Raises:
            StreamError: the stream does not yield one batch for each set of rows, or has fewer than `start` batches.
        """
        self._is_counted = True
        ranks = self.ranks if self.ranks.several else None
        own: Any
        for batch in batches:
            self._yielded += 1
            if self._handed_out is not None and self._yielded > max(self._handed_out, self.start):
                raise self._miscounted()
            if ranks is None:
                own = batch
            elif self._is_cut:
                own = own_share(batch, ranks)
            else:
                own = self._shared(batch)
            if self._has_news:
                self._has_news = False
                left_out = self._left_out
                self._left_out = {}
                own = WithLeftOut(own, left_out, self.rows)
            yield own
            del batch, own  # not kept while the stream makes the next one
        if self._handed_out is not None and (self._unfinished or self._yielded != max(self._handed_out, self.start)):
            raise self._miscounted()
        if self._handed_out is not None and self._handed_out < self.start:
            raise beyond_end(self.stream_name, self._handed_out, self.start)

    def _shared(self, batch: Batch) -> Batch:
        """Return the part of a batch that belongs to this rank; with `batches`, the stream has made no other."""
        compares = self._compared < COMPARED
        self._compared += compares
        self._is_cut = self._share is None and self._compared == COMPARED
        if self._share is None or not isinstance(batch, Mapping) or isinstance(batch, Share):
            return own_share(batch, self.ranks, compares=compares)
        counts, total = self._share
        has_rows = counts and bool(batch) and examples_of(batch) != 0
        return share_of(batch, has_rows, total, self._digest if compares else None)

    def _move(self, *place: Key) -> None:
        """Reseed the generators that exist, in a worker also the global ones; others are seeded when created."""
        self._place = place
        if self._is_in_worker:
            seed_everything(*self._key, *self._of_rank(), *self._place, devices=False)
        if self._rng is not None:
            self._rng.bit_generator.state = np.random.PCG64(self.batch_seed).state
        if self._torch_generator is not None:
            self._torch_generator.manual_seed(self.batch_seed % 2**63)

    def _of_rank(self) -> tuple[Key, ...]:
        """Return what the seed of a rank has more than that of rank 0: nothing while all ranks make whole batches."""
        return ("rank", self.ranks.rank) if self.ranks.rank and self._share is not None else ()

    @property
    def batch_seed(self) -> int:
        """The seed of the pass, inside `batches` of the batch: that of the global generators in a worker process."""
        return derived_seed(*self._key, *self._of_rank(), *self._place)

    def _miscounted(self) -> StreamError:
        return StreamError(
            f"stream {self.stream_name!r} does not yield exactly one batch for each set of rows of ctx.batches; "
            "a stream that filters, packs or reorders rows must choose its rows with ctx.rng instead"
        )


class BeyondEnd(StreamError):
    """A pass has fewer batches than must be left out."""

    batches = 0


def beyond_end(stream_name: str, batches: int, position: int) -> BeyondEnd:
    """Return the error for a position beyond the end of a stream."""
    error = BeyondEnd(
        f"stream {stream_name!r} has {batches} batches; position {position} is beyond its end", first_batch=True
    )
    error.batches = batches
    return error
