"""Finds the runs below a directory, and follows runs while they are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep

from emrun.base.errors import StorageError, UsageError
from emrun.runs.stored_run import StoredRun
from emrun.storage.files import storing
from emrun.storage.run import CONFIG, no_run
from emrun.storage.trace import TRACE

_BESIDE = ("metrics.jsonl", "steps.jsonl", "train.log", "checkpoints", ".lock")
"""What a run has, and a project with a `config.yaml` does not."""
_DEEPEST = 20  # directories in each other
_PAUSE = 1.0  # seconds between two looks at runs


def find_runs(directory: Path, *, deep: bool = False) -> Iterator[StoredRun]:
    """Yield the runs in a directory by name: those directly in it, or the directory itself if it is a run.

    Results of evaluations are not runs. Links to directories are not followed, and there is no search within a run.

    Args:
        directory: the directory.
        deep: also search the directories below, except hidden ones.

    Raises:
        UsageError: there is no such directory.
        StorageError: it cannot be read.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"{directory} {what}; give a directory with runs, or a run")
    if _may_be_run(_names_in(directory)):
        yield from _run_in(directory)
    else:
        yield from _below(directory, deep, 0)


def find_run(directory: Path) -> StoredRun:
    """Return the run in a directory.

    Raises:
        UsageError: the directory does not hold a run.
        StorageError: it cannot be read.
    """
    run = next(_run_in(directory), None) if directory.is_dir() and _may_be_run(_names_in(directory)) else None
    if run is None:
        raise no_run(directory, f"{TRACE} of a run")
    return run


def _below(directory: Path, deep: bool, depth: int) -> Iterator[StoredRun]:
    try:
        with os.scandir(directory) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if depth:
            return  # not of interest: a directory that is not a run, or another user's
        raise StorageError(error.errno or errno.EIO, f"cannot read {directory}: {error.strerror}") from error
    for name in sorted(folders):
        place = directory / name
        try:
            names = {TRACE} if os.path.lexists(place / TRACE) else _names_in(place)
        except StorageError:  # perhaps a run of another user, which is shown as damaged
            names = set() if name.startswith(".") else {TRACE}
        if _may_be_run(names):
            yield from _run_in(place)
        elif deep and depth < _DEEPEST and not name.startswith("."):
            yield from _below(place, deep, depth + 1)


def _names_in(directory: Path) -> set[str]:
    with storing(directory, "read"):
        return set(os.listdir(directory))  # noqa: PTH208 - names only, of thousands of directories


def _may_be_run(names: set[str]) -> bool:
    return TRACE in names or (CONFIG in names and any(name in names for name in _BESIDE))


def _run_in(directory: Path) -> Iterator[StoredRun]:
    run = StoredRun(directory)
    if not run.is_evaluation:
        yield run


def followed(find: Callable[[], Sequence[StoredRun]]) -> Iterator[tuple[Sequence[StoredRun], bool]]:
    """Look at runs every second, and yield them when their record has changed; the last time, none is still written.

    With them comes whether one of them is still written.

    Args:
        find: returns the runs as they are now.
    """
    before = None
    while True:
        runs = find()
        is_running = any(run.status == "running" for run in runs)
        now = [run.record.size for run in runs]
        if now != before or not is_running:
            yield runs, is_running
        if not is_running:
            return
        before = now
        sleep(_PAUSE)
