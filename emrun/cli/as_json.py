"""The option `--json` of the commands that print a result."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import PurePath
from typing import Any

import click

with_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
"""Adds the option; the command gets `as_json`."""


def print_json(result: Any) -> None:
    """Print a result as JSON; values that are not finite are the strings NaN, Infinity and -Infinity."""
    click.echo(in_json(result))


def in_json(result: Any) -> str:
    """Return a result as JSON; see `print_json`."""
    return json.dumps(plain(result), indent=2, allow_nan=False)


def only_json(as_json: bool) -> AbstractContextManager[Any]:
    """Return a context in which what the user's code prints goes to standard error, if the result is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def plain(value: Any) -> Any:
    """Return a value in types that JSON has; what has no such type becomes a string."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, float):  # also one of numpy
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, PurePath):
        return str(value)
    if callable(as_list := getattr(value, "tolist", None)):  # an array or a tensor
        return plain(as_list())
    return str(value)
