"""The option `--json` of the commands: the results, and a run as programs read it."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from emrun.training.build import Training

_BEGAN = time.monotonic()
AS_JSON = "emrun.json"
"""Key of `click.Context.meta`: the arguments of the command, if the option `--json` was given."""


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = context.params if value else None
    return value


with_json = click.option("--json", "as_json", is_flag=True, callback=_note, help="Print the result as JSON.")
"""Adds the option; the command gets `as_json`."""
errors_as_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_note, help="Print an error as JSON."
)  # fmt: skip
"""Adds the option to a command whose result is a file."""


def arguments() -> dict[str, Any] | None:
    """Return the arguments of the command by the names of their parameters; None if it is not to print JSON."""
    context = click.get_current_context(silent=True)
    return context.meta.get(AS_JSON) if context is not None else None


def wants_json() -> bool:
    """Return whether the current command is to print JSON."""
    return arguments() is not None


def so_far() -> dict[str, Any]:
    """Return what the command knows by now, which is also part of the object that it prints if it fails."""
    context = click.get_current_context(silent=True)
    found: dict[str, Any] = {} if context is None else context.meta.setdefault(f"{AS_JSON}.so_far", {})
    return found


def print_json(result: Any) -> None:
    """Print a result as JSON; values that are not finite are the strings NaN, Infinity and -Infinity."""
    click.echo(in_json(result))


def in_json(result: Any) -> str:
    """Return a result as JSON; see `print_json`."""
    return json.dumps(plain(result), indent=2, allow_nan=False)


def only_json(as_json: bool) -> AbstractContextManager[Any]:
    """Return a context in which what the user's code prints goes to standard error, if the result is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def plain(value: Any) -> Any:
    """Return a value in types that JSON has; what has no such type becomes a string."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, float):  # also one of numpy
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if callable(as_list := getattr(value, "tolist", None)):  # an array or a tensor
        return plain(as_list())
    return str(value)


def run_as_json(directory: Path, training: Training | None = None) -> dict[str, Any]:
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
    best, (address, condition) = summaries.best, summaries.watched
    last = run.last_epoch or None
    is_left = run.status != "finished" and (directory / "checkpoints" / "latest").exists()
    return {
        "status": run.status,
        "reason": run.reason,
        "directory": directory,
        "epochs": run.epochs_done,
        "iterations": run.iterations_done,
        "best": best and {"epoch": best[1], "statistic": address, "condition": condition, "value": best[0]},
        "last": last and {name: last.get(name) for name in ("epoch", "iteration", "streams")},
        "resume": ["emrun", "resume", str(directory)] if is_left else None,
        **({} if training is None else _measured(training)),
    }


def _measured(training: Training) -> dict[str, Any]:
    """Return what this process has measured."""
    used = training.main_loop.time
    unit = 1 if sys.platform == "darwin" else 1024
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    hooks = training.main_loop.hooks
    return {
        "seconds": {"training": used.seconds, "rest": time.monotonic() - _BEGAN - used.seconds},
        "examples_per_second": used.examples / used.seconds if used.examples and used.seconds else None,
        "peak_memory": {
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
            "gpu": torch.cuda.max_memory_allocated() if torch is not None and on_gpu else None,
        },
        "verdicts": [each for hook in hooks for each in getattr(hook, "verdicts", ())],
    }
