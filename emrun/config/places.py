"""Where values stand in a tree, and which of them an anchor of YAML copied."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emrun.config.yaml_tree import Node, read_scalar
from emrun.errors import Position

_Place = tuple[tuple[Any, ...], Node, Position | None]  # a path, what is there, and the alias that brought it there


def places(node: Node, path: tuple[Any, ...] = (), alias: Position | None = None) -> Iterator[_Place]:
    """Yield all nodes below one with their paths, and the alias that brought them there."""
    for key, child in node.entries():
        outermost = alias or child.alias
        yield (*path, key), child, outermost
        yield from places(child, (*path, key), outermost)


def copies_left(before: Node, after: Node, *, unread: Sequence[str] = ("vars",)) -> list[str]:
    """Return a note for each value that overrides changed while a copy of it, made by an anchor of YAML, stayed.

    Args:
        before: the config without the overrides.
        after: the config with them.
        unread: sections in which a copy that stayed does not matter.
    """
    found = list(places(before))
    if all(alias is None for _, _, alias in found):
        return []
    there, left = _by_position(found), _by_position(places(after))
    notes = []
    reported: list[tuple[Any, ...]] = []
    for path, node, _ in found:
        kept = {other: each for other, each in left.get(node.position, {}).items() if other[0] not in unread}
        was_copied = len(there.get(node.position, ())) > max(1, len(left.get(node.position, ())))
        is_below = any(path[: len(other)] == other for other in reported)
        is_there = after.get(*path[:-1]) is not None  # otherwise more was deleted than the copy
        new = after.get(*path)
        is_same = new is not None and new.plain() == node.plain()
        if was_copied and kept and path not in left[node.position] and is_there and not (is_below or is_same):
            reported.append(path)
            notes.append(_note_of_copies(path, there[node.position][path], new, kept))
    return notes


def _by_position(found: Iterable[_Place]) -> dict[Position, dict[tuple[Any, ...], Position]]:
    """Return where in a file values are from -> paths that have them -> the alias, or else the value, in the file."""
    paths: dict[Position, dict[tuple[Any, ...], Position]] = {}
    for path, node, alias in found:
        if node.position.line:  # otherwise it is from no file, and has no position of its own
            paths.setdefault(node.position, {})[path] = alias or node.position
    return paths


def _note_of_copies(
    path: tuple[Any, ...], place: Position, new: Node | None, kept: Mapping[tuple[Any, ...], Position]
) -> str:
    copies = ", ".join(f"{_key_path(other)} ({each})" for other, each in kept.items())
    if new is None:
        ways = [f"~{_key_path(other)}" for other in kept]
    else:
        value = new.shown()
        text = value if isinstance(value, str) and read_scalar(value) == value else json.dumps(value)
        ways = [f"{_key_path(other)}={text}" for other in kept]
    more = " ".join(shlex.quote(way) for way in ways)
    return (
        f"{_key_path(path)} ({place}) is overridden, but not {copies}, which has the same value by an anchor of "
        f"YAML; to change that too, add {more}"
    )


def _key_path(path: Sequence[Any]) -> str:
    """Return a path in the tree as overrides write it: an index of the hooks' list is followed by arguments."""
    parts = [str(part) for part in path]
    return ".".join(parts[:2] + parts[3:] if parts[0] == "hooks" else parts)
