"""The directories from which the user's modules are imported."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

_DIRECTORIES: set[str] = set()


def find_user_modules(*directories: str) -> None:
    """Append directories, such as the one where a run was started, and the current directory to `sys.path`."""
    for path in (*directories, str(Path.cwd())):
        _DIRECTORIES.add(path)
        if path not in sys.path:
            sys.path.append(path)


def user_directories() -> list[str]:
    """Return the directories at the end of `sys.path` that `find_user_modules` added."""
    return list(itertools.takewhile(_DIRECTORIES.__contains__, reversed(sys.path)))[::-1]
