"""The sections of a page that compare runs: their table, what differs in their configs, and what this changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from emrun.base.wording import counted, in_one_line, last_parts, span
from emrun.runs.config_comparison import values_of
from emrun.runs.report.drawings import key_of, parallel, scatter
from emrun.runs.report.markup import Html, joined, section, table, tag
from emrun.runs.report.one_run import RunPart, badge, in_words, key_class

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


def differences_of(parts: Sequence[RunPart]) -> Differences:
    """Return what differs between the configs of runs."""
    configs = [values_of(part.run) for part in parts]
    found: dict[str, Sequence[Any]] = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, _MISSING) for config in configs]
        if key not in _NOT_OF_IDENTITY[1:] and len({key_of(value) for value in values}) > 1:
            found[key] = values
    return found


def _parameters(differences: Differences) -> Differences:
    """Return those that are not the seed or the fold of a repeat."""
    return {key: values for key, values in differences.items() if key not in _OF_REPEATS}


def summary(parts: Sequence[RunPart], differences: Differences) -> Html:
    """Return the table of the runs, with the parameters that differ, and how many runs ended in which way."""
    by = parts[0].by
    parameters = list(_parameters(differences))[:_MOST_IN_TABLE]
    headers = ["run", "status", "epochs", in_words(by), "in epoch", *_headings(parameters), "took"]
    rows = []
    for index, part in sorted(enumerate(parts), key=lambda entry: _order(entry[1])):
        best, epoch = part.best or (None, None)
        rows.append(
            [
                tag("a", tag("span", "", class_=key_class(index)), part.name, href=f"#run{index}"),
                badge(part.run.status),
                part.run.epochs_done,
                best,
                None if epoch is None else int(epoch),
                *(_cell(differences[key][index]) for key in parameters),
                None if part.seconds is None else tag("span", span(part.seconds), data_value=f"{part.seconds:.3f}"),
            ]
        )
    of_parameters = [5 + index for index, key in enumerate(parameters) if _are_numbers(differences[key])]
    numeric = [2, 3, 4, *of_parameters, 5 + len(parameters)]
    counts = Counter(part.run.status for part in parts)
    ended = ", ".join(f"{count} {status}" for status, count in counts.items())
    return joined(
        [
            tag("p", f"{counted(len(parts), 'run')}: {ended}. The best run is the first; a heading sorts the table."),
            table(headers, rows, numeric=numeric, label="Runs", is_sortable=True),
        ]
    )


def repeats(parts: Sequence[RunPart], differences: Differences) -> Html:
    """Return the mean and the spread of runs whose configs differ only in the seed or the fold."""
    groups: dict[str, list[int]] = {}
    parameters = _parameters(differences)
    for index in range(len(parts)):
        groups.setdefault(key_of([values[index] for values in parameters.values()]), []).append(index)
    several = [members for members in groups.values() if len(members) > 1]
    if not several or all(key not in differences for key in _OF_REPEATS):
        return Html("")
    shown = list(parameters)[:_MOST_IN_TABLE]
    rows = []
    for members in several:
        results = [best[0] for index in members if (best := parts[index].best)]
        mean = fmean(results) if results else None
        deviation = stdev(results) if len(results) > 1 else None
        names = [in_one_line(parts[index].name, _LONGEST) for index in members]
        cells = [_cell(parameters[key][members[0]]) for key in shown]
        rows.append([", ".join(names[:4]) + ", ..." * (len(names) > 4), *cells, len(results), mean, deviation])
    sign = 1 if parts[0].by[1] == "min" else -1
    rows.sort(key=lambda row: (row[-2] is None, sign * (row[-2] or 0.0)))
    headers = ["runs", *_headings(shown), "count", f"mean of {in_words(parts[0].by)}", "standard deviation"]
    numeric = [i for i in range(1, len(headers)) if i > len(shown) or _are_numbers(parameters[shown[i - 1]])]
    return section(
        "Repeats",
        tag("p", "Runs whose configs differ only in their seed or fold; the deviation is that of a sample (N - 1)."),
        table(headers, rows, numeric=numeric, label="Repeats", is_sortable=True),
    )


def pictures(parts: Sequence[RunPart], differences: Differences) -> Html:
    """Return the statistic against each parameter that differs, and all parameters at once."""
    by = parts[0].by
    results = {index: best[0] for index, part in enumerate(parts) if (best := part.best)}
    parameters = {
        key: [values[index] for index in results]
        for key, values in _parameters(differences).items()
        if len({key_of(values[index]) for index in results}) > 1
    }
    if len(results) < _FEWEST or not parameters:
        return Html("")
    labels = [f"{parts[index].name}: {result:.6g}" for index, result in results.items()]
    shown = dict(list(parameters.items())[:_MOST_PICTURES])
    each = [scatter(key, values, list(results.values()), labels, in_words(by)) for key, values in shown.items()]
    rows = [list(row) for row in zip(*list(shown.values())[:8], results.values(), strict=True)]
    axes = [*last_parts(list(shown)[:8]), in_words(by)]
    left = len(parameters) - len(shown)
    return section(
        f"Parameters and the {in_words(by)}",
        tag("p", "A point is a run; what the configs of the runs have in common is not shown."),
        tag("div", each, class_="pictures"),
        parallel(axes, rows, labels, by[1] == "min") if len(shown) > 1 else None,
        tag("p", f"{counted(left, 'more parameter')} not shown.") if left else None,
    )


def differing(parts: Sequence[RunPart], differences: Differences) -> Html:
    """Return a table with the values that differ between configs, a row for each key."""
    keys = list(differences)[:_MOST_DIFFERENCES]
    has_columns = len(parts) <= _MOST_COLUMNS
    headers = ["key", *(in_one_line(part.name, _LONGEST) for part in parts)] if has_columns else ["key", "values"]
    shown = [map(_text, differences[key]) if has_columns else [_counts(differences[key])] for key in keys]
    rows = [[in_one_line(key, 80), *cells] for key, cells in zip(keys, shown, strict=True)]
    left = len(differences) - len(rows)
    return section(
        "What differs in the configs",
        table(headers, rows, label="What differs in the configs") or tag("p", "Nothing: the configs are equal."),
        tag("p", f"{counted(left, 'more key')} not shown.") if left else None,
    )


def _counts(values: Sequence[Any]) -> str:
    """Return the different values and how many runs have each, the most frequent first."""
    counts = Counter(map(_text, values))
    shown = [f"{text} ({counted(count, 'run')})" for text, count in counts.most_common(_MOST_VALUES)]
    return ", ".join([*shown, *([f"{len(counts) - _MOST_VALUES} more"] if len(counts) > _MOST_VALUES else [])])


def _headings(keys: Sequence[str]) -> list[Html]:
    """Return short keys with the whole keys as tips."""
    return [tag("span", each, title=key) for key, each in zip(keys, last_parts(keys), strict=True)]


def _order(part: RunPart) -> tuple[bool, float, str]:
    """Return what runs are sorted by: the best one first, those without a value last."""
    best, _ = part.best or (0.0, 0.0)
    return part.best is None, best if part.by[1] == "min" else -best, part.name


def _cell(value: Any) -> Any:
    return value if _are_numbers([value]) else _text(value)


def _text(value: Any) -> str:
    return in_one_line(value if isinstance(value, str) else json.dumps(value, default=str), _LONGEST)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
