"""A run as programs read it: the object that `emrun train --json` and `emrun resume --json` print at the end."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emrun.training.build import Training

_BEGAN = time.monotonic()


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
    last = None
    for last in run.epochs():  # noqa: B007 - the last one is wanted
        pass
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
