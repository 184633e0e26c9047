"""The page of runs: one HTML file with its style, its script and its data, that needs no network."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from emrun import __version__
from emrun.base.errors import RunInUse, StorageError, UsageError
from emrun.base.types import Json
from emrun.base.wording import counted, did_you_mean, from_here, in_one_line
from emrun.epoch_data import LEARNING_RATE, MOST_CLASSES, RUNNING, is_rate, named
from emrun.runs.columns import Row
from emrun.runs.pruning import better
from emrun.runs.report.curves import curves_of
from emrun.runs.report.facts import LogLine, log_of
from emrun.runs.report.one_run import RunPart, shown
from emrun.runs.report.several_runs import compared
from emrun.runs.report.templates import rendered
from emrun.runs.report.thinning import Curve, Point
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import Summaries, Which
from emrun.storage.files import aside_of, check_owner, opened_regular, storing, write_flushed, written_aside
from emrun.storage.trace import TRACE

_LOG = logging.getLogger(__name__)

REPORT = "report.html"
"""The name of the page in a run directory."""
_GENERATOR = '<meta name="generator" content="emrun">'  # by which a page of emrun is known
_MOST_POINTS = 1_600  # of a curve
_FEWEST_POINTS = 40
_MOST_MARKS = 500  # epochs whose ends tell where a curve over epochs lies over iterations or time
_MOST_STRETCHES = 1_000  # of a curve, each with up to two points
_FEWEST_STRETCHES = 200
_FULL = 10  # runs whose curves have the most
_ALL_POINTS = 160_000  # of a page
_PICTURES = 3_000_000  # bytes of the pictures of a page
_CONFIGS = 600_000  # characters of the configs of a page
_MOST_CHARTS = 200
_LOGS = 8  # runs whose log is shown
_LONGEST_NAME = 80
_BY_CLASS = " by class"
_RELOAD = 5  # seconds
Line = Mapping[str, Any]


def page(runs: Sequence[StoredRun], *, title: str | None = None, by: str | None = None, reloads: bool = False) -> str:
    """Return the page of runs. Nothing is imported, run or written; what cannot be read is left out and listed.

    Args:
        runs: the runs, at least one.
        title: the heading; by default the name of the run, or how many runs there are.
        by: the statistic by which runs are compared, such as `max:valid/accuracy`; by default that of SaveBest.
        reloads: whether a browser reloads the page every few seconds.

    Raises:
        UsageError: it is not known which value of `by` is better, or no run has recorded it.
    """
    # what the runs have recorded
    statistic = _statistic(runs, by)
    now = datetime.now().astimezone()
    most = max(_FEWEST_STRETCHES, min(_MOST_STRETCHES, _MOST_STRETCHES * _FULL // len(runs)))
    curves = curves_of([run.directory for run in runs], most)
    parts = [
        RunPart(run, name, curves_of_run, statistic, now)
        for run, name, curves_of_run in zip(runs, _names(runs), curves, strict=True)
    ]
    recorded = dict.fromkeys(key for part in parts for key in part.curves.epochs)
    are_all = recorded and not any(part.curves.left_out for part in parts)  # it may be one without a curve
    if by is not None and are_all and named(statistic[0]) not in recorded:
        near = did_you_mean(statistic[0], map("/".join, recorded))
        raise UsageError(f"--by: no run has recorded the statistic {statistic[0]!r}{near}")

    # what the page shows of each run
    charts = list(_charts(parts))
    logs = [log_of(run) if len(runs) <= _LOGS or run.status == "failed" else [] for run in runs]
    shown_runs = [
        shown(part, log=log, picture_bytes=_PICTURES // len(runs), most_config=_CONFIGS // len(runs))
        for part, log in zip(parts, logs, strict=True)
    ]
    places = [_place(index, chart) for index, chart in enumerate(charts)]
    is_one = len(parts) == 1
    return rendered(
        "page.html",
        title=title or (parts[0].name if is_one else counted(len(parts), "run")),
        run=shown_runs[0],
        several=None if is_one else compared(parts, shown_runs),
        plan=_plan(logs[0]),
        charts=places,
        curves=[place for place, chart in zip(places, charts, strict=True) if not is_rate(chart["name"])],
        rates=[place for place, chart in zip(places, charts, strict=True) if is_rate(chart["name"])],
        data=_data(parts, charts),
        reload_seconds=_RELOAD if reloads else None,
        version=__version__,
        now=f"{now:%Y-%m-%d %H:%M}",
    )


def write_page(
    file: Path, runs: Sequence[StoredRun], *, overwrites: bool = False, aside: Path | None = None, **options: Any
) -> int:
    """Write the page of runs into a file, whole or not at all, and return its size in bytes.

    Args:
        file: the file.
        runs: the runs.
        overwrites: whether to replace also a file that is not a page of emrun.
        aside: the temporary path; by default one that no other process uses, such as the run itself.
        options: see `page`.

    Raises:
        UsageError: see `page`; or the file is not a page of emrun.
        StorageError: the file cannot be written.
    """
    if not overwrites and os.path.lexists(file) and not _is_page(file):
        raise UsageError(f"{file} exists, and is not a page of emrun; choose another file with -o, or add --overwrite")
    content = page(runs, **options).encode("utf-8", "backslashreplace")
    check_owner(file)
    with storing(file, "write"), written_aside(file, aside) as path:
        write_flushed(path, content)
    return len(content)


def _is_page(file: Path) -> bool:
    with suppress(StorageError), opened_regular(file) as content:
        return _GENERATOR.encode() in content.read(1000)
    return False


def write_at_end(directory: Path) -> None:
    """Write the page of a run that has ended into its directory; the caller has the lock of the run.

    An error is logged: the page is made from files that anybody may have changed, and a run does not fail by it.

    Args:
        directory: the run directory.
    """
    try:
        file = directory / REPORT
        write_page(file, [StoredRun(from_here(directory))], aside=aside_of(file))
    except RunInUse:  # whoever has taken the run over writes the page
        pass
    except Exception as error:
        _LOG.warning("%s was not written: %s", directory / REPORT, in_one_line(f"{type(error).__name__}: {error}"))


def complete(directory: Path) -> None:
    """Write the page of a run that has ended if its process was killed before; the caller has the lock of the run."""
    if not is_written(directory):
        write_at_end(directory)


def is_written(directory: Path) -> bool:
    """Return whether the page in the directory of a run was written after the run ended."""
    written = [path.stat().st_mtime_ns for path in (directory / REPORT, directory / TRACE) if path.is_file()]
    return len(written) == 2 and written[0] >= written[1]


def _plan(log: Sequence[LogLine]) -> str:
    """Return the newest plan of a learning rate: the length of the run may be known late, or change."""
    plans = [list(lines) for is_plan, lines in groupby(log, lambda line: line.source == "schedule_plan") if is_plan]
    return "\n".join(line.text for line in plans[-1]) if plans else ""


def _statistic(runs: Sequence[StoredRun], by: str | None) -> tuple[str, Which]:
    rows = [Row(run, "", Summaries(run), datetime.min) for run in runs]
    try:
        return better(rows, by)
    except UsageError:
        if by is not None:
            raise
        return rows[0].summaries.watched


def _names(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the directories of runs; their paths if two have the same name."""
    names = [run.directory.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.directory) for run in runs]
    return [in_one_line(name, _LONGEST_NAME) for name in names]


def _charts(parts: Sequence[RunPart]) -> Iterator[Line]:
    """Yield the charts: their name, their x axis, and their lines with a run, a label, a color and a curve.

    Of one run, a chart has a line for each stream; of several, it is about one stream and has a line for each run.
    """
    charts: dict[tuple[str, ...], list[Json]] = {}
    classes = Counter((key[0], _variable(key[1])) for key in {key for part in parts for key in part.curves.epochs})
    streams = list(dict.fromkeys(stream for part in parts for stream, _ in part.curves.epochs))
    for index, part in enumerate(parts):
        for (stream, name), curve in part.curves.epochs.items():
            line = {"run": index, "label": part.name, "color": index, "curve": curve}
            variable = _variable(name)
            if variable and classes[stream, variable] > MOST_CLASSES:
                if len(parts) == 1:  # otherwise the pages of the runs have them
                    lines = charts.setdefault(("epoch", f"{variable}{_BY_CLASS}", stream), [])
                    lines.append(line | {"label": name.removeprefix(f"{variable}/"), "color": len(lines)})
            elif is_rate(name) and _same(curve, part.curves.epochs.get((stream, LEARNING_RATE))):
                continue
            elif len(parts) == 1:
                line |= {"label": stream, "color": streams.index(stream)}
                charts.setdefault(("epoch", name), []).append(line)
            else:
                charts.setdefault(("epoch", name, stream), []).append(line)
        for name, curve in part.curves.steps.items():
            if is_rate(name) and _same(curve, part.curves.steps.get(LEARNING_RATE)):
                continue
            label = "train" if len(parts) == 1 else part.name
            line = {"run": index, "label": label, "color": index, "curve": curve}
            charts.setdefault(("iteration", name), []).append(line)
    order = sorted(charts, key=lambda key: (is_rate(key[1]), key[0] != "epoch", key[1].endswith(_BY_CLASS)))
    for key in order[:_MOST_CHARTS]:
        x, name = key[:2]
        lines = [each for each in charts[key] if each["curve"].count]
        title = f"{key[2]}/{name}" if len(key) > 2 else name
        if lines:
            yield {"name": name, "title": in_one_line(title, _LONGEST_NAME), "x": x, "lines": lines}


def _variable(name: str) -> str:
    """Return the variable of which a name may be the statistic of a class; empty if the name is another one."""
    variable, _, last = name.rpartition("/")
    return "" if last in (*RUNNING, "median") else variable


def _same(curve: Curve, first: Curve | None) -> bool:
    """Return whether the rate of a group of parameters is in all places that of the first group."""
    return first is not None and curve is not first and curve.points(_MOST_POINTS) == first.points(_MOST_POINTS)


def _place(index: int, chart: Line) -> Json:
    """Return what the template shows of a chart, which the script draws."""
    unit = "epochs" if chart["x"] == "epoch" else "iterations"
    title = in_one_line(chart["title"], _LONGEST_NAME)
    return {"index": index, "title": title, "over": unit, "spoken": _spoken(chart, unit), "gaps": _gaps(chart)}


def _spoken(chart: Line, unit: str) -> str:
    """Return what a screen reader says of a chart."""
    sentences = []
    for line in chart["lines"][:12]:
        low = line["curve"].lowest()
        high = line["curve"].highest()
        last = line["curve"].last
        if low is not None and high is not None:
            sentences.append(
                f"{line['label']}: last {last[1]:.4g}, lowest {low[1]:.4g} at {low[0]:g}, highest "
                f"{high[1]:.4g} at {high[0]:g}"
            )
    more = f"; and {len(chart['lines']) - 12} more" if len(chart["lines"]) > 12 else ""
    return f"{chart['title']} over {unit}. {'; '.join(sentences)}{more}"


def _gaps(chart: Line) -> str:
    """Return how many values of a chart are not finite, and so not drawn."""
    sentences = []
    for line in chart["lines"]:
        curve: Curve = line["curve"]
        if curve.not_finite:
            are = "value is" if curve.not_finite == 1 else "values are"
            sentences.append(
                f"{line['label']}: {curve.not_finite:,} {are} not finite, the first at {curve.first_not_finite:g}"
            )
    more = [f"and {len(sentences) - 5} more lines"] if len(sentences) > 5 else []
    return "; ".join([*sentences[:5], *more])


def _data(parts: Sequence[RunPart], charts: Sequence[Line]) -> Json:
    """Return the numbers of the charts, for JSON."""
    curves = sum(len(chart["lines"]) for chart in charts)
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(1, curves)))
    runs = []
    for part in parts:
        marks = part.curves.marks
        some = slice(None, None, 1 + len(marks.epochs) // _MOST_MARKS)
        seconds = [round(value, 3) for value in marks.seconds[some]]
        ends = {"epoch": marks.epochs[some], "iteration": marks.iterations[some], "seconds": seconds}
        runs.append({"name": part.name, **ends})
    shown = []
    for chart in charts:
        lines = []
        for line in chart["lines"]:
            points = line["curve"].points(most)
            xs = [point[0] for point in points]
            ys = [_short(point) for point in points]
            lines.append({**{key: line[key] for key in ("run", "label", "color")}, "x": xs, "y": ys})
        shown.append({"title": chart["title"], "x": chart["x"], "lines": lines})
    return {"runs": runs, "charts": shown}


def _short(point: Point) -> float | None:
    return None if point[1] is None else float(f"{point[1]:.6g}")
