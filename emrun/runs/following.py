"""Following runs while they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import sleep
from typing import Any

from emrun.runs.stored_run import StoredRun

_PAUSE = 1.0  # seconds


def followed(
    find: Callable[[], Sequence[StoredRun]], pause: Callable[[float], Any] | None = None
) -> Iterator[tuple[Sequence[StoredRun], bool]]:
    """Look at runs every second, and yield them when their record has changed; the last time, none is still written.

    With them comes whether one of them is still written.

    Args:
        find: returns the runs as they are now.
        pause: waits for some seconds.
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
        (pause or sleep)(_PAUSE)
