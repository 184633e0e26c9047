"""The page of runs: one HTML file with its style, its script and its data, that needs no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from emrun import __version__
from emrun.base.errors import RunInUse, StorageError, UsageError
from emrun.base.wording import counted, did_you_mean, from_here, in_one_line
from emrun.epoch_data import LEARNING_RATE, MOST_CLASSES, RUNNING, is_rate, named
from emrun.runs.columns import Row
from emrun.runs.pruning import better
from emrun.runs.report import several_runs
from emrun.runs.report.curves import curves_of
from emrun.runs.report.facts import log_of
from emrun.runs.report.markup import Html, joined, listing, section, tag
from emrun.runs.report.one_run import RunPart, head, key_class, sections
from emrun.runs.report.thinning import Curve, Point
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import Summaries, Which
from emrun.storage.files import opened_regular, write_atomically
from emrun.storage.trace import TRACE

_LOG = logging.getLogger(__name__)

REPORT = "report.html"
"""The name of the page in a run directory."""
_GENERATOR = '<meta name="generator" content="emrun">'  # by which a page of emrun is known
_MOST_POINTS = 1_600  # of a curve
_FEWEST_POINTS = 40
_MOST_MARKS = 500  # epochs whose ends tell where a curve over epochs lies over iterations or time
_MOST_STRETCHES, _FEWEST_STRETCHES = 1_000, 200  # of a curve, each with up to two points
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
    statistic = _statistic(runs, by)
    now = datetime.now().astimezone()
    most = max(_FEWEST_STRETCHES, min(_MOST_STRETCHES, _MOST_STRETCHES * _FULL // len(runs)))
    curves = curves_of([run.directory for run in runs], most)
    parts = [
        RunPart(run, name, each, statistic, now) for run, name, each in zip(runs, _names(runs), curves, strict=True)
    ]
    recorded = dict.fromkeys(key for part in parts for key in part.curves.epochs)
    are_all = recorded and not any(part.curves.left_out for part in parts)  # it may be one without a curve
    if by is not None and are_all and named(statistic[0]) not in recorded:
        near = did_you_mean(statistic[0], map("/".join, recorded))
        raise UsageError(f"--by: no run has recorded the statistic {statistic[0]!r}{near}")
    charts = list(_charts(parts))
    body = _of_one(parts[0], charts) if len(parts) == 1 else _of_several(parts, charts)
    heading = title or (parts[0].name if len(parts) == 1 else counted(len(parts), "run"))
    return _whole(heading, body, _data(parts, charts), reloads)


def write_page(file: Path, runs: Sequence[StoredRun], *, overwrites: bool = False, **options: Any) -> int:
    """Write the page of runs into a file, whole or not at all, and return its size in bytes.

    Args:
        file: the file.
        runs: the runs.
        overwrites: whether to replace also a file that is not a page of emrun.
        options: see `page`.

    Raises:
        UsageError: see `page`; or the file is not a page of emrun.
        StorageError: the file cannot be written.
    """
    if not overwrites and os.path.lexists(file) and not _is_page(file):
        raise UsageError(f"{file} exists, and is not a page of emrun; choose another file with -o, or add --overwrite")
    content = page(runs, **options).encode("utf-8", "backslashreplace")
    write_atomically(file, content)
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
        write_page(directory / REPORT, [StoredRun(from_here(directory))])
    except RunInUse:  # whoever has taken the run over writes the page
        pass
    except Exception as error:
        _LOG.warning("%s was not written: %s", directory / REPORT, in_one_line(f"{type(error).__name__}: {error}"))


def complete(directory: Path) -> None:
    """Write the page of a run that has ended if its process was killed before; the caller has the lock of the run."""
    written = [path.stat().st_mtime for path in (directory / REPORT, directory / TRACE) if path.is_file()]
    if len(written) < 2 or written[0] < written[1]:
        write_at_end(directory)


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


def _of_one(part: RunPart, charts: Sequence[Line]) -> Html:
    log = log_of(part.run)
    plans = [list(lines) for is_plan, lines in groupby(log, lambda each: each.source == "schedule_plan") if is_plan]
    plan = [each.text for each in plans[-1]] if plans else []  # the length of the run may be known late, or change
    rates = [index for index, each in enumerate(charts) if is_rate(each["name"])]
    others = [index for index in range(len(charts)) if index not in rates]
    return joined(
        [
            head(part),
            section("Curves", _controls(), _places(charts, others)) if others else _nothing(part),
            section("Learning rate", listing("\n".join(plan)), _places(charts, rates)),
            sections(part, picture_bytes=_PICTURES, log=log, most_config=_CONFIGS),
        ]
    )


def _nothing(part: RunPart) -> Html:
    what = "It has not finished an epoch." if not part.run.epochs_done else "It recorded no statistics."
    return section("Curves", tag("p", f"There is nothing to draw. {what}", class_="hint"))


def _of_several(parts: Sequence[RunPart], charts: Sequence[Line]) -> Html:
    differences = several_runs.differences_of(parts)
    rest = []
    for index, part in enumerate(parts):
        log = log_of(part.run) if len(parts) <= _LOGS or part.run.status == "failed" else ()
        sizes = {"picture_bytes": _PICTURES // len(parts), "most_config": _CONFIGS // len(parts)}
        inside = joined([head(part), sections(part, log=log[-200:], **sizes)])
        title = joined([tag("span", "", class_=key_class(index)), part.name])
        rest.append(tag("details", tag("summary", title), inside, id=f"run{index}"))
    toggles = [
        tag(
            "label", tag("input", type="checkbox", checked=True, data_run=str(index)),
            tag("span", "", class_=key_class(index)), part.name,
        )
        for index, part in enumerate(parts)
    ]  # fmt: skip
    shown = tag(
        "details", tag("summary", "Runs in the curves"), tag("div", toggles, class_="toggles"), open=len(parts) <= 8
    )
    return joined(
        [
            several_runs.summary(parts, differences),
            several_runs.repeats(parts, differences),
            several_runs.pictures(parts, differences),
            section("Curves", _controls(), shown, _places(charts, range(len(charts)))) if charts else None,
            several_runs.differing(parts, differences),
            section("Each run", rest),
        ]
    )


def _charts(parts: Sequence[RunPart]) -> Iterator[Line]:
    """Yield the charts: their name, their x axis, and their lines with a run, a label, a color and a curve.

    Of one run, a chart has a line for each stream; of several, it is about one stream and has a line for each run.
    """
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    classes = Counter((key[0], _variable(key[1])) for key in {key for part in parts for key in part.curves.epochs})
    streams = list(dict.fromkeys(stream for part in parts for stream, _ in part.curves.epochs))
    for index, part in enumerate(parts):
        for (stream, name), curve in part.curves.epochs.items():
            line = {"run": index, "label": part.name, "color": index, "curve": curve}
            variable = _variable(name)
            if variable and classes[stream, variable] > MOST_CLASSES:
                if len(parts) == 1:  # otherwise the pages of the runs have them
                    lines = found.setdefault(("epoch", f"{variable}{_BY_CLASS}", stream), [])
                    lines.append(line | {"label": name.removeprefix(f"{variable}/"), "color": len(lines)})
            elif is_rate(name) and _same(curve, part.curves.epochs.get((stream, LEARNING_RATE))):
                continue
            elif len(parts) == 1:
                line |= {"label": stream, "color": streams.index(stream)}
                found.setdefault(("epoch", name), []).append(line)
            else:
                found.setdefault(("epoch", name, stream), []).append(line)
        for name, curve in part.curves.steps.items():
            if is_rate(name) and _same(curve, part.curves.steps.get(LEARNING_RATE)):
                continue
            label = "train" if len(parts) == 1 else part.name
            line = {"run": index, "label": label, "color": index, "curve": curve}
            found.setdefault(("iteration", name), []).append(line)
    order = sorted(found, key=lambda key: (is_rate(key[1]), key[0] != "epoch", key[1].endswith(_BY_CLASS)))
    for key in order[:_MOST_CHARTS]:
        x, name = key[:2]
        lines = [each for each in found[key] if each["curve"].count]
        of = f"{key[2]}/{name}" if len(key) > 2 else name
        if lines:
            yield {"name": name, "title": in_one_line(of, _LONGEST_NAME), "x": x, "lines": lines}


def _variable(name: str) -> str:
    """Return the variable of which a name may be the statistic of a class; empty if the name is another one."""
    variable, _, last = name.rpartition("/")
    return "" if last in (*RUNNING, "median") else variable


def _same(curve: Curve, first: Curve | None) -> bool:
    """Return whether the rate of a group of parameters is in all places that of the first group."""
    return first is not None and curve is not first and curve.points(_MOST_POINTS) == first.points(_MOST_POINTS)


def _controls() -> Html:
    axes = [tag("option", name, value=value) for value, name in _AXES.items()]
    return tag(
        "form",
        tag("label", "x axis ", tag("select", axes, id="axis")),
        tag("label", tag("input", type="checkbox", id="log"), " log scale"),
        tag(
            "label", "smoothing ", tag("input", type="range", id="smooth", min="0", max="0.98", step="0.02", value="0")
        ),
        tag("button", "reset zoom", type="button", id="reset"),
        tag("span", "Drag to zoom, double-click to reset; arrow keys move along a curve, + and - zoom.", class_="hint"),
        class_="controls",
    )


_AXES = {"own": "epochs or iterations", "epoch": "epochs", "iteration": "iterations", "seconds": "time"}


def _places(charts: Sequence[Line], indexes: Sequence[int]) -> Html:
    figures = []
    for index in indexes:
        chart = charts[index]
        of = "epochs" if chart["x"] == "epoch" else "iterations"
        figures.append(
            tag(
                "figure",
                tag("figcaption", tag("b", in_one_line(chart["title"], _LONGEST_NAME)), f" over {of}"),
                tag(
                    "div", class_="chart", data_chart=str(index), tabindex="0", role="img",
                    aria_label=_spoken(chart, of),
                ),
                tag("p", class_="tip", aria_live="polite"),
                _gaps(chart),
            )
        )  # fmt: skip
    return tag("div", figures, class_="charts") if figures else Html("")


def _spoken(chart: Line, of: str) -> str:
    """Return what a screen reader says of a chart."""
    said = []
    for line in chart["lines"][:12]:
        low, high, last = line["curve"].lowest(), line["curve"].highest(), line["curve"].last
        if low is not None and high is not None:
            extremes = f"lowest {low[1]:.4g} at {low[0]:g}, highest {high[1]:.4g} at {high[0]:g}"
            said.append(f"{line['label']}: last {last[1]:.4g}, {extremes}")
    more = f"; and {len(chart['lines']) - 12} more" if len(chart["lines"]) > 12 else ""
    return f"{chart['title']} over {of}. {'; '.join(said)}{more}"


def _gaps(chart: Line) -> Html:
    """Return how many values of a chart are not finite, and so not drawn."""
    said = []
    for line in chart["lines"]:
        curve: Curve = line["curve"]
        if curve.not_finite:
            are = "value is" if curve.not_finite == 1 else "values are"
            said.append(
                f"{line['label']}: {curve.not_finite:,} {are} not finite, the first at {curve.first_not_finite:g}"
            )
    more = [f"and {len(said) - 5} more lines"] if len(said) > 5 else []
    return tag("p", "; ".join([*said[:5], *more]), class_="warning") if said else Html("")


def _data(parts: Sequence[RunPart], charts: Sequence[Line]) -> str:
    """Return the numbers of the charts as JSON, without characters that HTML knows."""
    curves = sum(len(chart["lines"]) for chart in charts)
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(1, curves)))
    runs = []
    for part in parts:
        marks = part.curves.marks
        some = slice(None, None, 1 + len(marks.epochs) // _MOST_MARKS)
        seconds = [round(each, 3) for each in marks.seconds[some]]
        ends = {"epoch": marks.epochs[some], "iteration": marks.iterations[some], "seconds": seconds}
        runs.append({"name": part.name, **ends})
    shown = []
    for chart in charts:
        lines = []
        for line in chart["lines"]:
            points = line["curve"].points(most)
            xs, ys = [point[0] for point in points], [_short(point) for point in points]
            lines.append({**{key: line[key] for key in ("run", "label", "color")}, "x": xs, "y": ys})
        shown.append({"title": chart["title"], "x": chart["x"], "lines": lines})
    text = json.dumps({"runs": runs, "charts": shown}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _short(point: Point) -> float | None:
    return None if point[1] is None else float(f"{point[1]:.6g}")


def _whole(title: str, body: Html, data: str, reloads: bool) -> str:
    style, script = _assets()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            _GENERATOR,
            *([tag("meta", http_equiv="refresh", content=str(_RELOAD))] if reloads else []),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            tag("title", f"{title} - emrun"),
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f"<main>{tag('h1', title)}{body}</main>",
            tag("footer", f"Written by emrun {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M}."),
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


@functools.cache
def _assets() -> tuple[str, str]:
    """Return the style and the script of all pages."""
    files = resources.files("emrun.runs.report")
    names = ("uplot.min.css", "page.css", "uplot.min.js", "page.js")
    found = [files.joinpath(name).read_text(encoding="utf-8").strip() for name in names]
    return "\n".join(found[:2]), "\n".join(found[2:])


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
