"""Pictures of runs that need no script, as SVG: the statistic against each parameter, and all parameters at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emrun.base.wording import in_one_line
from emrun.epoch_data import as_float
from emrun.runs.report.markup import Html, joined, tag

_WIDTH, _HEIGHT = 320, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 12, 40
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
        numbers = [each for each in values if _is_number(each)]
        if len(numbers) == len(values):
            low, high = min(numbers), max(numbers)
            is_log = low > 0 and high / low >= 10
            scaled = math.log if is_log else float
            width = scaled(high) - scaled(low)
            places = {key_of(each): (scaled(each) - scaled(low)) / width if width else 0.5 for each in values}
            ends = [(0.0, _short(low)), (1.0, _short(high))] if width else [(0.5, _short(low))]
            different = sorted({float(each) for each in numbers})
            if 2 < len(different) <= 6:
                ends = [(places[key_of(each)], _short(each)) for each in sorted(set(numbers))]
            return cls(places, _apart(ends))
        words = sorted(dict.fromkeys(key_of(each) for each in values))
        step = 1 / max(1, len(words) - 1)
        places = {word: 0.5 if len(words) == 1 else index * step for index, word in enumerate(words)}
        return cls(places, [(places[word], in_one_line(word.strip('"'), 14)) for word in words[:_MOST_WORDS]])

    def place(self, value: Any) -> float:
        """Return where a value lies, from 0 to 1."""
        return self.places[key_of(value)]


def key_of(value: Any) -> str:
    """Return a value of a config as text that is equal only for equal values."""
    return json.dumps(value, default=str, sort_keys=True)


def scatter(name: str, values: Sequence[Any], results: Sequence[float], labels: Sequence[str], by: str) -> Html:
    """Return a picture of a statistic against a parameter, a point for each run.

    Args:
        name: the parameter.
        values: its value in each run.
        results: the statistic of each run, finite.
        labels: what the tip of each point says.
        by: the name of the statistic.
    """
    across, up = Axis.of(values), Axis.of(results)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    points = [
        tag(
            "circle", tag("title", label), class_="point", r="4",
            cx=_at(_LEFT + width * across.place(value)), cy=_at(_TOP + height * (1 - up.place(result))),
        )
        for value, result, label in zip(values, results, labels, strict=True)
    ]  # fmt: skip
    base = _HEIGHT - _BOTTOM
    marks = [
        tag("line", x1=_at(_LEFT), x2=_at(_WIDTH - _RIGHT), y1=_at(base), y2=_at(base), class_="axis"),
        tag("line", x1=_at(_LEFT), x2=_at(_LEFT), y1=_at(_TOP), y2=_at(base), class_="axis"),
        [
            tag("text", text, x=_at(_LEFT + width * place), y=_at(base + 16), text_anchor="middle")
            for place, text in across.ticks
        ],
        [
            tag("text", text, x=_at(_LEFT - 6), y=_at(_TOP + height * (1 - place) + 4), text_anchor="end")
            for place, text in up.ticks
        ],
        tag(
            "text",
            in_one_line(name, 44),
            x=_at(_LEFT + width / 2),
            y=_at(_HEIGHT - 6),
            text_anchor="middle",
            class_="name",
        ),
    ]
    return _picture(_WIDTH, _HEIGHT, f"{by} against {name}", [marks, points])


def parallel(names: Sequence[str], rows: Sequence[Sequence[Any]], labels: Sequence[str], better_low: bool) -> Html:
    """Return a picture with an axis for each parameter and a line for each run; the last axis is the statistic.

    Args:
        names: the names of the axes.
        rows: the values of each run.
        labels: what the tip of each line says.
        better_low: whether low values of the last axis are better; better lines are darker.
    """
    axes = [Axis.of(column) for column in zip(*rows, strict=True)]
    width, height = 2 * _LEFT + _STEP * (len(axes) - 1), _HEIGHT + 20
    inner = height - _TOP - _BOTTOM
    lines = []
    for row, label in sorted(zip(rows, labels, strict=True), key=lambda pair: _rank(pair[0][-1], better_low)):
        points = " ".join(
            f"{_at(_LEFT + _STEP * index)},{_at(_TOP + inner * (1 - axis.place(value)))}"
            for index, (axis, value) in enumerate(zip(axes, row, strict=True))
        )
        share = axes[-1].place(row[-1])
        good = 1 - share if better_low else share
        opacity = f"{0.15 + 0.85 * good**2:.2f}"
        lines.append(tag("polyline", tag("title", label), points=points, class_="run", opacity=opacity))
    marks = []
    for index, (name, axis) in enumerate(zip(names, axes, strict=True)):
        x = _LEFT + _STEP * index
        marks.append(tag("line", x1=_at(x), x2=_at(x), y1=_at(_TOP), y2=_at(_TOP + inner), class_="axis"))
        is_last = index == len(axes) - 1  # a long name has its place on the left
        at, anchor = (x + _LEFT - 4, "end") if is_last else (x, "middle")
        text = in_one_line(name, 30 if is_last else 22)
        marks.append(tag("text", text, x=_at(at), y=_at(height - 6), text_anchor=anchor, class_="name"))
        for place, text in axis.ticks:
            y = _at(_TOP + inner * (1 - place) + 4)
            marks.append(tag("text", text, x=_at(x + 5), y=y, class_="tick"))
    return _picture(width, height, f"all parameters and {names[-1]}, a line for each run", [lines, marks])


def _picture(width: int, height: int, title: str, content: Any) -> Html:
    size = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
    picture = tag("svg", tag("title", title), joined(content), role="img", aria_label=title, **size)
    return tag("div", picture, class_="scroll", tabindex="0", role="group", aria_label=title)


def _rank(value: Any, better_low: bool) -> float:
    """Return what lines are drawn by: the best one comes last, on top."""
    return -float(value) if better_low else float(value)


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


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
