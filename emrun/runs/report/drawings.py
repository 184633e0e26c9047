"""Where everything lies in pictures of runs: the statistic against each parameter, and all parameters at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emrun.base.types import Json
from emrun.base.wording import in_one_line
from emrun.epoch_data import as_float

_WIDTH = 320
_HEIGHT = 220
_LEFT = 64
_RIGHT = 24
_TOP = 12
_BOTTOM = 40
_STEP = 150  # between the axes of the parallel coordinates
_MOST_WORDS = 12


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of a parameter: where each of its values lies, from 0 to 1, and what is written at it."""

    places: dict[str, float]
    ticks: list[tuple[float, str]]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Axis:
        """Return the axis of values: linear or logarithmic for numbers, else with an equal distance."""
        numbers = [value for value in values if _is_number(value)]
        if len(numbers) == len(values):
            low = min(numbers)
            high = max(numbers)
            is_log = low > 0 and high / low >= 10
            scaled = math.log if is_log else float
            width = scaled(high) - scaled(low)
            places = {key_of(value): (scaled(value) - scaled(low)) / width if width else 0.5 for value in values}
            ticks = [(0.0, _short(low)), (1.0, _short(high))] if width else [(0.5, _short(low))]
            if 2 < len(sorted({float(value) for value in numbers})) <= 6:
                ticks = [(places[key_of(value)], _short(value)) for value in sorted(set(numbers))]
            return cls(places, _apart(ticks))
        words = sorted(dict.fromkeys(key_of(value) for value in values))
        step = 1 / max(1, len(words) - 1)
        places = {word: 0.5 if len(words) == 1 else index * step for index, word in enumerate(words)}
        return cls(places, [(places[word], in_one_line(word.strip('"'), 14)) for word in words[:_MOST_WORDS]])

    def place(self, value: Any) -> float:
        """Return where a value lies, from 0 to 1."""
        return self.places[key_of(value)]


@dataclass(frozen=True, slots=True)
class Box:
    """A picture of a size, and where the axes in it begin and end."""

    width: int
    height: int

    left = _LEFT
    top = _TOP

    @property
    def right(self) -> int:
        """Where an axis from left to right ends."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        """Where an axis from below begins."""
        return self.height - _BOTTOM

    def across(self, place: float) -> float:
        """Return where a place from 0 to 1 lies between left and right."""
        return round(self.left + (self.right - self.left) * place, 1)

    def up(self, place: float) -> float:
        """Return where a place from 0 to 1 lies between bottom and top."""
        return round(self.bottom - (self.bottom - self.top) * place, 1)


def key_of(value: Any) -> str:
    """Return a value of a config as text that is equal only for equal values."""
    return json.dumps(value, default=str, sort_keys=True)


def scatter(name: str, values: Sequence[Any], results: Sequence[float], labels: Sequence[str], by: str) -> Json:
    """Return a picture of a statistic against a parameter, a point for each run.

    Args:
        name: the parameter.
        values: its value in each run.
        results: the statistic of each run, finite.
        labels: what the tip of each point says.
        by: the name of the statistic.
    """
    across = Axis.of(values)
    up = Axis.of(results)
    box = Box(_WIDTH, _HEIGHT)
    return {
        "title": f"{by} against {name}",
        "name": in_one_line(name, 44),
        "box": box,
        "across": [(box.across(place), text) for place, text in across.ticks],
        "up": [(box.up(place), text) for place, text in up.ticks],
        "points": [
            (box.across(across.place(value)), box.up(up.place(result)), label)
            for value, result, label in zip(values, results, labels, strict=True)
        ],
    }


def parallel(names: Sequence[str], rows: Sequence[Sequence[Any]], labels: Sequence[str], better_low: bool) -> Json:
    """Return a picture with an axis for each parameter and a line for each run; the last axis is the statistic.

    Args:
        names: the names of the axes.
        rows: the values of each run.
        labels: what the tip of each line says.
        better_low: whether low values of the last axis are better; better lines are darker and drawn on top.
    """
    axes = [Axis.of(column) for column in zip(*rows, strict=True)]
    xs = [_LEFT + _STEP * index for index in range(len(axes))]
    box = Box(xs[-1] + _LEFT, _HEIGHT + 20)
    lines = []
    for row, label in zip(rows, labels, strict=True):
        share = axes[-1].place(row[-1])
        points = [(x, box.up(axis.place(value))) for x, axis, value in zip(xs, axes, row, strict=True)]
        lines.append(
            {
                "label": label,
                "points": " ".join(f"{x},{y}" for x, y in points),
                "opacity": round(0.15 + 0.85 * (1 - share if better_low else share) ** 2, 2),
            }
        )
    most = [22] * (len(names) - 1) + [30]  # characters of names: the last one has its place on the left
    return {
        "title": f"all parameters and {names[-1]}, a line for each run",
        "box": box,
        "lines": sorted(lines, key=lambda line: line["opacity"]),
        "axes": [
            {"x": x, "name": in_one_line(name, size), "ticks": [(box.up(place), text) for place, text in axis.ticks]}
            for x, name, size, axis in zip(xs, names, most, axes, strict=True)
        ],
    }


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out ticks that are too near to the one before."""
    kept: list[tuple[float, str]] = []
    for place, text in sorted(ticks):
        if not kept or place - kept[-1][0] >= 0.12:
            kept.append((place, text))
    return kept


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(as_float(value))


def _short(value: float) -> str:
    return f"{value:.3g}"
