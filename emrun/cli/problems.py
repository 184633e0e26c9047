"""Errors as programs read them: the objects that `--json` prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emrun.base.censor import hidden
from emrun.base.errors import ConfigError, EmrunError, Position, Problem, reason_of
from emrun.base.types import Json
from emrun.cli.output import arguments

if TYPE_CHECKING:
    from emrun.config.yaml_tree import Node

_MEANT = re.compile(r"'([^']+)'[^']*; did you mean '([^']+)'\?")
_BY_NAME = ("config.unknown-key", "config.unknown-class", "config.unknown-stream", "config.unknown-statistic",
            "config.type", "config.value")  # fmt: skip
"""The codes of the mistakes that go away if the name that the message proposes is written."""
_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")


def problems_of(error: BaseException) -> list[Json]:
    """Return an error as the list of its problems: code, file, line, column, key, message, fix and retry.

    A `fix` is `{"overrides": [...]}`, to be added at the end of the command, or `{"command": [...]}`, or None.
    """
    if isinstance(error, ConfigError):
        problems = list(error.problems)
    else:
        message = error.format_message() if isinstance(error, click.ClickException) else reason_of(error)
        code = code_of(error)
        message = f"{type(error).__name__}: {message}" if code.startswith("code.") else message
        problems = [Problem(None, "", message, code, getattr(error, "fix", ""))]
    tree = _tree() if isinstance(error, ConfigError) else None
    retries = getattr(error, "retry", False) is True
    return [_in_json(problem, fix_of(problem, tree), retries) for problem in problems]


def _in_json(problem: Problem, fix: Any, retries: bool) -> Json:
    place = problem.position or Position("")
    return {
        "code": problem.code,
        "file": place.source or None,
        "line": place.line or None,
        "column": place.column or None,
        "key": problem.key or None,
        "message": hidden(problem.message),
        "fix": fix,
        "retry": retries,
    }


def code_of(error: BaseException) -> str:
    """Return the code of an error: that of an error of emrun, of a wrong command, or of a failure of user code."""
    if isinstance(error, click.ClickException):
        return "usage"
    if type(error).__name__ in _OUT_OF_MEMORY:
        return "code.out-of-memory"
    is_own = isinstance(error, EmrunError) or str(type(error).__module__).startswith("emrun.")
    return str(getattr(error, "code", "code.failed")) if is_own else "code.failed"


def _tree() -> Node | None:
    """Return the config of the current command as it is written, to find where a mistake stands in it."""
    from emrun.config.config import read_config

    given = arguments() or {}
    source = given.get("config") or given.get("directory")
    if not isinstance(source, str | Path):
        return None
    try:
        return read_config(source, given.get("overrides") or ()).root
    except (EmrunError, OSError):
        return None


def fix_of(problem: Problem, tree: Node | None) -> dict[str, list[str]] | None:
    """Return the overrides, or the command, that make a problem go away; None if only the user can know them.

    Args:
        problem: the problem.
        tree: the config as it is written; None if it cannot be read.
    """
    verb, _, rest = problem.fix.partition(" ")
    if verb == "override":
        return {"overrides": [rest]}
    if verb == "command":
        return {"command": shlex.split(rest)}
    place = _place(problem.position, tree)
    if place is None:
        return None
    path, node = place
    if verb == "delete":
        return {"overrides": [f"~{_key(path)}"]}
    if verb == "set":
        return {"overrides": [f"{_key(path)}={rest}"]}
    if verb == "move":
        has_arguments = len(path) > 2
        name = str(path[2] if has_arguments else node.value)
        return {"overrides": _hook_at_end(path[1], name, node if has_arguments else None)}
    match = _MEANT.search(problem.message) if problem.code in _BY_NAME else None
    overrides = _by_name(path, node, match[1], match[2]) if match else None
    return None if overrides is None else {"overrides": overrides}


def _place(position: Position | None, tree: Node | None) -> tuple[tuple[Any, ...], Node] | None:
    """Return the path and the node of the innermost value that stands, or whose key stands, at a position."""
    places = [
        (path, node)
        for path, node, alias in (tree.places() if tree is not None and position is not None else ())
        if alias is None and position in (node.position, node.key)
    ]
    return max(places, key=lambda place: len(place[0]), default=None)


def _by_name(path: tuple[Any, ...], node: Node, wrong: str, meant: str) -> list[str] | None:
    """Return the overrides that write a name in place of a wrong one: of a key, of a value, or in a value.

    Args:
        path: the path of the value, or of a mapping or a list that has it.
        node: what stands there.
        wrong: the wrong name.
        meant: the name to write.
    """
    for key, child in node.entries():
        if key == wrong or (child.value == wrong and isinstance(key, int)):
            return _by_name((*path, key), child, wrong, meant)
    if (corrected := _corrected(str(path[-1]), wrong, meant)) is not None:
        if path[0] == "hooks" and len(path) == 3:
            return _hook_at_end(path[1], corrected, node)
        return [f"~{_key(path)}", f"{_key((*path[:-1], corrected))}={_yaml(node)}"]
    text = _corrected(str(node.value), wrong, meant) if isinstance(node.value, str) else None
    if text is None:
        return None
    if path[0] == "hooks" and len(path) == 2:
        return _hook_at_end(path[1], text, None)
    return [f"{_key(path)}={text}"]


def _hook_at_end(index: int, name: str, arguments: Node | None) -> list[str]:
    """Return the overrides that delete an entry of the list of hooks and add a hook at the end."""
    given = _yaml(arguments) if arguments is not None and arguments.value is not None else "{}"
    return [f"~hooks.{index}", f"hooks.{name}={given}"]


def _corrected(text: str, wrong: str, meant: str) -> str | None:
    """Return a name with its wrong part replaced; None if the part is not in it."""
    for old, new in ((wrong, meant), (wrong.removesuffix("/mean"), meant.removesuffix("/mean"))):
        if re.search(part := rf"(?<!\w){re.escape(old)}(?!\w)", text):
            return re.sub(part, new.replace("\\", r"\\"), text)
    return None


def _key(path: tuple[Any, ...]) -> str:
    """Return a path in the tree as a key of an override, in which a hook is an index and its arguments follow."""
    is_hook = path[0] == "hooks" and len(path) > 2 and isinstance(path[1], int)
    return ".".join(map(str, (*path[:2], *path[3:]) if is_hook else path))


def _yaml(node: Node) -> str:
    return json.dumps(node.shown(), ensure_ascii=False, default=str)
