"""What a stream function gets to know about the pass it is called for: its number, its randomness, its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emrun.errors import StreamError
from emrun.randomness import Key, derived_seed, seed_everything
from emrun.types import Batch

if TYPE_CHECKING:
    import torch

Rows = np.ndarray[Any, np.dtype[np.int64]]


class StreamContext:
    """One pass over a stream.

    Everything random in it is a pure function of (seed, stream, kind of the pass, number of the pass), so that the
    order of the data depends neither on read-ahead nor on what else draws random numbers.

    Args:
        stream_name: the name of the stream.
        seed: the seed of the run.
        epoch: the number of this pass: training passes count from 1, evaluation passes are 0.
        start: how many batches of the pass to leave out; only `batches` can do so without making them.
        worker: which of the worker processes reads the pass, counted from 0; `batches` leaves out those of the others,
            and seeds the global generators of Python, NumPy and torch for each batch.
        workers: how many worker processes there are; 0 when the pass is read in the process of the loop.
    """

    def __init__(
        self, stream_name: str, *, seed: int, epoch: int = 0, start: int = 0, worker: int = 0, workers: int = 0
    ) -> None:
        self.stream_name = stream_name
        self.seed = seed
        self.epoch = epoch
        self.start = start
        self._worker = worker
        self._stride = max(1, workers)
        self._is_in_worker = workers > 0
        self._key = (seed, stream_name, "train" if epoch else "eval", epoch)
        self._rng: np.random.Generator | None = None
        self._torch_generator: torch.Generator | None = None
        self._place: tuple[Key, ...] = ("batch", 0)  # what the generators are seeded for
        self._orders = 0
        self._handed_out: int | None = None
        self._yielded = start
        self._unfinished = False  # whether a call of `batches` has rows left
        self._is_counted = False

    @property
    def rng(self) -> np.random.Generator:
        """NumPy's generator of this pass, inside `batches` of the batch: one object, reseeded in place."""
        self._rng = self._rng or np.random.Generator(np.random.PCG64(self._place_seed()))
        return self._rng

    @property
    def torch_generator(self) -> torch.Generator:
        """Torch's generator of this pass, inside `batches` of the batch: one object, reseeded in place."""
        if self._torch_generator is None:
            import torch

            self._torch_generator = torch.Generator()
            self._torch_generator.manual_seed(self._place_seed() % 2**63)
        return self._torch_generator

    def rng_for(self, index: int) -> np.random.Generator:
        """Return a NumPy generator for the example `index` of the data, whichever batch it is in."""
        return np.random.Generator(np.random.PCG64(derived_seed(*self._key, "example", int(index))))

    def batches(
        self,
        n: int,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> Iterator[Rows]:
        """Yield the row indices of each batch, int64 of shape (batch_size,), the last one shorter.

        The caller yields exactly one batch for each set of rows, to the last, which `counted` checks. A second call
        within the pass goes on counting.

        Args:
            n: the number of examples.
            batch_size: how many of them make a batch.
            shuffle: in an order that is a pure function of (seed, stream, pass), instead of from 0 to n - 1.
            drop_last: leave a last, shorter batch out.
            blocks: how many examples lie together in each part of the data, such as a row group or a shard, in their
                order. Shuffled are then the parts and the examples of each, so that one part after the other is read.

        Raises:
            StreamError: the numbers make no sense, or the stream did not yield once for each set of rows before.
        """
        if n < 0 or batch_size < 1:
            raise StreamError(f"stream {self.stream_name!r}: ctx.batches(n={n}, batch_size={batch_size}) has no sense")
        if blocks is not None and sum(blocks) != n:
            raise StreamError(
                f"stream {self.stream_name!r}: the blocks of ctx.batches have {sum(blocks)} rows, not {n}"
            )
        self._orders += 1
        if self._unfinished or (self._handed_out is None and self._yielded != self.start):
            raise self._miscounted()
        self._handed_out = self._handed_out or 0
        order = self._shuffled(n, blocks) if shuffle else np.arange(n, dtype=np.int64)
        stop = n - n % batch_size if drop_last else n
        count = -(-stop // batch_size)
        skipped = min(max(self.start - self._handed_out, 0), count)
        before = self._handed_out  # sets of rows of the pass, in calls before this one
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
            if is_last:  # before the stream may leave the call
                self._leave_out(before + count - self._handed_out)
            yield order[number * batch_size : min((number + 1) * batch_size, stop)]
        self._leave_out(before + count - self._handed_out)
        self._move("after", self._orders)

    def _leave_out(self, count: int) -> None:
        """Count sets of rows that other workers read."""
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
        """Whether the pass was begun by `batches`, which leaves out the first `start` batches by itself."""
        return self._handed_out is not None

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of the stream that got this context, and check that it keeps the contract of `batches`.

        Raises:
            StreamError: it does not yield a batch for each set of rows, or has fewer than were to be left out.
        """
        self._is_counted = True
        for batch in batches:
            self._yielded += 1
            if self._handed_out is not None and self._yielded > max(self._handed_out, self.start):
                raise self._miscounted()
            yield batch
        if self._handed_out is not None and (self._unfinished or self._yielded != max(self._handed_out, self.start)):
            raise self._miscounted()
        if self._handed_out is not None and self._handed_out < self.start:
            raise beyond_end(self.stream_name, self._handed_out, self.start)

    def _move(self, *place: Key) -> None:
        """Reseed the generators that were asked for, in a worker the global ones; the others are when they are."""
        self._place = place
        if self._is_in_worker:
            seed_everything(*self._key, *self._place, devices=False)
        if self._rng is not None:
            self._rng.bit_generator.state = np.random.PCG64(self._place_seed()).state
        if self._torch_generator is not None:
            self._torch_generator.manual_seed(self._place_seed() % 2**63)

    def _place_seed(self) -> int:
        return derived_seed(*self._key, *self._place)

    def _miscounted(self) -> StreamError:
        return StreamError(
            f"stream {self.stream_name!r} does not yield exactly one batch for each set of rows of ctx.batches; "
            "a stream that filters, packs or reorders draws its own rows with ctx.rng instead"
        )


class BeyondEnd(StreamError):
    """A pass that has fewer batches than are to be left out."""


def beyond_end(stream_name: str, batches: int, position: int) -> BeyondEnd:
    """Return the error for it."""
    return BeyondEnd(
        f"stream {stream_name!r} has {batches} batches; position {position} is beyond its end", first_batch=True
    )
