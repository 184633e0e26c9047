"""What a page shows of several runs: their table, what differs in their configs, and what this changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from emrun.base.types import Json
from emrun.base.wording import counted, in_one_line, last_parts, span
from emrun.runs.config_comparison import values_of
from emrun.runs.report.drawings import key_of, parallel, scatter
from emrun.runs.report.one_run import RunPart, in_words

_NOT_OF_IDENTITY = ("seed", "name", "code_directory")
_OF_REPEATS = ("seed", "vars.fold")
_MOST_IN_TABLE = 6  # parameters with a column of their own
_MOST_DIFFERENCES = 200
_MOST_PICTURES = 12
_MOST_COLUMNS = 12  # runs that have a column of their own
_MOST_VALUES = 12
_FEWEST = 3  # values of a statistic that are drawn
_LONGEST = 40
_MISSING = "(not there)"
Differences = Mapping[str, Sequence[Any]]
"""A key of which the configs of runs have different values -> the value of each run; `(not there)` for none."""


def compared(parts: Sequence[RunPart], runs: Sequence[Mapping[str, Any]]) -> Json:
    """Return what the template `runs.html` shows of several runs.

    Args:
        parts: the runs.
        runs: what is shown of each of them.
    """
    differences = _differences_of(parts)
    parameters = {key: values for key, values in differences.items() if key not in _OF_REPEATS}
    keys = list(parameters)[:_MOST_IN_TABLE]
    counts = Counter(part.run.status for part in parts)
    return {
        "by": in_words(parts[0].by),
        "ended": f"{counted(len(parts), 'run')}: {', '.join(f'{count} {status}' for status, count in counts.items())}",
        "runs": runs,
        "tips": dict(zip(last_parts(keys), keys, strict=True)),
        "summary": _summary(parts, parameters, keys),
        "repeats": _repeats(parts, differences, parameters, keys),
        "differing": _differing(parts, differences),
        **_pictures(parts, parameters),
    }


def _differences_of(parts: Sequence[RunPart]) -> Differences:
    """Return what differs between the configs of runs."""
    configs = [values_of(part.run) for part in parts]
    differing: dict[str, Sequence[Any]] = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, _MISSING) for config in configs]
        if key not in _NOT_OF_IDENTITY[1:] and len({key_of(value) for value in values}) > 1:
            differing[key] = values
    return differing


def _summary(parts: Sequence[RunPart], parameters: Differences, keys: Sequence[str]) -> Json:
    """Return the table of the runs, with the parameters that differ; the best run is the first."""
    rows = []
    for index, part in sorted(enumerate(parts), key=lambda entry: _order(entry[1])):
        best, epoch = part.best or (None, None)
        rows.append(
            [
                {"index": index, "name": part.name},
                {"status": part.run.status},
                part.run.epochs_done,
                best,
                None if epoch is None else int(epoch),
                *(_cell(parameters[key][index]) for key in keys),
                None if part.seconds is None else {"seconds": f"{part.seconds:.3f}", "text": span(part.seconds)},
            ]
        )
    of_parameters = [5 + index for index, key in enumerate(keys) if _are_numbers(parameters[key])]
    headers = ["run", "status", "epochs", in_words(parts[0].by), "in epoch", *last_parts(keys), "took"]
    return {"headers": headers, "rows": rows, "numeric": [2, 3, 4, *of_parameters, 5 + len(keys)]}


def _repeats(parts: Sequence[RunPart], differences: Differences, parameters: Differences, keys: Sequence[str]) -> Json:
    """Return the mean and the spread of runs whose configs differ only in the seed or the fold."""
    groups: dict[str, list[int]] = {}
    for index in range(len(parts)):
        groups.setdefault(key_of([values[index] for values in parameters.values()]), []).append(index)
    rows: list[list[Any]] = []
    for members in groups.values():
        if len(members) > 1 and any(key in differences for key in _OF_REPEATS):
            results = [best[0] for index in members if (best := parts[index].best)]
            mean = fmean(results) if results else None
            deviation = stdev(results) if len(results) > 1 else None
            names = ", ".join(in_one_line(parts[index].name, _LONGEST) for index in members[:4])
            more = ", ..." if len(members) > 4 else ""
            cells = [_cell(parameters[key][members[0]]) for key in keys]
            rows.append([f"{names}{more}", *cells, len(results), mean, deviation])
    sign = 1 if parts[0].by[1] == "min" else -1
    rows.sort(key=lambda row: (row[-2] is None, sign * (row[-2] or 0.0)))
    headers = ["runs", *last_parts(keys), "count", f"mean of {in_words(parts[0].by)}", "standard deviation"]
    of_parameters = [1 + index for index, key in enumerate(keys) if _are_numbers(parameters[key])]
    return {"headers": headers, "rows": rows, "numeric": [*of_parameters, *range(1 + len(keys), len(headers))]}


def _pictures(parts: Sequence[RunPart], parameters: Differences) -> Json:
    """Return the statistic against each parameter that differs, and all parameters at once."""
    statistic = parts[0].by
    results = {index: best[0] for index, part in enumerate(parts) if (best := part.best)}
    differing = {
        key: [values[index] for index in results]
        for key, values in parameters.items()
        if len({key_of(values[index]) for index in results}) > 1
    }
    if len(results) < _FEWEST or not differing:
        return {"scatters": ()}
    labels = [f"{parts[index].name}: {result:.6g}" for index, result in results.items()]
    shown = dict(list(differing.items())[:_MOST_PICTURES])
    rows = [list(row) for row in zip(*list(shown.values())[:8], results.values(), strict=True)]
    axes = [*last_parts(list(shown)[:8]), in_words(statistic)]
    left = len(differing) - len(shown)
    return {
        "scatters": [
            scatter(key, values, list(results.values()), labels, in_words(statistic)) for key, values in shown.items()
        ],
        "parallel": parallel(axes, rows, labels, statistic[1] == "min") if len(shown) > 1 else None,
        "more_parameters": counted(left, "more parameter") if left else None,
    }


def _differing(parts: Sequence[RunPart], differences: Differences) -> Json:
    """Return a table with the values that differ between configs, a row for each key."""
    keys = list(differences)[:_MOST_DIFFERENCES]
    has_columns = len(parts) <= _MOST_COLUMNS
    names = [in_one_line(part.name, _LONGEST) for part in parts] if has_columns else ["values"]
    rows = []
    for key in keys:
        cells = map(_text, differences[key]) if has_columns else [_counts(differences[key])]
        rows.append([in_one_line(key, 80), *cells])
    left = len(differences) - len(rows)
    return {"headers": ["key", *names], "rows": rows, "more": counted(left, "more key") if left else None}


def _counts(values: Sequence[Any]) -> str:
    """Return the different values and how many runs have each, the most frequent first."""
    counts = Counter(map(_text, values))
    shown = [f"{text} ({counted(count, 'run')})" for text, count in counts.most_common(_MOST_VALUES)]
    if len(counts) > _MOST_VALUES:
        shown.append(f"{len(counts) - _MOST_VALUES} more")
    return ", ".join(shown)


def _order(part: RunPart) -> tuple[bool, float, str]:
    """Return what runs are sorted by: the best one first, those without a value last."""
    best, _ = part.best or (0.0, 0.0)
    return part.best is None, best if part.by[1] == "min" else -best, part.name


def _cell(value: Any) -> Any:
    return value if _are_numbers([value]) else _text(value)


def _text(value: Any) -> str:
    return in_one_line(value if isinstance(value, str) else json.dumps(value, default=str), _LONGEST)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
