"""Curves with few enough points to be drawn, in which no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_WAITING = 1 << 13  # values that are added before they are thinned

Point = tuple[int, float | None]
"""A place on the x axis and a value; None interrupts the curve."""
_Array = NDArray[Any]


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
    last: tuple[int, float] | None = None
    """The last value and its place."""
    _not_finite: int = 0
    _width: int = 1
    _xs: list[int] = field(default_factory=list)
    _ys: list[float] = field(default_factory=list)
    _thinned: int = 0  # of these lists

    def add(self, x: int, value: float) -> None:
        """Add a value; `x` is not smaller than before."""
        self.add_all(x, 1, [value])

    def add_all(self, first: int, every: int, values: Sequence[float | None]) -> None:
        """Add values at `first`, `first + every`, ...; None stands for no value."""
        xs: Sequence[int] = range(first, first + every * len(values), every)
        ys: Sequence[Any] = values
        if None in values:
            present = [index for index, value in enumerate(values) if value is not None]
            xs = [xs[index] for index in present]
            ys = [values[index] for index in present]
        self._xs += xs
        self._ys += ys
        if ys:
            self.count += len(ys)
            self.last = xs[-1], ys[-1]
        if len(self._xs) >= self._thinned + _MOST_WAITING:
            self._thin()

    @property
    def not_finite(self) -> int:
        """How many values are not finite."""
        self._thin()
        return self._not_finite

    @property
    def first_not_finite(self) -> int | None:
        """The first place with a value that is not finite; None if there is none."""
        xs, ys = self._thin()
        return int(xs[np.isnan(ys)][0]) if self._not_finite else None

    def lowest(self) -> tuple[int, float] | None:
        """Return the first place with the lowest value, and the value; None if no value is finite."""
        xs, ys = self._thin()
        places = _lowest(np.zeros_like(xs), ys)
        return (int(xs[places[0]]), float(ys[places[0]])) if len(places) else None

    def highest(self) -> tuple[int, float] | None:
        """Return the first place with the highest value, and the value; None if no value is finite."""
        xs, ys = self._thin()
        places = _lowest(np.zeros_like(xs), -ys)
        return (int(xs[places[0]]), float(ys[places[0]])) if len(places) else None

    def points(self, most: int) -> list[Point]:
        """Return the points in their order, without those within a stretch of equal values.

        Args:
            most: how many points there are at most, about.
        """
        xs, ys = self._thin()
        kept = _kept(xs // _width(xs, self._width, max(most, 4) // 2), ys)
        values = [None if math.isnan(y) else y for y in ys[kept].tolist()]
        points: list[Point] = list(zip(xs[kept].tolist(), values, strict=True))
        if self.last is not None and math.isfinite(self.last[1]) and points[-1] != self.last:
            points.append(self.last)
        inner = zip(points, points[1:], points[2:], strict=False)
        flat = {index for index, (a, b, c) in enumerate(inner, start=1) if a[1] == b[1] == c[1]}
        return [point for index, point in enumerate(points) if index not in flat]

    def _thin(self) -> tuple[_Array, _Array]:
        """Return the places and the values that are kept; NaN stands for one that is not finite."""
        xs = np.array(self._xs, np.int64)
        ys = np.array(self._ys, np.float64)
        ys[~np.isfinite(ys)] = np.nan
        if len(xs) > self._thinned:
            self._not_finite += int(np.isnan(ys[self._thinned :]).sum())
            self._width = _width(xs, self._width, self.most)
            kept = _kept(xs // self._width, ys)
            xs = xs[kept]
            ys = ys[kept]
            self._xs = xs.tolist()
            self._ys = ys.tolist()
            self._thinned = len(xs)
        return xs, ys


def _width(xs: _Array, width: int, most: int) -> int:
    """Return the first power of two, from a width on, with which places are in at most `most` stretches."""
    while len(np.unique(xs // width)) > most:
        width *= 2
    return width


def _kept(stretches: _Array, ys: _Array) -> _Array:
    """Return the indices of the first lowest value, the first highest and the first gap of each stretch."""
    gaps = np.flatnonzero(np.isnan(ys))
    first_gaps = gaps[np.unique(stretches[gaps], return_index=True)[1]]
    return np.unique(np.concatenate([_lowest(stretches, ys), _lowest(stretches, -ys), first_gaps]))


def _lowest(stretches: _Array, ys: _Array) -> _Array:
    """Return the index of the first lowest value of each stretch that has values."""
    finite = np.flatnonzero(~np.isnan(ys))
    in_order = finite[np.lexsort((ys[finite], stretches[finite]))]
    return in_order[np.unique(stretches[in_order], return_index=True)[1]]
