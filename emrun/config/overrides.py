"""Configs laid over one another: what a config extends, a section under `eval`, and overrides with what they leave."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emrun.config.interpolation import name_of, unread_values
from emrun.config.names import same_class
from emrun.config.yaml_tree import MAX_DEPTH, Node, Place, parse, read_scalar
from emrun.errors import ConfigError, Position, Problem
from emrun.wording import did_you_mean, normalised


def merge(base: Node, over: Node) -> Node:
    """Merge two trees: mappings key by key, lists replace, a mapping whose `class` (or `import`) differs replaces."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict) or _is_another_form(base, over):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(base.value[key], node) if key in base.value else node
    return replace(over, value=merged)


def _is_another_form(base: Node, over: Node) -> bool:
    """Tell whether a mapping is a form that names another class or object than the mapping below it."""
    old, new = _form_of(base), _form_of(over)
    if new is None or old == new:
        return False
    return old is None or old[0] != new[0] or new[0] == "import" or not same_class(old[1], new[1])


def _form_of(node: Node) -> tuple[str, Any] | None:
    """Return what a form names, None when the mapping is no form."""
    return next(((key, node.value[key].plain()) for key in ("class", "import") if key in node.value), None)


def hook_entry(entry: Node) -> tuple[str | None, Node | None]:
    """Return name and arguments of an entry of the list of hooks; no name when the entry is malformed."""
    if isinstance(entry.value, str):
        return entry.value, None
    name, arguments = next(iter(entry.value.items())) if isinstance(entry.value, dict) and entry.value else (None, None)
    return (name, arguments) if isinstance(name, str) and len(entry.value) == 1 else (None, None)


def override(config: Node, overrides: Sequence[str]) -> Node:
    """Apply overrides from left to right.

    A mapping given as a whole is merged by the rule of `merge`. An override of `class` (or `import`) by its key path
    keeps the keys beside it.

    Raises:
        ConfigError: an override is malformed, or addresses what is not there, or undoes an earlier one.
    """
    overriding = _Overriding(config)
    for text in overrides:
        overriding.apply(text)
    overriding.check_vars(config)
    return overriding.tree


class _Overriding:
    """A tree that overrides change, one after the other.

    Args:
        tree: the tree as it is before them.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self._position = Position("override")  # of the override that is applied
        self._path: list[str] = []
        self._earlier: dict[str, list[str]] = {}  # what those that set something are called in positions -> their paths

    def apply(self, text: str) -> None:
        """Apply an override: `key.path=value`, or `~key.path` to delete."""
        self._position = here = Position(f"override {text!r}")
        key, equals, value = (text[1:], "", "") if text.startswith("~") else text.partition("=")
        if not equals and not text.startswith("~"):
            raise self._error("", "an override is key=value, or ~key to delete")
        new = replace(parse(value, here.source), position=here, key=here) if equals else None
        self._path = path = key.split(".")
        if len(path) > MAX_DEPTH:
            raise self._error("", f"has more than {MAX_DEPTH} parts")
        if not all(path):
            raise self._error("", f"{key!r} is no key; write for example model.optimizer.lr=0.1")
        hooks = self.tree.get("hooks") or Node(None, here, here)
        if new is not None and path[0] == "hooks" and hooks.value is None:
            self.tree = replace(self.tree, value={**self.tree.value, "hooks": replace(hooks, value=[])})
        self.tree = self._changed(self.tree, path, new, ())
        if new is not None:
            self._earlier[here.source] = path

    def check_vars(self, before: Node) -> None:
        """Check that overrides add no free values that nothing reads: such a mistake would be silent."""
        for path, node in unread_values(self.tree):
            if node.position.source in self._earlier and before.get(*path) is None:
                self._position = node.position
                owner = before.get(*path[:-1])
                near = did_you_mean(str(path[-1]), owner.children() if owner else [])
                raise self._error(".".join(map(str, path[:-1])), f"nothing reads ${{{name_of(path)}}}{near}")

    def _changed(self, base: Node, path: Sequence[Any], new: Node | None, above: tuple[str, ...]) -> Node:
        """Return `base`, which stands at `above`, with `new` at a path below it, or without what is there."""
        part, *rest = path
        where = (*above, str(part))
        is_list = isinstance(base.value, list)
        if not is_list and not isinstance(base.value, dict):
            if new is not None and base.position.source in self._earlier:
                raise self._error("", f"{'.'.join(above)} is also set to {base.shown()!r} by {base.position}")
            base = Node({}, self._position, base.key or self._position)
        entries = dict(base.entries())
        key = self._index(base.value, str(part), above, new) if is_list else self._key(entries, part, above, new)
        if new is None and not rest:
            del entries[key]
        elif is_list and above == ("hooks",):
            entries[key] = self._hook(entries.get(key) or Node(str(part), self._position), rest, new, where)
        elif rest or new is None:
            entries[key] = self._changed(entries.get(key) or Node({}, self._position, self._position), rest, new, where)
        else:
            if key in ("class", "import"):
                entries.pop("import" if key == "class" else "class", None)
                new = _renamed(new, entries.get(key))
            entries[key] = self._laid(entries[key], new, where) if key in entries else new
        return replace(base, value=list(entries.values()) if is_list else entries)

    def _hook(self, entry: Node, path: Sequence[Any], new: Node | None, where: tuple[str, ...]) -> Node:
        """Change the arguments in an entry of the list of hooks, which is a name or a mapping name -> arguments."""
        if not path and new is not None and not isinstance(new.value, dict):
            raise self._error(".".join(where), f"{new.plain()!r} is no mapping of the hook's arguments")
        name, arguments = hook_entry(entry)
        if name is None:  # reported when the hooks are built
            return entry if new is not None else self._changed(entry, path, new, where)
        has_arguments = arguments is not None and isinstance(arguments.value, dict)
        old = arguments if arguments is not None and has_arguments else Node({}, self._position)
        if path or new is None:
            changed = self._changed(old, path, new, where)
        else:
            changed = self._laid(old, new, where) if has_arguments else new
        key = (arguments and arguments.key) or entry.position
        return replace(entry, value={name: replace(changed, key=key)})

    def _laid(self, base: Node, new: Node, where: tuple[str, ...]) -> Node:
        """Return a value as a whole laid over what stands there."""
        is_same = isinstance(base.value, dict) and isinstance(new.value, dict) and not _is_another_form(base, new)
        if isinstance(new.value, dict) and (isinstance(base.value, list) or is_same):
            for part, node in new.value.items():
                base = self._changed(base, [part], node, where)
            return base
        for path, lost, _ in base.places():
            if new.get(*path) is None and self._earlier.get(lost.position.source, self._path) != self._path:
                raise self._error("", f"would undo {lost.position}; leave one of the two out, or write this one first")
        return new

    def _key(self, entries: Mapping[Any, Node], part: Any, above: tuple[str, ...], new: Node | None) -> Any:
        """Return the key of a mapping that a part of a path means; keys that are no texts are compared as texts."""
        key = part if part in entries else next((key for key in entries if str(key) == str(part)), part)
        if new is None and key not in entries:
            near = did_you_mean(part, map(str, entries))
            raise self._error(".".join(above), f"has no key {part!r} to delete{near}")
        return key

    def _index(self, items: Sequence[Node], part: str, above: tuple[str, ...], new: Node | None) -> int:
        """Return the index that a part of a path means; that of a new last item for a hook that is not listed."""
        where = ".".join(above)
        if re.fullmatch(r"[0-9]+", part):
            if len(part) > 9 or int(part) >= len(items):
                holds = f"has {len(items)}, counted from 0" if items else "is empty"
                raise self._error(where, f"has no item {part}; it {holds}")
            return int(part)
        if above != ("hooks",):
            raise self._error(where, f"is a list of {len(items)}: {part!r} is no index, counted from 0")
        names = [str(hook_entry(item)[0]).rpartition(".")[2] for item in items]
        indices = [index for index, name in enumerate(names) if normalised(name) == normalised(part)]
        if len(indices) > 1:
            raise self._error(where, f"{part} is listed {len(indices)} times; use an index of {indices}")
        if not indices and new is None:
            raise self._error(where, f"no hook {part!r} is listed{did_you_mean(part, names)}")
        return indices[0] if indices else len(items)

    def _error(self, key: str, message: str) -> ConfigError:
        return ConfigError(Problem(self._position, key, message))


def _renamed(new: Node, old: Node | None) -> Node:
    """Return the new name of a class; it remembers the old one, for which the keys beside it stood there."""
    if old is None or same_class(old.plain(), new.plain()):
        return new
    return replace(new, former=old.former or str(old.shown()))


def copies_left(before: Node, after: Node, *, unread: Sequence[str] = ("vars",)) -> list[str]:
    """Return a note for each value that overrides changed while a copy of it, made by an anchor of YAML, stayed.

    Args:
        before: the config without the overrides.
        after: the config with them.
        unread: sections in which a copy that stayed does not matter.
    """
    found = list(before.places())
    if all(alias is None for _, _, alias in found):
        return []
    there, left = _by_position(found), _by_position(after.places())
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


def _by_position(found: Iterable[Place]) -> dict[Position, dict[tuple[Any, ...], Position]]:
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
