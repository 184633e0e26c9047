"""Finds the first iteration in which the step records of two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from emrun.record.steps import Chunk

_Row = tuple[int, int, Mapping[str, float | None]]  # iteration, distance to the previous one, the values


def compare_steps(a: Iterable[Chunk], b: Iterable[Chunk]) -> dict[str, Any]:
    """Compare the values of all iterations that both runs have recorded, exactly; memory is constant.

    Returns:
        `equal`: whether the records are the same. `compared`: the number of equal iterations before the first
        difference. `last_equal`: the last of them, or None. `first`: None, or the first difference, with `iteration`,
        `every` (the distance of recorded iterations there) and `values`, name -> the values of a and b. `last`: the
        last recorded iterations of a and b, None where there are none. `alone`: the numbers of iterations between the
        others that only a and only b have recorded.
    """
    ours, theirs = _Rows(a), _Rows(b)
    compared, last_equal, first = 0, None, None
    while True:
        for chunk in ours.whole_chunks_like(theirs):
            compared, last_equal = compared + len(chunk), chunk.first + chunk.every * (len(chunk) - 1)
        one, other = ours.row, theirs.row
        if one is None or other is None:
            break
        if one[0] != other[0]:  # only one of them has recorded it
            behind = ours if one[0] < other[0] else theirs
            behind.passed += 1
            behind.advance()
            continue
        values = {
            name: [one[2].get(name), other[2].get(name)]
            for name in {**one[2], **other[2]}
            if not _same(one[2].get(name), other[2].get(name))
        }
        if values:
            first = {"iteration": one[0], "every": one[1], "values": values}
            break
        compared, last_equal = compared + 1, one[0]
        ours.advance()
        theirs.advance()
    last = [rows.last() for rows in (ours, theirs)]
    passed = [ours.passed, theirs.passed]
    is_equal = first is None and last[0] == last[1] and not any(passed)
    found = {"equal": is_equal, "compared": compared, "last_equal": last_equal, "first": first}
    return {**found, "last": last, "alone": passed}


class _Rows:
    """The iterations of a step record, one after another.

    Args:
        chunks: the chunks of the record.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks: Iterator[Chunk] = iter(chunks)
        self._chunk: Chunk | None = next(self._chunks, None)
        self._index = 0
        self._last: int | None = None
        self.passed = 0
        """The number of iterations that the other record does not have."""

    @property
    def row(self) -> _Row | None:
        """The current iteration; None at the end."""
        chunk = self._chunk
        if chunk is None:
            return None
        values = {name: column[self._index] for name, column in chunk.columns.items()}
        return chunk.first + chunk.every * self._index, chunk.every, values

    def advance(self) -> None:
        """Go to the next iteration."""
        assert self._chunk is not None
        self._index += 1
        if self._index >= len(self._chunk):
            self._next_chunk()

    def whole_chunks_like(self, other: _Rows) -> Iterator[Chunk]:
        """Yield and pass the chunks that both have next, as long as they are the same."""
        while not (self._index or other._index) and (chunk := self._chunk) is not None and chunk == other._chunk:
            self._next_chunk()
            other._next_chunk()
            yield chunk

    def last(self) -> int | None:
        """Return the last iteration of the record; the rest is passed."""
        while self._chunk is not None:
            self._next_chunk()
        return self._last

    def _next_chunk(self) -> None:
        chunk = self._chunk
        if chunk is not None and len(chunk):
            self._last = chunk.first + chunk.every * (len(chunk) - 1)
        self._chunk, self._index = next((each for each in self._chunks if len(each)), None), 0


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
