"""The share of a rank in a batch: some of its rows, or none."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from emrun.base.encoding import digest
from emrun.base.sources import examples_of
from emrun.ranks.group import Ranks

_ARRAY = frozenset((np.ndarray,))


class Share(dict[str, Any]):
    """The sources of a batch with the rows of one rank only.

    Args:
        sources: source name -> values.
        counts: whether the rows count; false if the rank has none, and the sources have a row of another rank.
        total: the number of rows that all ranks were to read; a stream may leave out some of them, or make more.
        whole: a checksum of the whole batch, which all ranks must have; None if it is not compared.
    """

    def __init__(self, sources: Mapping[str, Any], counts: bool, total: int, whole: str | None = None) -> None:
        super().__init__(sources)
        self.counts = counts
        self.total = total
        self.whole = whole

    def __reduce__(self) -> tuple[Any, ...]:
        return Share, (dict(self), self.counts, self.total, self.whole)


def own_share(batch: Mapping[str, Any], ranks: Ranks, *, compares: bool = False) -> Mapping[str, Any]:
    """Return the rows of a rank of a whole batch; the first row, which counts nothing, if the rank has none.

    Args:
        batch: the whole batch.
        ranks: the ranks.
        compares: whether the share has a checksum of the whole batch.
    """
    total = examples_of(batch) if batch else 0
    if total <= 0 or isinstance(batch, Share):  # the loop reports it; a stream that the stream is made of has shared it
        return batch
    begin, end = ranks.share(total)
    own = slice(begin, end) if begin < end else slice(1)
    if _ARRAY.issuperset(map(type, batch.values())):  # the usual case
        sources = dict(zip(batch, map(itemgetter(own), batch.values()), strict=True))
    else:
        from emrun.ranks.parts import rows_of

        sources = {name: rows_of(values, own.start or 0, own.stop) for name, values in batch.items()}
    return Share(sources, begin < end, total, digest(batch) if compares else None)


def rows_in(batch: Mapping[str, Any]) -> int:
    """Return how many examples of a batch count: its number of examples, or of those of the rank."""
    return examples_of(batch) if batch and (batch.__class__ is not Share or batch.counts) else 0


def total_in(batch: Mapping[str, Any]) -> int:
    """Return the number of examples of a batch on all ranks."""
    return batch.total if isinstance(batch, Share) else examples_of(batch)


def like(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch, or of a share of a batch."""
    return Share(batch, batch.counts, batch.total, batch.whole) if isinstance(batch, Share) else dict(batch)
