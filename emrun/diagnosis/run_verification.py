"""Verify that a run directory gives what it recorded: a checkpoint's statistics, and the first steps again."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.errors import EmrunError
from emrun.base.temporary import temporary_folder
from emrun.base.types import Json
from emrun.base.wording import counted, in_one_line, listed
from emrun.config.config import read_config
from emrun.config.interpolation import escaped
from emrun.config.plan import code_directories
from emrun.diagnosis.recorded_trainings import Job
from emrun.diagnosis.verification import forks_for
from emrun.epoch_data import is_rate, statistics
from emrun.launch.jobs import Jobs
from emrun.runs.comparison import compare, compare_steps
from emrun.runs.stored_run import MISSING, StoredRun
from emrun.storage.checkpoints.finding import find
from emrun.storage.checkpoints.manifest import verify
from emrun.storage.run import CHECKPOINTS, CONFIG
from emrun.training.evaluate import name_of_checkpoint

DECIDES = "decides the results"
MAY_CHANGE = "may change the results"
HARDLY = "hardly matters"
"""How severe a difference is."""
_STEPS = 20
_FRAMES = re.compile(r"\ATraceback.*\n +[^\n]*\n", re.DOTALL)  # of a traceback, before its error
_COMPUTING = ("torch", "numpy", "emrun")
_AGAIN = "again"
_FIRST_CONFIG = "config-1.yaml"  # the config until the first resume that changed it
_MODULES = {"changed": "has changed", "only in a": "is not imported now", "only in b": "is new"}
_UNKNOWN = (
    "unknown: nothing that emrun has recorded differs; a kernel is not deterministic (set `deterministic: true`), or "
    "something depends on the time, or on files that are not the data"
)
_Part = tuple[str, str, Mapping[str, Any]]  # `same`, `differs` or `left out`; how much, or why; the values that differ


def verify_run(run: StoredRun, overrides: list[str]) -> Json:
    """Evaluate the checkpoint `best`, or else `latest`, of a run again, train its first steps again, and compare.

    Each part has processes of its own, as many as the run had ranks, and writes into a temporary directory; the run
    directory is only read. Trackers are left out. If the directory where the run was started is gone, the modules of
    the user are those that the run has recorded.

    Args:
        run: the run.
        overrides: overrides of the config, such as the new place of the data.

    Returns:
        `same`: whether no part differs, and at least one is the same. `rows`: the parts, each with `what`, `result`
        (`same`, `differs` or `left out`) and `text`. `differences`: a severity -> what is not as it was for the run,
        each in a sentence. `notes`: what could not be compared. `cause`: the likely cause of a part that differs.

    Raises:
        ConfigError: the config of the run cannot be read, or an override cannot be applied.
    """
    # the config, with the code of the run
    config = read_config(run.directory)
    directory = run.directory.absolute()
    if not all(Path(home).is_dir() for home in code_directories(config.root)):
        modules = directory / "code" / "modules"  # not there if the run has no code of its own
        overrides = [
            f"code_directory={json.dumps(escaped(str(modules if modules.is_dir() else directory)))}",
            *overrides,
        ]
    config = config.overridden(overrides)
    ranks = int(run.trace.get("ranks") or 1)
    forks = None
    with suppress(Exception):  # the processes will say what is wrong with the code
        forks = forks_for(config) if ranks == 1 else None

    # the parts
    rows: list[dict[str, str]] = []
    values: Mapping[str, Any] = {}
    comparison: Mapping[str, Any] = {"not_compared": {}}
    with temporary_folder("verify") as place:
        for what, part in (("statistics", evaluated), ("first steps", _trained)):
            try:
                result, text, values = part(
                    run, directory, partial(Job, str(place), overrides=overrides, ranks=ranks), forks
                )
            except EmrunError as error:
                result = "left out"
                text = without_frames(error)
            rows.append({"what": what, "result": result, "text": in_one_line(text)})
        if (place / _AGAIN / CONFIG).exists():
            comparison = compare(run, StoredRun(place / _AGAIN))

    # what may have made the difference
    results = [row["result"] for row in rows]
    differences: dict[str, list[str]] = {DECIDES: [], MAY_CHANGE: [], HARDLY: []}
    for severity, sentence in _differences(comparison, run.trace.get("seed"), config.get("seed")):
        differences[severity].append(in_one_line(sentence))
    return {
        "same": "differs" not in results and "same" in results,
        "rows": rows,
        "differences": differences,
        "notes": [f"{part} not compared: {why}" for part, why in comparison["not_compared"].items()],
        "cause": _cause(differences, results, values) if "differs" in results else None,
    }


def evaluated(run: StoredRun, directory: Path, job: Callable[..., Job], forks: Jobs | None) -> _Part:
    """Compare the statistics that a checkpoint gives with those of its epoch."""
    name = name_of_checkpoint(directory / CHECKPOINTS, None)
    trained = run.value("main_loop.train_stream_name")
    done = verify(find(directory / CHECKPOINTS, name)).iteration
    lines = [epoch["streams"] for epoch in run.epochs() if epoch["iteration"] == done]
    skipped = "train" if trained is MISSING else trained
    recorded = {
        stream: variables
        for stream, variables in (lines[-1] if lines else {}).items()
        if stream != skipped and variables
    }
    if not recorded:
        return "left out", f"no statistics of an evaluation are recorded for checkpoint {name}", {}
    evaluation = job(config=str(directory), name="evaluated", checkpoint=name, streams=list(recorded)).run(forks)
    now = {stream: dict(statistics(variables)) for stream, variables in evaluation.final["statistics"].items()}
    pairs = {
        f"{stream}/{key}": [value, now[stream][key]]
        for stream, variables in recorded.items()
        for key, value in statistics(variables)
        if key in now[stream]
    }
    values = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if values:
        return "differs", f"checkpoint {name}, {_shown(values)}", {}
    size = sum(len(list(statistics(variables))) for variables in recorded.values())
    compared = f"{len(pairs)} of {counted(size, 'statistic')}" if len(pairs) < size else counted(size, "statistic")
    return ("same" if pairs else "left out"), f"checkpoint {name}, {compared} to the last bit", {}


def _trained(run: StoredRun, directory: Path, job: Callable[..., Job], forks: Jobs | None) -> _Part:
    """Compare the step record of the first steps, trained again, with that of the run."""
    last = min(_STEPS, run.iterations_done)
    recorded = list(itertools.takewhile(lambda chunk: chunk.first <= last, run.steps()))
    if not recorded:
        return "left out", f"none of the first {_STEPS} steps is recorded", {}
    older = directory / _FIRST_CONFIG
    first = str(older if older.is_file() else directory)
    repetition = job(config=first, name=_AGAIN, end=last, prepared=str(directory))
    repetition.run(forks)
    compared = compare_steps(recorded, StoredRun(repetition.directory).steps())
    if compared["first"] is None:
        return "same", f"{counted(compared['compared'], 'step')} to the last bit", {}
    values = compared["first"]["values"]
    return "differs", f"iteration {compared['first']['iteration']}, {_shown(values)}", values


def without_frames(error: EmrunError) -> str:
    """Return the text of an error in one line, of a traceback only its error."""
    return in_one_line(" ".join(_FRAMES.sub("", str(error)).split()))


def _shown(values: Mapping[str, Any]) -> str:
    name, (recorded, now) = next(iter(values.items()))
    more = f" (and {counted(len(values) - 1, 'more value')})" if len(values) > 1 else ""
    return f"{name}: {recorded!r} recorded, {now!r} now{more}"


def _differences(comparison: Mapping[str, Any], began: Any, seed: Any) -> Iterator[tuple[str, str]]:
    """Yield what differs between a run and its first steps trained again: a severity, and a sentence."""
    if began not in (None, seed):
        yield DECIDES, f"config: the seed is {seed}, and the run began with {began}"
    for batch in comparison.get("data") or ():
        yield (
            DECIDES,
            f"data: the first batch of stream {batch['stream']!r} has other values of {listed(batch['sources'])}",
        )
    for module in comparison.get("modules") or ():
        severity = DECIDES if module["change"] == "changed" else MAY_CHANGE
        yield severity, f"code: module {module['name']} {_MODULES[module['change']]}"
    parts = [("Python", comparison.get("python")), ("device", comparison.get("device"))]
    for name, pair in [
        *parts,
        *((f"package {package['name']}", package) for package in comparison.get("packages") or ()),
    ]:
        if pair is not None:
            severity = HARDLY if name.startswith("package ") and name.split()[1] not in _COMPUTING else MAY_CHANGE
            yield severity, f"{name}: {pair['a'] or 'not there'}, and now {pair['b'] or 'not there'}"
    if comparison.get("repositories"):
        yield HARDLY, "code: the git repositories have other commits or changes"


def _cause(differences: Mapping[str, list[str]], results: list[str], values: Mapping[str, Any]) -> str:
    """Return the likely cause of results that differ."""
    if not differences[DECIDES] and any(map(is_rate, values)):
        return "config: the learning rate is not that of the first steps; config.yaml has been changed since"
    sentences = [*differences[DECIDES], *differences[MAY_CHANGE]]
    if sentences:
        return sentences[0]
    if results[-1] == "same":
        return "record: the first steps are the same, so that the recorded statistics or the checkpoint were changed"
    return _UNKNOWN
