"""Configs laid over one another: what a config extends, a section under `eval`, and overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emrun.config.interpolation import name_of, unread_values
from emrun.config.names import normalised, same_class
from emrun.config.places import at, children_of
from emrun.config.yaml_tree import MAX_DEPTH, Node, parse
from emrun.errors import ConfigError, Position, Problem
from emrun.wording import did_you_mean


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
    return old is None or old[0] != new[0] or new[0] == "import" or not _same_class(old[1], new[1])


def _form_of(node: Node) -> tuple[str, Any] | None:
    """Return what a form names, None when the mapping is no form."""
    return next(((key, node.value[key].plain()) for key in ("class", "import") if key in node.value), None)


def _same_class(one: Any, other: Any) -> bool:
    return one == other or (isinstance(one, str) and isinstance(other, str) and same_class(one, other))


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


def _path_of(text: str, position: Position) -> list[str]:
    path = text.split(".")
    if len(path) > MAX_DEPTH:
        raise ConfigError(Problem(position, "", f"has more than {MAX_DEPTH} parts"))
    if not all(path):
        raise ConfigError(Problem(position, "", f"{text!r} is no key; write for example model.optimizer.lr=0.1"))
    return path


class _Overriding:
    """A tree that overrides change, one after the other.

    Args:
        tree: the tree as it is before them.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self._position = Position("override")  # of the override that is applied
        self._path: tuple[str, ...] = ()
        self._earlier: dict[str, tuple[str, ...]] = {}  # what the others are called in positions -> their paths

    def apply(self, text: str) -> None:
        """Apply an override: `key.path=value`, or `~key.path` to delete."""
        self._position = Position(f"override {text!r}")
        if text.startswith("~"):
            self.tree = self._without(self.tree, _path_of(text[1:], self._position), ())
            return
        key, equals, value = text.partition("=")
        if not equals:
            raise self._error("", "an override is key=value, or ~key to delete")
        node = replace(parse(value, self._position.source), position=self._position, key=self._position)
        path = _path_of(key, self._position)
        self._path = tuple(path)
        self.tree = self._with(self.tree, path, node, ())
        self._earlier[self._position.source] = self._path

    def check_vars(self, before: Node) -> None:
        """Check that overrides add no free values that nothing reads: such a mistake would be silent."""
        for path, node in unread_values(self.tree):
            if node.position.source in self._earlier and at(before, path) is None:
                self._position = node.position
                owner = at(before, path[:-1])
                near = did_you_mean(str(path[-1]), children_of(owner) if owner else [])
                raise self._error(".".join(map(str, path[:-1])), f"nothing reads ${{{name_of(path)}}}{near}")

    def _with(self, base: Node, path: Sequence[Any], new: Node, above: tuple[str, ...]) -> Node:
        """Return `base`, which stands at `above`, with `new` at a path below it."""
        if not path:
            return self._laid(base, new, above)
        part, *rest = path
        where = (*above, str(part))
        if above == ("hooks",) and base.value is None:
            base = replace(base, value=[])
        if isinstance(base.value, list):  # its keys are indices, or names of hooks
            items = list(base.value)
            index = _index(items, str(part), above, self._position, adding=True)
            if above == ("hooks",):
                old = items[index] if index < len(items) else Node(str(part), self._position)
                items[index : index + 1] = [self._with_hook(old, rest, new, where)]
            else:
                items[index] = self._with(items[index], rest, new, where)
            return replace(base, value=items)
        if not isinstance(base.value, dict):
            if base.position.source in self._earlier:
                message = f"{'.'.join(above)} is also set to {base.shown()!r} by {base.position}"
                raise self._error("", message)
            base = Node({}, self._position, base.key or self._position)
        entries = dict(base.value)
        key = _own_key(entries, part)
        if not rest and key in ("class", "import"):
            entries.pop("import" if key == "class" else "class", None)
            new = _renamed(new, base.value.get(key))
        old = entries.get(key) or Node(None if where == ("hooks",) else {}, self._position, self._position)
        entries[key] = self._with(old, rest, new, where) if rest or key in entries or where == ("hooks",) else new
        return replace(base, value=entries)

    def _with_hook(self, entry: Node, path: Sequence[Any], new: Node, where: tuple[str, ...]) -> Node:
        """Change the arguments in an entry of the list of hooks, which is a name or a mapping name -> arguments."""
        if not path and not isinstance(new.value, dict):
            raise self._error(".".join(where), f"{new.plain()!r} is no mapping of the hook's arguments")
        name, arguments = hook_entry(entry)
        if name is None:
            return entry  # reported when the hooks are built
        has_arguments = arguments is not None and isinstance(arguments.value, dict)
        old = arguments if arguments is not None and has_arguments else Node({}, self._position)
        changed = self._with(old, path, new, where) if path or has_arguments else new
        key = arguments.key if arguments is not None else None
        return replace(entry, value={name: replace(changed, key=key or entry.position)})

    def _laid(self, base: Node, new: Node, where: tuple[str, ...]) -> Node:
        """Return a value as a whole laid over what stands there."""
        is_list = isinstance(base.value, list) or (where == ("hooks",) and base.value is None)
        is_same = isinstance(base.value, dict) and isinstance(new.value, dict) and not _is_another_form(base, new)
        if isinstance(new.value, dict) and (is_list or is_same):
            for part, node in new.value.items():
                base = self._with(base, [part], node, where)
            return base
        for lost in _lost(base, new):
            if self._earlier.get(lost.position.source, self._path) != self._path:
                raise self._error("", f"would undo {lost.position}; leave one of the two out, or write this one first")
        return new

    def _without(self, base: Node, path: Sequence[str], above: tuple[str, ...]) -> Node:
        """Return `base`, which stands at `above`, without what is at a path below it."""
        part, *rest = path
        if isinstance(base.value, list):
            items = list(base.value)
            index = _index(items, part, above, self._position)
            name, arguments = hook_entry(items[index]) if above == ("hooks",) and rest else (None, None)
            if not rest:
                del items[index]
            elif arguments is not None:
                items[index] = replace(items[index], value={name: self._without(arguments, rest, (*above, part))})
            else:
                items[index] = self._without(items[index], rest, (*above, part))
            return replace(base, value=items)
        entries = dict(base.value) if isinstance(base.value, dict) else {}
        key = _own_key(entries, part)
        if key not in entries:
            near = did_you_mean(part, [str(each) for each in entries])
            raise self._error(".".join(above), f"has no key {part!r} to delete{near}")
        if rest:
            entries[key] = self._without(entries[key], rest, (*above, part))
        else:
            del entries[key]
        return replace(base, value=entries)

    def _error(self, key: str, message: str) -> ConfigError:
        return ConfigError(Problem(self._position, key, message))


def _renamed(new: Node, old: Node | None) -> Node:
    """Return the new name of a class; it remembers the old one, for which the keys beside it stood there."""
    if old is None or _same_class(old.plain(), new.plain()):
        return new
    return replace(new, former=old.former or str(old.shown()))


def _lost(old: Node, new: Node | None) -> Iterator[Node]:
    """Yield what is below a node and not at the same place below another one."""
    theirs = children_of(new) if new is not None else {}
    for key, child in children_of(old).items():
        if key not in theirs:
            yield child
        yield from _lost(child, theirs.get(key))


def _own_key(mapping: Mapping[Any, Node], part: Any) -> Any:
    """Return the key of a mapping that a part of a path means; keys that are no texts are compared as texts."""
    return part if part in mapping else next((key for key in mapping if str(key) == str(part)), part)


def hook_entry(entry: Node) -> tuple[str | None, Node | None]:
    """Return name and arguments of an entry of the list of hooks; no name when the entry is malformed."""
    if isinstance(entry.value, str):
        return entry.value, None
    if isinstance(entry.value, dict) and len(entry.value) == 1:
        ((name, node),) = entry.value.items()
        if isinstance(name, str):
            return name, node
    return None, None


def _index(items: list[Node], key: str, path: tuple[str, ...], position: Position, *, adding: bool = False) -> int:
    """Return the index that a key of an override means; that of a new last item for a hook that is not listed."""
    where = ".".join(path)
    holds = f"has {len(items)}, counted from 0" if items else "is empty"
    if re.fullmatch(r"[0-9]+", key):
        if len(key) > 9 or int(key) >= len(items):
            raise ConfigError(Problem(position, where, f"has no item {key}; it {holds}"))
        return int(key)
    if path != ("hooks",):
        raise ConfigError(Problem(position, where, f"is a list of {len(items)}: {key!r} is no index, counted from 0"))
    names = [str(hook_entry(item)[0]).rpartition(".")[2] for item in items]
    indices = [index for index, name in enumerate(names) if normalised(name) == normalised(key)]
    if len(indices) > 1:
        raise ConfigError(Problem(position, where, f"{key} is listed {len(indices)} times; use an index of {indices}"))
    if indices:
        return indices[0]
    if not adding:
        raise ConfigError(Problem(position, where, f"no hook {key!r} is listed{did_you_mean(key, names)}"))
    return len(items)
