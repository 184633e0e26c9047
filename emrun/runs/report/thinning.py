"""Curves with few enough points to be drawn, in which no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

_FIRST, _SECOND = itemgetter(0), itemgetter(1)
_MOST_OF_STRETCH = 8  # points, of which two or three are kept when there are more

Point = tuple[float, float | None]
"""A place on the x axis and a value; None interrupts the curve."""


@dataclass(slots=True)
class Curve:
    """Values at growing places of the x axis; of each stretch the lowest, the highest and the first gap are kept.

    The stretches have the same width, a power of two, which doubles whenever there are more than `most` of them. So
    the memory is limited, and each peak is kept exactly.

    Args:
        most: how many stretches are kept.
    """

    most: int = 1_000
    count: int = 0
    """How many values there are."""
    not_finite: int = 0
    """How many of them are not finite."""
    last: tuple[float, float] | None = None
    """The last value and its place."""
    _width: int = 1
    _stretches: dict[int, list[Point]] = field(default_factory=dict)

    def add(self, x: float, value: float) -> None:
        """Add a value; `x` is not smaller than before."""
        self.count += 1
        self.last = x, value
        is_finite = math.isfinite(value)
        self.not_finite += not is_finite
        self._put(x, [(x, value if is_finite else None)])

    @property
    def first_not_finite(self) -> float | None:
        """The first place with a value that is not finite; None if there is none."""
        return min((x for each in self._stretches.values() for x, value in each if value is None), default=None)

    def add_all(self, first: int, every: int, values: Sequence[float | str | None]) -> None:
        """Add values at `first`, `first + every`, ...; None stands for no value.

        Values may be texts, of which only those are read that are kept: reading is what takes the time.

        Raises:
            ValueError: a text that is read is not a number.
        """
        begin = 0
        while begin < len(values):
            x = first + every * begin
            next_ = (x // self._width + 1) * self._width
            end = min(len(values), begin + max(1, -(-(next_ - x) // every)))
            part = values[begin:end]
            if not self._add_finite(x, every, part):
                for index, value in enumerate(part):
                    if value is not None:
                        self.add(x + every * index, float(value))
            begin = end

    def lowest(self) -> tuple[float, float] | None:
        """Return the first place with the lowest value, and the value; None if no value is finite."""
        return min(_finite(chain(*self._stretches.values())), key=_SECOND, default=None)

    def highest(self) -> tuple[float, float] | None:
        """Return the first place with the highest value, and the value; None if no value is finite."""
        return max(_finite(chain(*self._stretches.values())), key=_SECOND, default=None)

    def points(self, most: int) -> list[Point]:
        """Return the points in their order, without those within a stretch of equal values.

        Args:
            most: how many points there are at most, about.
        """
        stretches, width = self._stretches, self._width
        while 2 * len(stretches) > max(most, 4):
            width *= 2
            stretches = _merged(stretches)
        found = [point for key in sorted(stretches) for point in _kept(stretches[key])]
        if self.last is not None and math.isfinite(self.last[1]) and found and found[-1] != self.last:
            found.append(self.last)
        inner = zip(found, found[1:], found[2:], strict=False)
        flat = {index for index, (a, b, c) in enumerate(inner, start=1) if a[1] == b[1] == c[1]}
        return [point for index, point in enumerate(found) if index not in flat]

    def _add_finite(self, x: int, every: int, part: Sequence[Any]) -> bool:
        """Add the values of one stretch if all of them are finite; return whether they are."""
        if not _are_alike(part):
            try:
                part = list(map(float, part))
            except TypeError:  # there is None
                return False
            total = sum(part)
            if total - total != 0:
                return False
        low, high = min(part), max(part)
        lowest, highest = (x + every * part.index(low), float(low)), (x + every * part.index(high), float(high))
        self.count += len(part)
        self.last = x + every * (len(part) - 1), float(part[-1])
        self._put(x, sorted({lowest, highest}))
        return True

    def _put(self, x: float, points: Sequence[Point]) -> None:
        _add(self._stretches, int(x) // self._width, points)
        while len(self._stretches) > self.most:
            self._width *= 2
            self._stretches = _merged(self._stretches)


def _are_alike(part: Sequence[Any]) -> bool:
    """Return whether values are texts such as `0.25`, with one digit before the point: they have the order of texts."""
    try:
        return set(map(_SECOND, part)) == {"."} and "e" not in (text := "".join(part)) and "E" not in text
    except (TypeError, IndexError):
        return False


def _finite(points: Iterable[Point]) -> list[tuple[float, float]]:
    return [(x, value) for x, value in points if value is not None]


def _kept(points: Sequence[Point]) -> list[Point]:
    """Return of points the first lowest, the first highest and the first gap, in the order of the x axis."""
    finite = _finite(points)
    ends = [min(finite, key=_SECOND), max(finite, key=_SECOND)] if finite else []
    gaps = [point for point in points if point[1] is None]
    return sorted(dict.fromkeys([*ends, *gaps[:1]]), key=_FIRST)


def _add(stretches: dict[int, list[Point]], key: int, points: Sequence[Point]) -> None:
    there = stretches.setdefault(key, [])
    there += points
    if len(there) > _MOST_OF_STRETCH:
        there[:] = _kept(there)


def _merged(stretches: dict[int, list[Point]]) -> dict[int, list[Point]]:
    """Return stretches of twice the width."""
    merged: dict[int, list[Point]] = {}
    for key, points in stretches.items():
        _add(merged, key // 2, points)
    return merged
