"""Which rows of a batch a rank has; no rank is left without a row while others have some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from emrun.base.errors import DifferentRanks, StreamError
from emrun.base.sources import changed, examples_of
from emrun.base.types import Batch
from emrun.loop.progress import Progress
from emrun.loop.ranks.requests import SharedRequests
from emrun.ranks.group import Ranks
from emrun.ranks.parts import rows_of
from emrun.ranks.shares import Share, rows_in, share_of
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class RankBatches:
    """Gives this rank its share of each batch.

    Args:
        ranks: the ranks.
        progress: has the length of the current batch.
        requests: counts the batches.
        leaves_out: whether batches may be left out.
    """

    ranks: Ranks
    progress: Progress
    requests: SharedRequests
    leaves_out: bool
    _batch: Mapping[str, Any] = field(default_factory=dict, init=False)  # the current one
    _is_logged: bool = field(default=False, init=False)
    _spare: dict[tuple[str, bool], Batch] = field(default_factory=dict, init=False)  # see `filled`

    @property
    def rows(self) -> int:
        """The number of rows of this rank in the current batch."""
        length = self.progress.batch_length
        return length * self._batch.counts if isinstance(self._batch, Share) else length

    @property
    def total(self) -> int:
        """The number of rows of all ranks in the current batch."""
        return self._batch.total if isinstance(self._batch, Share) else self.progress.batch_length

    def begin_stream(self, stream: StreamWrapper) -> StreamShares:
        """Return what gives this rank its share of each batch of a stream in an epoch."""
        return StreamShares(self, stream)

    def shared(self, shares: StreamShares, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the share of this rank in each batch of a stream. Each line costs time per batch."""
        requests = self.requests
        is_usual = False
        left = 0  # until the loop looks for requests of other ranks
        for batch in batches:
            if not left:
                left = requests.every
            left -= 1
            if not left:
                requests.look_again()

            # the usual batch: the stream has made the share
            if is_usual and batch.__class__ is Share and batch.counts and batch.whole is None:
                self._batch = batch
                yield batch
                continue

            # the first batch, and one that is not like the others
            if batch.__class__ is Share and batch.whole is not None:
                self._compare(batch.whole, shares.stream.name)
            share = self.fill(shares, batch, is_changed=False)
            is_usual = not self.leaves_out and (shares.stream.name, False) in self._spare
            yield share

    def fill(self, shares: StreamShares, batch: Any, *, is_changed: bool) -> Any:
        """Return the share of this rank in a batch, which becomes the current one.

        Args:
            shares: notes a batch of which this rank has no rows.
            batch: the batch, which has not been checked.
            is_changed: whether hooks may have changed the batch.
        """
        batch = self.filled(shares.stream.name, batch, is_changed=is_changed)
        if batch.__class__ is Share and not batch.counts:
            shares.note_empty()
        self._batch = batch
        return batch

    def filled(self, stream_name: str, batch: Any, *, is_changed: bool = False) -> Any:
        """Return a batch, with a row that counts nothing if the stream or hooks have left no row of this rank.

        The row is one of the first batch of the stream, which the ranks exchange. If batches may be left out, they also
        exchange the length of each batch. A batch that is empty on all ranks, as far as this is known, stays empty.

        Args:
            stream_name: the name of the stream.
            batch: the batch, which has not been checked.
            is_changed: whether hooks may have changed the batch.
        """
        rows = rows_in(batch) if isinstance(batch, Mapping) else -1
        if rows < 0:
            return batch  # the checks report it

        # how many rows all ranks have
        total = rows
        whole = None
        if isinstance(batch, Share):
            total = batch.total
            whole = batch.whole
        if self.leaves_out:
            of_all = torch.tensor(rows)
            self.ranks.add_up(of_all)
            total = int(of_all)

        # a row of the first batch of the stream
        key = stream_name, is_changed
        if key not in self._spare:
            first_row = {source: rows_of(values, 0, 1) for source, values in batch.items()} if rows else None
            first_rows = [
                each for each in self.ranks.all_gathered("spare row", in_main_memory(first_row)) if each is not None
            ]
            if first_rows:
                self._spare[key] = first_rows[0]
        if key not in self._spare or (self.leaves_out and not total):
            return {source: rows_of(values, 0, 0) for source, values in batch.items()}  # it may have a row of another

        # the batch of this rank
        if not rows and not (isinstance(batch, Share) and not batch.counts and examples_of(batch) > 0):
            return share_of(self._spare[key], False, total, whole)
        return batch.of(total) if isinstance(batch, Share) else batch

    def _compare(self, whole: str, stream_name: str) -> None:
        """Check that all ranks read the same batch."""
        checksums = self.ranks.all_gathered("checksum of the batch", whole)
        different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        if different:
            raise DifferentRanks(
                f"rank {different[0]} reads another batch of stream {stream_name!r} than rank 0: the stream depends on "
                "random numbers that are not those of `ctx`, on the time, or on files that differ; take the order of "
                "the rows from `ctx.batches`"
            )

    def log_shares(self) -> None:
        """Log once how the first batch is shared."""
        if self._is_logged:
            return
        self._is_logged = True
        size = self.ranks.size
        least, rest = divmod(self.total, size)
        rows = f"{least} to {least + 1}" if rest else str(least)
        _LOG.info("batch %d = %d ranks x %s", self.total, size, rows)


class StreamShares:
    """The shares of this rank in the batches of a stream, in an epoch.

    Args:
        of_all: the shares in the batches of all streams.
        stream: the stream.
    """

    def __init__(self, of_all: RankBatches, stream: StreamWrapper) -> None:
        self.stream = stream
        self._of_all = of_all
        self._empty: set[int] = set()  # the batches without rows of this rank

    def shared(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the share of this rank in each batch."""
        return self._of_all.shared(self, batches)

    def accepting(self, accept: Callable[[Batch], Batch | None]) -> Callable[[Batch], Batch | None]:
        """Return what checks the share of this rank in a batch that hooks have changed."""
        return lambda batch: accept(self._of_all.fill(self, batch, is_changed=True))

    def note_empty(self) -> None:
        """Note that this rank has no rows of the batch that was read last."""
        self._empty.add(self.stream.batches_of_epoch - 1)

    def check_empty(self) -> None:
        """Check that no batch was empty on all ranks.

        Raises:
            StreamError: a batch was.
        """
        empty_everywhere = set.intersection(*self._of_all.ranks.all_gathered("empty batches", self._empty))
        if empty_everywhere:
            place = f"stream {self.stream.name!r}, batch {min(empty_everywhere)} of the epoch"
            raise StreamError(f"{place}: it is empty on all ranks (see main_loop.on_empty_batch)")


def in_main_memory(value: Any) -> Any:
    """Return values with all tensors in main memory."""
    return changed(value, lambda part: part.detach().cpu() if hasattr(part, "detach") else part)
