"""The share of a rank in a batch: some of its rows, or none."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from operator import itemgetter
from typing import Any

from emrun.base.encoding import digest
from emrun.base.sources import examples_of
from emrun.base.types import Batch
from emrun.ranks.group import Ranks


class Share(dict[str, Any]):
    """The sources of a batch with the rows of one rank only."""

    counts: bool = True
    """Whether the rows count; false if the rank has none, and the sources have a row of another rank."""
    total: int = 0
    """The number of rows that all ranks were to read; a stream may leave out some of them, or make more."""
    whole: str | None = None
    """A checksum of the whole batch, which all ranks must have; None if it is not compared."""


def share_of(sources: Any, counts: bool, total: int, whole: str | None = None) -> Share:
    """Return a share with these sources and attributes."""
    share = Share(sources)
    share.counts = counts
    share.total = total
    if whole is not None:
        share.whole = whole
    return share


def own_share(batch: Batch, ranks: Ranks, *, compares: bool = False) -> Batch:
    """Return the rows of a rank of a whole batch; the first row, which counts nothing, if the rank has none.

    Args:
        batch: the whole batch.
        ranks: the ranks.
        compares: whether the share has a checksum of the whole batch.
    """
    try:
        total = examples_of(batch)
    except (AttributeError, StopIteration):  # not a mapping, or an empty one: the loop reports it
        return batch
    if total <= 0 or batch.__class__ is Share:  # a stream that the stream is made of has shared it
        return batch
    begin, end, has_rows, cut = _cut(total, ranks.rank, ranks.size, ranks.least)
    try:
        share = Share(zip(batch, map(cut, batch.values()), strict=True))
    except (TypeError, KeyError, RuntimeError):  # not all sources are arrays or lists
        from emrun.ranks.parts import rows_of

        share = Share({name: rows_of(values, begin, end) for name, values in batch.items()})
    share.counts = has_rows
    share.total = total
    if compares:
        share.whole = digest(batch)
    return share


@lru_cache
def _cut(total: int, rank: int, size: int, least: int) -> tuple[int, int, bool, itemgetter[slice]]:
    """Return the rows of a rank or the first row, whether they are rows of the rank, and what cuts them out."""
    begin, end = Ranks(rank, size, least=least).share(total)
    has_rows = begin < end
    rows = slice(begin, end) if has_rows else slice(0, 1)
    return rows.start, rows.stop, has_rows, itemgetter(rows)


def rows_in(batch: Batch) -> int:
    """Return how many examples of a batch count: its number of examples, or of those of the rank."""
    return examples_of(batch) if batch and (batch.__class__ is not Share or batch.counts) else 0


def total_in(batch: Batch) -> int:
    """Return the number of examples of a batch on all ranks."""
    return batch.total if isinstance(batch, Share) else examples_of(batch)


def like(batch: Batch) -> dict[str, Any]:
    """Return a copy of a batch, or of a share of a batch."""
    return copy(batch) if isinstance(batch, Share) else dict(batch)
