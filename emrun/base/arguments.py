"""Checks of argument values, and helpers for paths, that constructors and commands share."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from emrun.base.errors import ArgumentError
from emrun.base.wording import did_you_mean, meant_of


def check_choice(argument: str, value: object, allowed: object) -> None:
    """Raise `ArgumentError` unless `value` is one of the values of the `Literal` type `allowed`."""
    choices = get_args(allowed)
    if value not in choices:
        raise ArgumentError(argument, f"{value!r} is not one of {', '.join(map(str, choices))}")


def check_count(argument: str, value: object, minimum: int = 0) -> None:
    """Raise `ArgumentError` unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ArgumentError(argument, f"{value!r} is not a whole number of at least {minimum}")


def check_number(
    argument: str,
    value: object,
    what: str = "a number",
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raise `ArgumentError`, with the text `what`, unless `value` is a number of a float's range, within the limits."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (least <= value and above < value < below and abs(value) <= sys.float_info.max)
    ):
        raise ArgumentError(argument, f"{value!r} is not {what}")


def check_seconds(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a positive, finite number of seconds that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ArgumentError(argument, f"must be a positive number of seconds, not {value!r}")


def check_exit_status(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is an exit status: a whole number from 0 to 255."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ArgumentError(argument, f"{value!r} is not an exit status; use a whole number from 0 to 255")


def check_flag(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ArgumentError(argument, f"{value!r} is neither true nor false")


def check_names(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ArgumentError(argument, f"{value!r} is not a list of names")


def check_one_of(argument: str, value: str, allowed: Iterable[str], what: str) -> None:
    """Raise `ArgumentError`, with the text `what` and the name that was meant, unless a name is allowed."""
    if value not in (names := [*allowed]):
        raise ArgumentError(argument, f"{what}{meant_of(value, names)}")


def check_keys(argument: str, value: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise `ArgumentError` unless all keys of a mapping are allowed."""
    for key in value:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise ArgumentError(f"{argument}.{key}", f"unknown key {key!r}{hint}; allowed: {', '.join(allowed)}")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path from a config or a command line, with a leading `~` or `~user` replaced by the home directory.

    A shell does not replace `~` in `--output-dir=~/runs`, nor inside quotes. `./~` is a directory of this name.
    """
    if isinstance(path, str) and not path.startswith("~") and Path(path).parts[:1] and Path(path).parts[0][0] == "~":
        return Path(path).absolute()
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no such user: a file may have that name
        return Path(path)


def similar_folder(path: Path) -> str:
    """Return `; did you mean 'tokenizer'?` for the folder whose name is nearest to a path; nothing if none is near."""
    with suppress(OSError):
        return did_you_mean(str(path), [str(each) for each in path.parent.iterdir() if each.is_dir()])
    return ""


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the path of a directory of a run, absolute and without links; see `expanded`.

    A run is one directory, although a link may be turned and the user's code may change the current directory. So a
    path is resolved once, where it comes in.
    """
    return expanded(path).resolve()


def safe_component(argument: str, name: str, also: str = "") -> str:
    """Return a name as one component of a path: letters, digits, `.`, `_`, `-` and those in `also`.

    All other characters become `_`. Leading dots are removed.

    Raises:
        ArgumentError: the result is empty or longer than 100 characters.
    """
    safe = re.sub(rf"[^\w.{re.escape(also)}-]", "_", name).lstrip(".")
    if not safe or len(safe) > 100:
        raise ArgumentError(
            argument,
            f"{name!r} cannot name a file or a directory; use letters, digits, '_' and '-', at most 100 characters",
        )
    return safe
