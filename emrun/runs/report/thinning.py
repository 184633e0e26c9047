"""Curves with few enough points to be drawn, in which no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

_SECOND = itemgetter(1)

Point = tuple[float, float | None]
"""A place on the x axis and a value; None interrupts the curve."""


@dataclass(slots=True)
class _Stretch:
    """The lowest and the highest value of a stretch of the x axis, and a value there that is not finite."""

    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    gap: float | None = None

    def add(self, other: _Stretch) -> None:
        """Add what a later stretch has."""
        if other.low is not None and (self.low is None or other.low[1] < self.low[1]):
            self.low = other.low
        if other.high is not None and (self.high is None or other.high[1] > self.high[1]):
            self.high = other.high
        if self.gap is None:
            self.gap = other.gap

    def points(self) -> list[Point]:
        """Return the points of the stretch, in the order of the x axis."""
        found: set[Point] = {each for each in (self.low, self.high) if each is not None}
        return sorted([*found, *([] if self.gap is None else [(self.gap, None)])], key=lambda point: point[0])


@dataclass(slots=True)
class Curve:
    """Values at growing places of the x axis, of which the lowest and the highest of each stretch are kept.

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
    first_not_finite: float | None = None
    """The first place with such a value."""
    last: tuple[float, float] | None = None
    """The last value and its place."""
    _width: int = 1
    _stretches: dict[int, _Stretch] = field(default_factory=dict)

    def add(self, x: float, value: float) -> None:
        """Add a value; `x` is not smaller than before."""
        self.count += 1
        self.last = x, value
        if math.isfinite(value):
            self._put(x, _Stretch((x, value), (x, value)))
        else:
            self._note(x)

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
        return min((each.low for each in self._stretches.values() if each.low), key=_value, default=None)

    def highest(self) -> tuple[float, float] | None:
        """Return the first place with the highest value, and the value; None if no value is finite."""
        return max((each.high for each in self._stretches.values() if each.high), key=_value, default=None)

    def points(self, most: int) -> list[Point]:
        """Return the points in their order, without those within a stretch of equal values.

        Args:
            most: how many points there are at most, about.
        """
        stretches, width = self._stretches, self._width
        while 2 * len(stretches) > max(most, 4):
            width *= 2
            stretches = _merged(stretches)
        found = [point for key in sorted(stretches) for point in stretches[key].points()]
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
        self._put(x, _Stretch(lowest, highest))
        return True

    def _note(self, x: float) -> None:
        self.not_finite += 1
        if self.first_not_finite is None:
            self.first_not_finite = x
        self._put(x, _Stretch(gap=x))

    def _put(self, x: float, stretch: _Stretch) -> None:
        key = int(x) // self._width
        there = self._stretches.get(key)
        if there is not None:
            there.add(stretch)
            return
        self._stretches[key] = stretch
        while len(self._stretches) > self.most:
            self._width *= 2
            self._stretches = _merged(self._stretches)


def _are_alike(part: Sequence[Any]) -> bool:
    """Return whether values are texts such as `0.25`, with one digit before the point: they have the order of texts."""
    try:
        return set(map(_SECOND, part)) == {"."} and "e" not in (text := "".join(part)) and "E" not in text
    except (TypeError, IndexError):
        return False


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _merged(stretches: dict[int, _Stretch]) -> dict[int, _Stretch]:
    """Return stretches of twice the width."""
    merged: dict[int, _Stretch] = {}
    for key, each in stretches.items():
        there = merged.get(key // 2)
        if there is None:
            merged[key // 2] = _Stretch(each.low, each.high, each.gap)
        else:
            there.add(each)
    return merged
