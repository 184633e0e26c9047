"""`match`: a regular expression, or a list of them, that selects names of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from emrun.base.errors import ArgumentError
from emrun.base.wording import few

Match = str | Sequence[str]
"""An argument `match` in a config."""


def patterns(argument: str, value: object) -> tuple[re.Pattern[str], ...]:
    """Return the compiled expressions of an argument `match`; none for None.

    Args:
        argument: the name of the argument, for messages.
        value: a regular expression or a list of them.

    Raises:
        ArgumentError: the value is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (compiled(argument, value),)
    if not isinstance(value, list | tuple) or not value:
        raise ArgumentError(argument, f"{value!r} is neither a regular expression nor a list of them")
    return tuple(compiled(f"{argument}[{index}]", pattern) for index, pattern in enumerate(value))


def compiled(argument: str, pattern: object) -> re.Pattern[str]:
    """Return a compiled expression.

    Raises:
        ArgumentError: the pattern is not a regular expression.
    """
    if not isinstance(pattern, str):
        raise ArgumentError(argument, f"{pattern!r} is not a regular expression; write it in quotes")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(argument, f"{pattern!r} is not a regular expression: {error}") from error


def check_matches(argument: str, expressions: Sequence[re.Pattern[str]], names: Iterable[str], what: str) -> None:
    """Check that each expression of an argument `match` matches a name.

    Args:
        argument: the name of the argument, for messages.
        expressions: what `patterns` returned.
        names: the names.
        what: what has these names, for messages, such as `the parameters`.

    Raises:
        ArgumentError: one matches none.
    """
    names = list(names)
    for index, expression in enumerate(expressions):
        if not any(map(expression.search, names)):
            where = f"{argument}[{index}]" if len(expressions) > 1 else argument
            raise ArgumentError(where, f"{expression.pattern!r} matches none of {what} {few(names)}")
