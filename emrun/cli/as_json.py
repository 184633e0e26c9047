"""The option `--json` of the commands that print a result."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

import click

AS_JSON = "emrun.json"
"""Key of `click.Context.meta`: the arguments of the command, if the option `--json` was given."""


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = context.params if value else None
    return value


with_json = click.option("--json", "as_json", is_flag=True, callback=_note, help="Print the result as JSON.")
"""Adds the option; the command gets `as_json`."""
errors_as_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_note, help="Print an error as JSON."
)  # fmt: skip
"""Adds the option to a command whose result is a file."""


def arguments() -> dict[str, Any] | None:
    """Return the arguments of the command by the names of their parameters; None if it is not to print JSON."""
    context = click.get_current_context(silent=True)
    return context.meta.get(AS_JSON) if context is not None else None


def wants_json() -> bool:
    """Return whether the current command is to print JSON."""
    return arguments() is not None


def so_far() -> dict[str, Any]:
    """Return what the command knows by now, which is also part of the object that it prints if it fails."""
    context = click.get_current_context(silent=True)
    found: dict[str, Any] = {} if context is None else context.meta.setdefault(f"{AS_JSON}.so_far", {})
    return found


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
    if callable(as_list := getattr(value, "tolist", None)):  # an array or a tensor
        return plain(as_list())
    return str(value)
