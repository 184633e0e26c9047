"""Tables for the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from emrun.base.tables import Table, width
from emrun.base.wording import few
from emrun.epoch_data import brief_statistics, is_rate

MOST_ROWS = 30
"""The most rows of a table of the parts of a module or of a dataset."""


def table(rows: Iterable[Sequence[str]], headers: Sequence[str] = (), align: Sequence[str] = ()) -> str:
    """Return rows as a table for standard output, folded to its width; without headers, as plain columns."""
    return Table(list(rows), headers, align).folded(width(sys.stdout))


def summary(metrics: Sequence[Mapping[str, Any]], shown: Collection[str] | None = None) -> str:
    """Return a table of a run's statistics: last, lowest and highest value with their epochs; empty without statistics.

    Learning rates are left out; they are in `metrics.jsonl` and in the log.

    Args:
        metrics: the lines of `metrics.jsonl`.
        shown: the variables that the table has; by default all.
    """
    series: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for line in metrics:
        for stream, variables in line["streams"].items():
            kept = {k: v for k, v in variables.items() if (not is_rate(k) if shown is None else k in shown)}
            for name, value in brief_statistics(kept):
                series.setdefault((stream, name), []).append((line["epoch"], value))
    rows = []
    for (stream, name), values in series.items():
        numbers = [
            (value, epoch) for epoch, value in values if isinstance(value, int | float) and not math.isnan(value)
        ]
        low, high = (min(numbers, key=lambda v: v[0]), max(numbers, key=lambda v: v[0])) if numbers else (None, None)
        extremes = [f"{_short(each[0])} ({each[1]})" if each else "" for each in (low, high)]
        rows.append([stream, name, _short(values[-1][1]), *extremes])
    headers = ["stream", "variable", "last", "lowest (epoch)", "highest (epoch)"]
    return table(rows, headers) if rows else ""


def results(epoch_data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of an evaluation's statistics."""
    rows = [
        [stream, name, _short(value)]
        for stream, variables in epoch_data.items()
        for name, value in brief_statistics(variables)
    ]
    return table(rows, ["stream", "variable", "value"])


def parameters_table(parameters: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the parameters of a module, from the rows of `model_facts.parameters`."""
    rows: list[list[str]] = []
    for part in parameters:
        shapes = few(f"{name} {tuple(shape)}" for name, shape in part["shapes"].items())
        trained = {0: "no", part["count"]: "yes"}.get(part["trained"], f"{part['trained']:,}")
        rows.append([part["module"], part["class"], shapes, f"{part['count']:,}", trained])
    half = MOST_ROWS // 2
    if len(rows) > MOST_ROWS + 1:  # the last ones stay, such as a new head
        count = sum(part["count"] for part in parameters[half:-half])
        rows[half:-half] = [[f"{len(rows) - 2 * half} more", "", "(emrun check --json lists all)", f"{count:,}", ""]]
    total = sum(part["count"] for part in parameters)
    rows.append(["all", "", "", f"{total:,}", f"{sum(part['trained'] for part in parameters):,}"])
    headers = ["module", "class", "shapes", "parameters", "trained"]
    return table(rows, headers, ("left", "left", "left", "right", "right"))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
