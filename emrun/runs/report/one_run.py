"""What a page shows of one run, except its curves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from emrun.base.types import Json
from emrun.base.wording import counted, few, in_one_line, short, span
from emrun.epoch_data import brief_statistics, named
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.report.curves import Curves
from emrun.runs.report.facts import (
    LogLine,
    checkpoints_of,
    code_of,
    config_text_of,
    cut,
    failures_of,
    pictures_of,
    shown_of,
)
from emrun.runs.report.thinning import Curve
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import Which
from emrun.shown import Text
from emrun.storage.lock import EVALUATIONS

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


def shown(part: RunPart, *, picture_bytes: int, log: Sequence[LogLine], most_config: int) -> Json:
    """Return what the template `run.html` shows of a run.

    Args:
        part: the run.
        picture_bytes: how many bytes its pictures have at most.
        log: its log.
        most_config: how many characters of its config are shown.
    """
    run = part.run
    written = shown_of(run)
    pictures, left_out = pictures_of(run, picture_bytes, written)
    texts = [(name, cut(item.text, _LONGEST_TEXT)) for name, item in written.items() if isinstance(item, Text)]
    statistics = [[f"{stream}/{name}", *_values(curve)] for (stream, name), curve in part.curves.epochs.items()]
    checkpoints = checkpoints_of(run)
    may_resume = checkpoints and run.status in ("interrupted", "killed", "failed")
    code = code_of(run)
    content = {
        "name": part.name,
        "status": run.status,
        "reason": run.reason,
        "epochs": run.epochs_done,
        "facts": _facts(part),
        "resumes": _resumes(run.trace),
        "statistics": statistics[:_MOST_STATISTICS],
        "more_statistics": len(statistics) - _MOST_STATISTICS,
        "time": _time(part, log),
        "pictures": pictures,
        "more_pictures": counted(left_out, "more picture") if left_out else None,
        "texts": texts[:_MOST_TEXTS],
        "failures": failures_of(run),
        "checkpoints": checkpoints,
        "resume": shlex.join(["emrun", "resume", str(run.directory)]) if may_resume else None,
        "overrides": _overrides(run.trace),
        "config": cut(config_text_of(run), most_config),
        "environment": _environment(run.trace, code),
        "modules": sorted(code.get("modules", {})),
        "packages": [f"{name} {version}" for name, version in sorted(code.get("packages", {}).items())],
        "log": _log(log),
    }
    return content | {"problems": _problems(part)}


def _facts(part: RunPart) -> list[tuple[str, Any]]:
    """Return what is at the top of a run: what it reached, how it was started."""
    run = part.run
    trace = part.run.trace
    best = part.best
    command: Any = trace.get("command") or ()
    ended = None if part.seconds is None else run.end
    return [
        ("best", best and f"{best[0]:.6g} ({in_words(part.by)}, epoch {best[1]:g})"),
        ("done", f"{counted(run.epochs_done, 'epoch')}, {counted(run.iterations_done, 'iteration')}"),
        ("took", None if part.seconds is None else span(part.seconds)),
        ("began", run.begin and f"{run.begin:%Y-%m-%d %H:%M:%S}"),
        ("ended", ended and f"{ended:%Y-%m-%d %H:%M:%S}"),
        ("evaluated", "; ".join(_evaluated(run)) or None),
        ("looks", _looks(run)),
        ("device", trace.get("device")),
        ("ranks", trace.get("ranks") if trace.get("ranks", 1) > 1 else None),
        ("seed", trace.get("seed")),
        ("host", trace.get("host")),
        ("directory", run.directory),
        ("command", shlex.join(map(str, command))),
    ]


def _evaluated(run: StoredRun) -> Iterator[str]:
    """Yield the statistics of the latest evaluation of each stream that the run is not trained with."""
    for stream, count in looks_of(run).items():
        results = StoredRun(run.directory / EVALUATIONS / f"{stream}-{count}").last_epoch.get("streams", {})
        found = brief_statistics(results.get(stream, {}))
        values = [f"{name} {short(value)}" for name, value in found if isinstance(value, int | float)]
        if values:
            yield f"{stream}: {few(values, _LONGEST)}"


def _looks(run: StoredRun) -> str | None:
    """Return how often a run was evaluated on streams that it is not trained with, and its config in all runs there."""
    looks = looks_of(run)
    if not looks:
        return None
    every = looks_by_config(StoredRun(trace.parent) for trace in run.directory.parent.glob("*/trace.yaml"))
    of_config = every.get(run.directory, looks)
    return "; ".join(
        f"{stream} {counted(looks[stream], 'time')}, all runs of its config {of_config[stream]}" for stream in looks
    )


def _resumes(trace: Mapping[str, Any]) -> list[list[str | None]]:
    rows = []
    resumes: Any = trace.get("resumes") or ()
    for resume in resumes:
        before = resume.get("before") if isinstance(resume.get("before"), dict) else {}
        ended = ": ".join(str(before[key]) for key in ("status", "reason") if before.get(key))
        if before.get("directory") not in (None, trace.get("directory")):  # it was copied or moved
            ended += f", in {before['directory']}"
        changed = resume.get("changed")
        changes = ", ".join(map(str, changed)) if isinstance(changed, list) else changed
        rows.append([_text(resume.get("time")), _text(ended), _text(resume.get("checkpoint")), _text(changes)])
    return rows


def _values(curve: Curve) -> list[Any]:
    return [_cells(curve.last)[0], *_cells(curve.lowest()), *_cells(curve.highest())]


def _cells(point: tuple[float, float] | None) -> tuple[float | None, int | None]:
    return (None, None) if point is None else (point[1], int(point[0]))


def _problems(part: RunPart) -> list[str]:
    """Return what of a run is damaged."""
    problems = list(dict.fromkeys((*part.curves.problems, *part.run.problems)))
    if part.curves.left_out:
        problems.append(f"{counted(len(part.curves.left_out), 'more statistic')} not shown: there are too many")
    return problems


def _time(part: RunPart, log: Sequence[LogLine]) -> Json:
    """Return how long the epochs took, and what LogProfile has said of the last one."""
    marks = part.curves.marks
    run = part.run
    epochs = max(marks.epochs)
    trained = marks.total - marks.seconds[0]  # without the evaluation before the first epoch
    profile = [line.text for line in log if line.source == "log_profile"]
    profiles = [match for text in profile if (match := _PROFILE.fullmatch(text))]
    verdicts = [text for text in profile if not _PROFILE.fullmatch(text)]
    memory = None
    for match in profiles:
        newer = _MEMORY.search(match[3])
        memory = memory if newer is None else newer[1]
    rate = f"{run.iterations_done / trained:,.4g} iterations a second" if trained and run.iterations_done else None
    epoch, speed, shares = profiles[-1].groups() if profiles else (None, None, "")
    return {
        "facts": [
            ("in epochs", span(marks.total) if marks.total else None),
            ("an epoch", span(trained / epochs) if epochs and trained else None),
            ("speed", rate),
            ("most memory", memory),
            ("verdict", verdicts[-1] if verdicts else None),
        ],
        "epoch": epoch,
        "speed": speed,
        "shares": [(name, {"share": min(int(share), 100)}) for name, share in _SHARES.findall(shares)],
        "hint": trained and not profile,
    }


def _overrides(trace: Mapping[str, Any]) -> list[str]:
    command: Any = trace.get("command") or ()
    return [str(word) for word in command if "=" in str(word) and not str(word).startswith("-")]


def _environment(trace: Mapping[str, Any], code: Mapping[str, Any]) -> list[tuple[str, Any]]:
    git = []
    for repository in code.get("repositories", ()):
        changes = "" if repository["sha256"] is None else " with changes"
        commit = "no commit" if repository["commit"] is None else repository["commit"][:12]
        git.append(f"{repository['directory']} {commit}{changes}")
    known = [(name, trace.get(name)) for name in ("emrun", "torch", "python", "threads")]
    return [*known, ("git", ", ".join(git) or trace.get("git_commit"))]


def _log(log: Sequence[LogLine]) -> dict[str, str]:
    lines = "\n".join(f"{line.level:8}{line.text}" for line in log).splitlines()
    title = f"the last {_LAST_LINES} of {len(lines):,} lines" if len(lines) > _LAST_LINES else "train.log"
    return {"title": title, "text": cut("\n".join(lines[-_LAST_LINES:]), _LONGEST_TEXT)}


def _text(value: Any) -> str | None:
    if value is None or value == "":
        return None
    return in_one_line(value if isinstance(value, str) else json.dumps(value, default=str), _LONGEST)
