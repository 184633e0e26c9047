"""The sections of a page that are about one run, except its curves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from emrun.base.wording import counted, in_one_line, size_of, span
from emrun.epoch_data import named
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.report.curves import Curves
from emrun.runs.report.facts import (
    LogLine,
    checkpoints_of,
    code_of,
    config_text_of,
    failures_of,
    pictures_of,
    shown_of,
)
from emrun.runs.report.markup import Html, cut, facts, folded, joined, listing, section, table, tag
from emrun.runs.report.thinning import Curve
from emrun.runs.stored_run import StoredRun, size_below
from emrun.runs.summaries import Which
from emrun.shown import Text, Written
from emrun.storage.run import CHECKPOINTS

_LONGEST = 200  # characters of a value in a table
_MOST_STATISTICS = 100
_LAST_LINES = 60  # of the log
_MOST_TEXTS = 20
_LONGEST_TEXT = 20_000  # characters
_SHARES = re.compile(r"(model|reading|hooks|checkpoints|other) (\d{1,3})%")
_PROFILE = re.compile(r"epoch (\d+), ([^:]+): (model .*)", re.DOTALL)
_MEMORY = re.compile(r"memory (.+)$")


@dataclass(frozen=True, slots=True)
class RunPart:
    """A run on a page.

    Args:
        run: the run.
        name: what the page calls it.
        curves: its curves.
        by: the statistic that runs are compared by, and whether its lowest or highest value is the best.
        now: the time, for a run that is not at its end.
    """

    run: StoredRun
    name: str
    curves: Curves
    by: tuple[str, Which]
    now: datetime

    @property
    def best(self) -> tuple[float, float] | None:
        """The best finite value of the statistic, and its epoch; None if the run has not recorded one."""
        curve = self.curves.epochs.get(named(self.by[0]))
        point = None if curve is None else curve.lowest() if self.by[1] == "min" else curve.highest()
        return None if point is None else (point[1], point[0])

    @property
    def seconds(self) -> float | None:
        """How long the run took from its begin to its end; None if it is not known."""
        return self.run.seconds(self.now)


def in_words(by: tuple[str, Which]) -> str:
    """Return a statistic and which value of it is the best: `lowest valid/loss`."""
    return f"{'lowest' if by[1] == 'min' else 'highest'} {in_one_line('/'.join(named(by[0])), 60)}"


def badge(status: str) -> Html:
    """Return how a run stands, with a color and a sign besides the word."""
    sign = {"finished": "✓", "running": "▶", "pruned": "✂", "interrupted": "❚❚"}.get(status, "✕")
    return tag("span", tag("span", sign, aria_hidden="true"), f" {status}", class_=f"status {status}")


def key_class(index: int) -> str:
    """Return the CSS class of the sign that a run has beside its name; the lines of charts have the same look."""
    return f"key run{index % 24}"


def head(part: RunPart) -> Html:
    """Return what is at the top of a run: how it stands, what it reached, how it was started."""
    run, trace = part.run, part.run.trace
    best = part.best
    ended = "" if run.end is None or part.seconds is None else f"{run.end:%Y-%m-%d %H:%M:%S}"
    command: Any = trace.get("command") or ()
    return joined(
        [
            tag("p", badge(run.status), " ", run.reason, class_="outcome"),
            facts(
                [
                    ("best", "" if best is None else f"{best[0]:.6g} ({in_words(part.by)}, epoch {best[1]:g})"),
                    ("done", f"{counted(run.epochs_done, 'epoch')}, {counted(run.iterations_done, 'iteration')}"),
                    ("took", "" if part.seconds is None else span(part.seconds)),
                    ("began", "" if run.begin is None else f"{run.begin:%Y-%m-%d %H:%M:%S}"),
                    ("ended", ended),
                    ("looks", _looks(run)),
                    ("device", trace.get("device")),
                    ("ranks", trace.get("ranks") if trace.get("ranks", 1) > 1 else None),
                    ("seed", trace.get("seed")),
                    ("host", trace.get("host")),
                    ("directory", str(run.directory)),
                    ("command", tag("code", shlex.join(map(str, command))) if command else None),
                ]
            ),
            _resumes(trace),
        ]
    )


def _looks(run: StoredRun) -> str | None:
    """Return how often a run was evaluated on streams that it is not trained with, and its config in all runs there."""
    own = looks_of(run)
    if not own:
        return None
    every = looks_by_config(StoredRun(each.parent) for each in run.directory.parent.glob("*/trace.yaml"))
    all_ = every.get(run.directory, own)
    return "; ".join(
        f"{stream} {counted(own[stream], 'time')}, all runs of its config {all_[stream]}" for stream in own
    )


def sections(part: RunPart, *, picture_bytes: int, log: Sequence[LogLine], most_config: int) -> Html:
    """Return the sections of a run below its curves.

    Args:
        part: the run.
        picture_bytes: how many bytes its pictures have at most.
        log: its log.
        most_config: how many characters of its config are shown.
    """
    shown = shown_of(part.run)
    return joined(
        [
            _statistics(part.curves),
            _time(part, log),
            _pictures(part.run, picture_bytes, shown),
            _texts(shown),
            section(
                "Failures",
                table(["failure", "error", "where", "repeat it with"], failures_of(part.run), label="Failures"),
            ),
            _checkpoints(part.run),
            _config(part.run, most_config),
            _environment(part.run),
            _log(part.run, log),
            problems(part),
        ]
    )


def problems(part: RunPart) -> Html:
    """Return what of a run is damaged; nothing if all could be read."""
    found = list(dict.fromkeys((*part.curves.problems, *part.run.problems)))
    if part.curves.left_out:
        found.append(f"{counted(len(part.curves.left_out), 'more statistic')} not shown: there are too many")
    return section("What could not be read", tag("ul", [tag("li", each) for each in found]) if found else None)


def _resumes(trace: Mapping[str, Any]) -> Html:
    rows = []
    resumes: Any = trace.get("resumes") or ()
    for each in resumes:
        before = each.get("before") if isinstance(each.get("before"), dict) else {}
        ended = ": ".join(str(before[key]) for key in ("status", "reason") if before.get(key))
        if before.get("directory") not in (None, trace.get("directory")):  # it was copied or moved
            ended += f", in {before['directory']}"
        changed = each.get("changed")
        changes = ", ".join(map(str, changed)) if isinstance(changed, list) else changed
        rows.append([_text(each.get("time")), _text(ended), _text(each.get("checkpoint")), _text(changes)])
    return table(["resumed", "it had ended", "from checkpoint", "changed"], rows, label="Resumes")


def _statistics(curves: Curves) -> Html:
    """Return the last, lowest and highest values of all statistics: what the curves show, as numbers."""
    rows = [[f"{stream}/{name}", *_values(curve)] for (stream, name), curve in curves.epochs.items()]
    headers = ["statistic", "last", "lowest", "in epoch", "highest", "in epoch"]
    left = len(rows) - _MOST_STATISTICS
    return section(
        "Statistics",
        table(
            headers, rows[:_MOST_STATISTICS], numeric=range(1, 6), label="Statistics of the epochs", is_sortable=True
        ),
        tag("p", f"{left} more statistics") if left > 0 else None,
    )


def _values(curve: Curve) -> list[Any]:
    points = (curve.last, curve.lowest(), curve.highest())
    last, low, high = ((None, None) if point is None else (point[1], int(point[0])) for point in points)
    return [last[0], *low, *high]


def _time(part: RunPart, log: Sequence[LogLine]) -> Html:
    marks, run = part.curves.marks, part.run
    epochs, trained = max(marks.epochs), marks.total - marks.seconds[0]  # without the evaluation before the first epoch
    profile = [each.text for each in log if each.source == "log_profile"]
    lines = [found for text in profile if (found := _PROFILE.fullmatch(text))]
    verdicts = [text for text in profile if not _PROFILE.fullmatch(text)]
    memory = next((found[1] for each in reversed(lines) if (found := _MEMORY.search(each[3]))), None)
    rate = f"{run.iterations_done / trained:,.4g} iterations a second" if trained and run.iterations_done else None
    shares = dict(_SHARES.findall(lines[-1][3])) if lines else {}
    rows = [[name, _bar(int(share))] for name, share in shares.items()]
    return section(
        "Time and memory",
        facts(
            [
                ("in epochs", span(marks.total) if marks.total else None),
                ("an epoch", span(trained / epochs) if epochs and trained else None),
                ("speed", rate),
                ("most memory", memory),
                ("verdict", verdicts[-1] if verdicts else None),
            ]
        ),
        tag("p", f"Where the time of epoch {lines[-1][1]} went ({lines[-1][2]}):") if rows else None,
        table(["part", "share"], rows, label="Where the time went"),
        _forecast(part, memory),
        None if profile or not trained else tag("p", "The hook LogProfile says where the time went.", class_="hint"),
    )


def _forecast(part: RunPart, memory: str | None) -> Html:
    """Return what `emrun check` has forecast for a run, beside what happened, as far as a run knows it."""
    run = part.run
    forecast: Any = run.trace.get("forecast")
    if forecast is None:
        return Html("")
    root, newest = run.directory / CHECKPOINTS, next(iter(checkpoints_of(run)), None)
    sofar = "" if run.status == "finished" else ", so far"
    took, record = part.curves.marks.total, run.record.size
    happened = {
        "training": (span(took) if took else None, f"measured: the time in epochs{sofar}"),
        "tensors of a step": (memory, "measured by LogProfile, with all else in the process"),
        "checkpoint": (newest and size_of(size_below(root / newest.directory)), "exact: the newest one"),
        "kept checkpoints": (newest and size_of(size_below(root)), f"exact{sofar}"),
        "record": (record and size_of(record), f"exact{sofar}"),
    }
    rows = [
        [what, size_of(each["bytes"]) if "bytes" in each else span(each.get("seconds", 0)), each["how"], *found]
        for what, each in forecast["values"].items()
        if (found := happened.get(what)) and found[0]
    ]
    return joined(
        [
            tag("p", f"What emrun check has forecast ({forecast['made']}), and what happened:") if rows else None,
            table(["", "forecast", "how it is known", "happened", "how it is known"], rows, label="Forecast"),
        ]
    )


def _bar(share: int) -> Html:
    bar = tag("rect", width=str(2 * min(share, 100)), height="10", class_="bar")
    return joined(
        [tag("span", f"{share} %", class_="share"), tag("svg", bar, width="200", height="10", aria_hidden="true")]
    )


def _pictures(run: StoredRun, most: int, shown: Mapping[str, Written]) -> Html:
    found, left_out = pictures_of(run, most, shown)
    pictures = [
        tag("figure", tag("img", src=url, alt=path, loading="lazy"), tag("figcaption", path))
        for path, url in found.items()
    ]
    more = f"{counted(left_out, 'more picture')} in the run directory." if left_out else None
    return section(
        "Pictures", tag("div", pictures, class_="pictures") if pictures else None, tag("p", more) if more else None
    )


def _texts(shown: Mapping[str, Written]) -> Html:
    texts = [(name, listing(cut(each.text, _LONGEST_TEXT))) for name, each in shown.items() if isinstance(each, Text)]
    return section("Texts", *(folded(name, text, is_open=True) for name, text in texts[:_MOST_TEXTS]))


def _checkpoints(run: StoredRun) -> Html:
    rows = checkpoints_of(run)
    headers = ["checkpoint", "epoch", "iteration", "size", "names"]
    resume = tag("p", "Resume with ", tag("code", shlex.join(["emrun", "resume", str(run.directory)])), ".")
    may_resume = rows and run.status in ("interrupted", "killed", "failed")
    return section(
        "Checkpoints",
        table(headers, rows, numeric=[1, 2, 3], label="Checkpoints"),
        resume if may_resume else None,
    )


def _config(run: StoredRun, most: int) -> Html:
    command: Any = run.trace.get("command") or ()
    given = [str(word) for word in command if "=" in str(word) and not str(word).startswith("-")]
    codes = Html(", ".join(tag("code", each) for each in given))
    overrides = tag("p", "Given in the command: ", codes) if given else None
    return section("Config", overrides, folded("config.yaml", listing(cut(config_text_of(run), most))))


def _environment(run: StoredRun) -> Html:
    trace, code = run.trace, code_of(run)
    git = []
    for each in code.get("repositories", ()):
        changes = "" if each["sha256"] is None else " with changes"
        git.append(f"{each['directory']} {'no commit' if each['commit'] is None else each['commit'][:12]}{changes}")
    packages = [f"{name} {version}" for name, version in sorted(code.get("packages", {}).items())]
    modules = sorted(code.get("modules", {}))
    return section(
        "Environment and code",
        facts(
            [
                *((name, trace.get(name)) for name in ("emrun", "torch", "python")),
                ("threads", trace.get("threads")),
                ("git", ", ".join(git) or trace.get("git_commit")),
            ]
        ),
        folded(f"{counted(len(modules), 'module')} of the run", listing("\n".join(modules))),
        folded(counted(len(packages), "package"), listing("\n".join(packages))),
    )


def _log(run: StoredRun, log: Sequence[LogLine]) -> Html:
    lines = "\n".join(f"{each.level:8}{each.text}" for each in log).splitlines()
    shown = cut("\n".join(lines[-_LAST_LINES:]), 20_000)
    title = f"the last {len(lines[-_LAST_LINES:])} of {len(lines):,} lines" if len(lines) > _LAST_LINES else "train.log"
    return section("Log", folded(title, listing(shown), is_open=run.status == "failed") if lines else None)


def _text(value: Any) -> str | None:
    return (
        None
        if value is None or value == ""
        else in_one_line(value if isinstance(value, str) else json.dumps(value, default=str), _LONGEST)
    )
