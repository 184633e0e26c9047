"""The directories from which the user's modules are imported."""

from __future__ import annotations

import sys
from pathlib import Path

_DIRECTORIES: set[str] = set()


def find_user_modules(*directories: str) -> None:
    """Let modules be imported from directories, such as that where a run was started, and from the current one."""
    for path in (*directories, str(Path.cwd())):
        _DIRECTORIES.add(path)
        if path not in sys.path:
            sys.path.append(path)


def user_directories() -> list[str]:
    """Return the directories at the end of the path that are there for the user's modules."""
    count = 0
    while count < len(sys.path) and sys.path[-1 - count] in _DIRECTORIES:
        count += 1
    return sys.path[len(sys.path) - count :]
