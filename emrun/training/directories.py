"""What a run directory says before PyTorch is imported: whether it holds a run, or a new run may be created in it."""

from __future__ import annotations

from pathlib import Path

from emrun.storage import run
from emrun.storage.trace import read_trace


def is_begun(run_directory: Path) -> bool:
    """Return whether a directory holds a run that can be resumed, and not only a failed start."""
    return run.holds_run(run_directory) and not run.is_failed_start(run_directory)


check_outside = run.check_outside


def check_free(run_directory: Path) -> None:
    """Check that a new run may be created in a directory. Whether a run that has not ended is in use, its lock decides.

    Raises:
        RunExists: the directory holds a run (a `UsageError`).
        UsageError: the directory is not empty.
    """
    if read_trace(run_directory).get("status") != "running":
        run.check_free(run_directory)


def check_run(run_directory: Path) -> None:
    """Check that a directory holds a run, whose config can be read.

    Raises:
        UsageError: the directory is missing, or it is not a run directory, or it has no config, or its path cannot be
            written in UTF-8.
        StorageError: the config is a link or a pipe.
    """
    if not (run_directory / run.CONFIG).exists():
        raise run.no_run(run_directory)
    run.check_readable_name(run_directory)
    run.check_config(run_directory)


def ranks_of(directory: Path) -> int:
    """Return how many processes have trained a run together."""
    return int(read_trace(directory).get("ranks") or 1)
