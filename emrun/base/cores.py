"""How many cores this process may use: of the machine, of its control groups, and of what shares them with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from emrun.base.errors import UsageError

THREADS = "EMRUN_THREADS"
"""The environment variable that says how many threads of this process read examples."""
SHARE = "EMRUN_CORES"
"""The environment variable in which emrun leaves how many cores a process that it starts gets."""
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def allowed_cores() -> float:
    """Return how many cores this process may keep busy: a control group may allow a part of one."""
    times = [*_limits_of_groups("cpu.max"), *_limits_of_groups("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *(int(quota) / int(period) for quota, period in times)])


def cores() -> int:
    """Return how many cores this process may use, at least 1: its share, if emrun or torchrun has started several."""
    share = os.environ.get(SHARE, "")
    if share.isdecimal() and int(share) > 0:
        return int(share)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return share_of(int(ranks) if ranks.isdecimal() else 1, max(1, int(allowed_cores())))


def share_of(processes: int, count: int | None = None) -> int:
    """Return how many of some cores each of several processes gets; by default, those of this process are shared."""
    return max(1, (cores() if count is None else count) // max(1, processes))


def reading_threads() -> int:
    """Return how many threads of this process read examples: EMRUN_THREADS, otherwise one for each core.

    Raises:
        UsageError: EMRUN_THREADS is not a number of threads.
    """
    given = os.environ.get(THREADS)
    if given is None:
        return cores()
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"the environment variable {THREADS} is {given!r}, which is not a number of threads")
    return int(given)


def _limits_of_groups(*files: str) -> Iterator[list[str]]:
    """Yield the words of these files of the process's control groups, of version 1 or 2, where they set a limit."""
    lines = _GROUP.read_text().splitlines() if _GROUP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        group = _GROUPS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):  # a container sees the last ones only
            if folder.is_relative_to(_GROUPS) and all((folder / file).is_file() for file in files):
                words = " ".join((folder / file).read_text() for file in files).split()
                if words[0].isdigit():  # otherwise `max` or -1
                    yield words
