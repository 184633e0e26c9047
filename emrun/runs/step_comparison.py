"""Finds the first iteration in which the step records of two runs differ."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any

from emrun.record.steps import Chunk

_Row = tuple[int, int, int, dict[str, Any]]  # iteration, side, distance to the previous one, the values


def compare_steps(a: Iterable[Chunk], b: Iterable[Chunk]) -> dict[str, Any]:
    """Compare the values of all iterations that both runs have recorded, exactly; memory is constant.

    Returns:
        `equal`: whether the records are the same. `compared`: the number of equal iterations before the first
        difference. `last_equal`: the last of them, or None. `first`: None, or the first difference, with `iteration`,
        `every` (the distance of recorded iterations there) and `values`, name -> the values of a and b. `last`: the
        last recorded iterations of a and b, None where there are none. `alone`: the numbers of iterations between the
        others that only a and only b have recorded.
    """
    last: list[int | None] = [None, None]
    sides = [_noted(chunks, side, last) for side, chunks in enumerate((a, b))]
    compared, last_equal, first = 0, None, None
    for one, other in zip_longest(*sides):
        if one is None or one != other:
            break
        compared, last_equal = compared + len(one), last[0]
    else:
        one = other = None
    rows = [_rows(side, chain(filter(None, [begun]), sides[side])) for side, begun in enumerate((one, other))]
    alone, ahead = [0, 0], [0, 0]  # how many iterations only one side has, and behind the last of the other
    for iteration, found in groupby(merge(*rows, key=itemgetter(0)), itemgetter(0)):
        there = {side: (every, values) for _, side, every, values in found}
        for side in there:
            alone[1 - side], ahead[1 - side] = alone[1 - side] + ahead[1 - side], 0
        if len(there) == 1:
            ahead[side] += 1
            continue
        (every, mine), (_, theirs) = there[0], there[1]
        differing = [name for name in {**mine, **theirs} if not _same(mine.get(name), theirs.get(name))]
        if differing:
            values = {name: [mine.get(name), theirs.get(name)] for name in differing}
            first = {"iteration": iteration, "every": every, "values": values}
            break
        compared, last_equal = compared + 1, iteration
    deque(chain(*sides), maxlen=0)  # what follows is read for its last iteration
    is_equal = first is None and last[0] == last[1] and not any(alone)
    found_in_all = {"equal": is_equal, "compared": compared, "last_equal": last_equal, "first": first}
    return {**found_in_all, "last": last, "alone": alone}


def _noted(chunks: Iterable[Chunk], side: int, last: list[int | None]) -> Iterator[Chunk]:
    """Yield the chunks that have iterations, after noting the last one."""
    for chunk in chunks:
        if len(chunk):
            last[side] = chunk.first + chunk.every * (len(chunk) - 1)
            yield chunk


def _rows(side: int, chunks: Iterable[Chunk]) -> Iterator[_Row]:
    for chunk in chunks:
        for index in range(len(chunk)):
            values = {name: column[index] for name, column in chunk.columns.items()}
            yield chunk.first + chunk.every * index, side, chunk.every, values


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
