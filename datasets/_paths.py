"""The files that an argument of a dataset names: one path, a list of paths, or a pattern."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Container
from pathlib import Path

from emrun.base.arguments import expanded
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.types import Strings
from emrun.base.wording import counted, listed

_LOG = logging.getLogger(__name__)

Files = str | list[str]
"""The files of a stream in a config: a path, a pattern, or a list of these."""


def files_of(argument: str, value: object) -> list[Path]:
    """Return the files that an argument names; the files of a pattern are sorted by name.

    Args:
        argument: the name of the argument, for the message.
        value: a path, a pattern with `*`, `?`, `[...]` or `**`, or a list of these.

    Raises:
        ArgumentError: the value does not name any file, or names a file that does not exist.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    paths = [expanded(entry) for entry in entries if isinstance(entry, str | os.PathLike) and str(entry)]
    if not paths or len(paths) < len(entries):
        raise ArgumentError(argument, f"{value!r} is neither a path nor a list of paths")
    files = []
    for path in paths:
        if path.is_dir():
            raise ArgumentError(argument, f"{str(path)!r} is a directory; write for example {str(path / '*')!r}")
        names = [path] if path.exists() else _matching(path)
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found:
            places = f"(the current directory is {str(Path.cwd())!r}){what_is_in(path.parent)}"
            hint = "; in a pattern, [1] stands for 1: write [[]1] for [1] itself" if "[" in path.name else ""
            raise ArgumentError(argument, f"there is no file {str(path)!r} {places}{hint}")
        files += found
    return files


def named_files(argument: str, value: object, endings: Container[str]) -> tuple[Path, dict[str, str]]:
    """Return the folder before the first wildcard of a pattern, and name -> path below it; the paths are sorted.

    A name is what the wildcards stand for, without the ending: of `images/*_left.png`, the name of `images/7_left.png`
    is `7`. Files with other endings are left out.

    Args:
        argument: the name of the argument, for messages.
        value: a pattern, or a folder for all files below it.
        endings: the endings of the files, in small letters.

    Raises:
        ArgumentError: the value does not name any file, or two files have one name.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ArgumentError(argument, f"{value!r} is neither a pattern such as 'images/*.jpg' nor a folder")
    pattern = expanded(value)
    pattern = pattern / "**" / "*" if pattern.is_dir() else pattern
    folder = next((each for each in pattern.parents if each.is_dir()), Path())
    stem = str(pattern.relative_to(folder).with_suffix(""))
    before = re.split(r"[*?[]", stem)[0]
    after = re.split(r"[]*?]", stem)[-1]
    found: dict[str, str] = {}
    others = []
    for path in files_of(argument, pattern):
        below = path.relative_to(folder)
        own = str(below.with_suffix(""))
        name = own[len(before) : len(own) - len(after)]
        if path.suffix.lower() not in endings:
            others.append(str(below))
        elif found.setdefault(name, str(below)) != str(below):
            both = f"{folder / found[name]} and {path}"
            raise ArgumentError(argument, f"{both} have one name, {name!r}; write another pattern, such as '*.png'")
    if not found:
        raise ArgumentError(argument, f"{str(pattern)!r} has no pictures, but {first_of(others)}")
    if others:
        names = counted(len(others), "name")
        _LOG.warning("%s: left out %s of %s: %s", argument, names, folder, first_of(others), extra={"names": others})
    return folder, found


def _matching(pattern: Path) -> list[str]:
    """Return the files that match a pattern, in order; an existing folder such as `data [1]` is taken by its name."""
    folder = next((each for each in pattern.parents if each.is_dir()), Path())
    rest = pattern.relative_to(folder)
    return sorted(glob.glob(str(Path(glob.escape(str(folder)), rest)), recursive=True))  # noqa: PTH207  # absolute ones too


def what_is_in(folder: Path) -> str:
    """Return the first names in a folder for a message, or an empty string if there is no such folder."""
    if not folder.is_dir():
        return ""
    names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir())
    return f"; {str(folder)!r} has {first_of(names)}"


def first_of(names: Strings, most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    return listed(list(map(repr, names[:most]))) + (f" and {len(names) - most} more" if len(names) > most else "")


def identity(path: Path) -> tuple[int, int]:
    """Return what differs if a file has changed: its size and its time of modification in nanoseconds."""
    found = os.stat(path)  # noqa: PTH116 - takes half the time of Path.stat, and is called for every batch
    return found.st_size, found.st_mtime_ns


def check_unchanged(path: Path, before: tuple[int, int], what: str, since: str = "the dataset was built") -> None:
    """Check that a file is the one whose identity was `before`; `what` names the file.

    Raises:
        StreamError: the file has changed or cannot be read.
    """
    try:
        now = identity(path)
    except OSError as error:
        raise StreamError(f"{what} can no longer be read: {error.strerror}") from error
    if now != before:
        raise StreamError(f"{what} has changed since {since}; a run needs the same files until it ends")
