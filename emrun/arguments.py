"""Checks of arguments that constructors and commands share, and what they make of paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

from emrun.errors import ArgumentError


def check_choice(argument: str, value: object, allowed: object) -> None:
    """Raise `ArgumentError` unless `value` is one of the values of the `Literal` type `allowed`."""
    choices = get_args(allowed)
    if value not in choices:
        raise ArgumentError(argument, f"{value!r} is not one of {', '.join(map(str, choices))}")


def check_count(argument: str, value: object, minimum: int = 0) -> None:
    """Raise `ArgumentError` unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ArgumentError(argument, f"{value!r} is not a whole number of at least {minimum}")


def check_seconds(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ArgumentError(argument, f"{value!r} is no number of seconds above 0")


def check_exit_status(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a number that a process can exit with."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ArgumentError(argument, f"{value!r} is no exit status; it is a whole number from 0 to 255")


def check_flag(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ArgumentError(argument, f"{value!r} is neither true nor false")


def check_names(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a list of texts."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ArgumentError(argument, f"{value!r} is no list of names")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path from a config or a command line, with `~` or `~user` at its beginning as the home directory.

    Shells leave it as it is in `--output-dir=~/runs` and in quotes.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user: a file may have that name
        return Path(path)


def safe_component(argument: str, name: str) -> str:
    """Return a name as one component of a path: letters, digits, `.`, `_`, `-`; anything else becomes `_`.

    Raises:
        ArgumentError: nothing is left of it, or it is longer than 100 characters.
    """
    safe = re.sub(r"[^\w.-]", "_", name).lstrip(".")
    if not safe or len(safe) > 100:
        raise ArgumentError(argument, f"{name!r} cannot name a file or a directory")
    return safe
