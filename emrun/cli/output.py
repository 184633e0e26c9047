"""What the commands print: results, and a run, as JSON (the option `--json`), and as tables for the terminal."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emrun.base.tables import Table, width
from emrun.base.terminal import restore_output
from emrun.base.types import Json
from emrun.base.wording import few
from emrun.epoch_data import as_float, brief_statistics, is_rate

if TYPE_CHECKING:
    from emrun.training.build import Training

_BEGAN = time.monotonic()
AS_JSON = "emrun.json"
"""Key of `click.Context.meta`: the arguments of the command, if the option `--json` was given."""
MOST_ROWS = 30
"""The most rows of a table of the parts of a module or of a dataset."""


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = context.params if value else None
    return value


with_json = click.option("--json", "as_json", is_flag=True, callback=_note, help="Print the result as JSON.")
"""Adds the option; the command gets `as_json`."""
errors_as_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_note, help="Print an error as JSON."
)  # fmt: skip
"""Adds the option to a command whose result is a file."""


def arguments() -> Json | None:
    """Return the arguments of the command by the names of their parameters; None if it is not to print JSON."""
    context = click.get_current_context(silent=True)
    return context.meta.get(AS_JSON) if context is not None else None


def wants_json() -> bool:
    """Return whether the current command is to print JSON."""
    return arguments() is not None


def so_far() -> Json:
    """Return what the command knows by now, which is also part of the object that it prints if it fails."""
    context = click.get_current_context(silent=True)
    known: Json = {} if context is None else context.meta.setdefault(f"{AS_JSON}.so_far", {})
    return known


def print_json(result: Any) -> None:
    """Print a result as JSON; values that are not finite are the strings NaN, Infinity and -Infinity."""
    click.echo(in_json(result))


def in_json(result: Any) -> str:
    """Return a result as JSON; see `print_json`."""
    return json.dumps(plain(result), indent=2, allow_nan=False)


@contextmanager
def only_json(*, keeps_output: bool = False) -> Iterator[None]:
    """Let what the user's code prints in a block go to standard error, if the result is JSON.

    After the block, standard output and error are emrun's again, although the block has replaced them.

    Args:
        keeps_output: whether what the block has put in their place stays, because more of the user's code follows.
    """
    try:
        with redirect_stdout(sys.stderr) if wants_json() else nullcontext():
            yield
    finally:
        if not keeps_output:
            restore_output()


def plain(value: Any) -> Any:
    """Return a value in types that JSON has; what has no such type becomes a string."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float):  # also one of numpy
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if callable(as_list := getattr(value, "tolist", None)):  # an array or a tensor
        return plain(as_list())
    return str(value)


def run_as_json(directory: Path, training: Training | None = None) -> Json:
    """Return a run: how it stands, its best and its last statistics, and how to resume it.

    Args:
        directory: the run directory.
        training: the training of this process, which adds seconds, examples a second, memory and verdicts of Diagnose;
            None if this process has not trained.
    """
    from emrun.runs.stored_run import StoredRun
    from emrun.runs.summaries import Summaries

    run = StoredRun(directory)
    if not run.trace:
        return {"directory": directory}
    summaries = Summaries(run)
    best = None
    if summaries.best is not None:
        address, condition = summaries.watched
        value, epoch = summaries.best
        best = {"epoch": epoch, "statistic": address, "condition": condition, "value": value}
    last = None
    if run.last_epoch:
        last = {name: run.last_epoch.get(name) for name in ("epoch", "iteration", "streams")}
    is_left = run.status != "finished" and (directory / "checkpoints" / "latest").exists()
    return {
        "status": run.status,
        "reason": run.reason,
        "directory": directory,
        "epochs": run.epochs_done,
        "iterations": run.iterations_done,
        "best": best,
        "last": last,
        "resume": ["emrun", "resume", str(directory)] if is_left else None,
        **({} if training is None else _measured(training)),
    }


def _measured(training: Training) -> Json:
    """Return what this process has measured."""
    timing = training.main_loop.time
    unit = 1 if sys.platform == "darwin" else 1024
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    return {
        "seconds": {"training": timing.seconds, "rest": time.monotonic() - _BEGAN - timing.seconds},
        "examples_per_second": timing.examples / timing.seconds if timing.examples and timing.seconds else None,
        "peak_memory": {
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
            "gpu": torch.cuda.max_memory_allocated() if torch is not None and on_gpu else None,
        },
        "verdicts": [verdict for hook in training.main_loop.hooks for verdict in getattr(hook, "verdicts", ())],
    }


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
            (value, epoch)
            for epoch, value in values
            if isinstance(value, int | float) and not math.isnan(as_float(value))
        ]
        extremes = ["", ""]
        if numbers:
            extreme = (min(numbers, key=itemgetter(0)), max(numbers, key=itemgetter(0)))
            extremes = [f"{cell(value)} ({epoch})" for value, epoch in extreme]
        rows.append([stream, name, cell(values[-1][1]), *extremes])
    headers = ["stream", "variable", "last", "lowest (epoch)", "highest (epoch)"]
    return table(rows, headers) if rows else ""


def results(epoch_data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of an evaluation's statistics."""
    rows = [
        [stream, name, cell(value)]
        for stream, variables in epoch_data.items()
        for name, value in brief_statistics(variables)
    ]
    return table(rows, ["stream", "variable", "value"])


def parameters_table(parameters: Sequence[Json]) -> str:
    """Return a table of the parameters of a module, from the rows of `model_facts.parameters`."""
    rows: list[list[str]] = []
    for part in parameters:
        shapes = few(f"{name} {tuple(shape)}" for name, shape in part["shapes"].items())
        trained = f"{part['trained']:,}"
        if part["trained"] == part["count"]:
            trained = "yes"
        elif part["trained"] == 0:
            trained = "no"
        rows.append([part["module"], part["class"], shapes, f"{part['count']:,}", trained])
    half = MOST_ROWS // 2
    if len(rows) > MOST_ROWS + 1:  # the last ones stay, such as a new head
        count = sum(part["count"] for part in parameters[half:-half])
        rows[half:-half] = [[f"{len(rows) - 2 * half} more", "", "(emrun check --json lists all)", f"{count:,}", ""]]
    total = sum(part["count"] for part in parameters)
    rows.append(["all", "", "", f"{total:,}", f"{sum(part['trained'] for part in parameters):,}"])
    return table(
        rows, ["module", "class", "shapes", "parameters", "trained"], ("left", "left", "left", "right", "right")
    )


def cell(value: Any) -> str:
    """Return a value for a table, a number with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
