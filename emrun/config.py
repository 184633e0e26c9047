"""Configs: from files and overrides to one merged tree that knows where each value comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emrun.errors import ConfigError, Position, Problem, did_you_mean
from emrun.yaml_tree import Node, node_of, parse

_INTERPOLATION = re.compile(r"\$(\$?)\{([^{}]*)\}")


def read_config(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Node:
    """Read a config, with what it extends and with overrides, before interpolation.

    Args:
        source: a file, or a directory that holds `config.yaml`, or a mapping.
        overrides: `key.path=value`, `~key.path` to delete.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit.
    """
    node = node_of(source, Position("config")) if isinstance(source, Mapping) else _read_file(source, ())
    return override(node, overrides)


def overlay(config: Node, stream: str) -> Node:
    """Return the config with which a stream is evaluated: `eval.<stream>` laid over it.

    Its `hooks` replace the hooks, its other sections are merged.
    """
    section = config.get("eval", stream)
    if section is None or not isinstance(section.value, dict):
        return config
    hooks = section.value.get("hooks")
    merged = merge(config, replace(section, value={k: v for k, v in section.value.items() if k != "hooks"}))
    return merged if hooks is None else replace(merged, value={**merged.value, "hooks": hooks})


def merge(base: Node, over: Node) -> Node:
    """Merge two trees: mappings key by key, lists replace, a mapping whose `class` differs replaces."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    classes = [node.value["class"].value if "class" in node.value else None for node in (base, over)]
    if classes[1] is not None and classes[0] != classes[1]:
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(base.value[key], node) if key in base.value else node
    return replace(over, value=merged)


def override(config: Node, overrides: Sequence[str]) -> Node:
    """Apply overrides; all together are one mapping, merged by the rule of `merge`, then deletions follow.

    Raises:
        ConfigError: an override is malformed, or addresses what is not there.
    """
    changes = Node({}, Position("override"))
    deletions: list[tuple[list[str], Position]] = []
    for text in overrides:
        position = Position(f"override {text!r}")
        if text.startswith("~"):
            deletions.append((_path_of(text[1:], position), position))
            continue
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(Problem(position, "", "an override is key=value, or ~key to delete"))
        leaf = replace(parse(value, position.source), position=position, key=position)
        _add(changes, _path_of(path, position), leaf, position)
    changed = _apply(config, changes, ())
    doomed = [(_resolve(config, changed, path, position), position) for path, position in deletions]
    for found, position in sorted(doomed, key=lambda each: [str(part).rjust(9) for part in each[0]], reverse=True):
        changed = _delete(changed, found, position)
    return changed


def interpolate(config: Node) -> Node:
    """Replace every `${key.path}`, `${env:NAME}` and `${env:NAME,default}`; `$${` stands for `${`.

    A value that is one interpolation gets the type of what it names; values from the environment are read as YAML.

    Raises:
        ConfigError: a name is unknown, or keys refer to each other in a circle.
    """
    return _interpolate(config, config, ())


def _read_file(path: Path, readers: tuple[Path, ...]) -> Node:
    if path.is_dir():
        path = path / "config.yaml"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(Problem(Position(str(path)), "", f"cannot be read: {error.strerror}")) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        raise ConfigError(Problem(Position(str(path), line, column), "", "is not UTF-8")) from error
    node = parse(text, str(path))
    if not isinstance(node.value, dict):
        raise ConfigError(Problem(node.position, "", "a config is a mapping with the keys dataset, model, ..."))
    extends = node.value.get("extends")
    if extends is None:
        return node
    node = replace(node, value={key: value for key, value in node.value.items() if key != "extends"})
    names = extends.value if isinstance(extends.value, list) else [extends]
    merged: Node | None = None
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(Problem(name.position, "extends", f"{name.value!r} is no file name"))
        other = (path.parent / name.value).resolve()
        if other in (*readers, path.resolve()):
            raise ConfigError(Problem(name.position, "extends", f"{name.value} extends itself"))
        if not other.exists():
            raise ConfigError(Problem(name.position, "extends", f"there is no file {path.parent / name.value}"))
        base = _read_file(other, (*readers, path.resolve()))
        merged = base if merged is None else merge(merged, base)
    return node if merged is None else merge(merged, node)


def _path_of(text: str, position: Position) -> list[str]:
    path = text.split(".")
    if not all(path):
        raise ConfigError(Problem(position, "", f"{text!r} is no key; write for example model.optimizer.lr=0.1"))
    return path


def _add(changes: Node, path: list[str], leaf: Node, position: Position) -> None:
    """Put an override into the tree of all overrides."""
    node = changes
    for index, part in enumerate(path[:-1]):
        child = node.value.get(part)
        if child is None:
            child = node.value[part] = Node({}, position, position)
        elif not isinstance(child.value, dict):
            taken = ".".join(path[: index + 1])
            raise ConfigError(Problem(position, "", f"{taken} was set to {child.plain()!r} by another override"))
        node = child
    older = node.value.get(path[-1])
    node.value[path[-1]] = leaf if older is None else merge(older, leaf)


def _apply(base: Node, changes: Node, path: tuple[str, ...]) -> Node:
    """Merge the tree of overrides; where the config has a list, their keys are indices, or names of hooks."""
    if isinstance(base.value, list) and isinstance(changes.value, dict):
        items = list(base.value)
        for key, node in changes.value.items():
            index = _index(items, key, path, node.position, adding=True)
            if path == ("hooks",):
                old = items[index] if index < len(items) else Node(key, node.position)
                items[index : index + 1] = [_change_hook(old, node, (*path, key))]
            else:
                items[index] = _apply(items[index], node, (*path, key))
        return replace(base, value=items)
    if path == ("hooks",) and base.value is None:
        return _apply(replace(base, value=[]), changes, path)
    if not isinstance(base.value, dict) or not isinstance(changes.value, dict) or merge(base, changes) is changes:
        return changes
    merged = dict(base.value)
    for key, node in changes.value.items():
        if key == "hooks" and not path and key not in merged and isinstance(node.value, dict):
            merged[key] = Node([], node.position, node.key)
        merged[key] = _apply(merged[key], node, (*path, key)) if key in merged else node
    return replace(base, value=merged)


def _change_hook(entry: Node, arguments: Node, path: tuple[str, ...]) -> Node:
    """Merge arguments into an entry of the list of hooks, which is a name or a mapping name -> arguments."""
    if not isinstance(arguments.value, dict):
        raise ConfigError(
            Problem(arguments.position, ".".join(path), f"{arguments.plain()!r} is no mapping of the hook's arguments")
        )
    name, node = hook_entry(entry)
    if name is None:
        return entry  # reported when the hooks are built
    old = node if node is not None and isinstance(node.value, dict) else None
    key = node.key if node is not None else None
    changed = arguments if old is None else _apply(old, arguments, path)
    return replace(entry, value={name: replace(changed, key=key or entry.position)})


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
    if re.fullmatch(r"\d+", key):
        if int(key) >= len(items):
            raise ConfigError(Problem(position, where, f"has no item {key}; it has {len(items)}, counted from 0"))
        return int(key)
    if path != ("hooks",):
        raise ConfigError(Problem(position, where, f"is a list: {key!r} is no index from 0 to {len(items) - 1}"))
    names = [str(hook_entry(item)[0]) for item in items]
    indices = [index for index, name in enumerate(names) if name == key]
    if len(indices) > 1:
        raise ConfigError(Problem(position, where, f"{key} is listed {len(indices)} times; use an index of {indices}"))
    if indices:
        return indices[0]
    if not adding:
        raise ConfigError(Problem(position, where, f"no hook {key!r} is listed{did_you_mean(key, names)}"))
    return len(items)


def _resolve(original: Node, changed: Node, path: list[str], position: Position) -> list[str | int]:
    """Turn the path of a deletion into keys and indices, the indices those of the original."""
    found: list[str | int] = []
    node, old = changed, original
    for part in path:
        where = ".".join(str(each) for each in found)
        if isinstance(node.value, list):
            items = old.value if isinstance(old.value, list) else node.value
            index = _index(items, part, tuple(map(str, found)), position)
            if index >= len(node.value):
                raise ConfigError(
                    Problem(position, where, f"has no item {part} any more; another override replaced it")
                )
            found.append(index)
            node, old = node.value[index], items[index]
            if found[0] == "hooks" and len(found) == 2 and len(path) > 2:
                name, arguments = hook_entry(node)
                if name is not None and arguments is not None:
                    found.append(name)
                    node = old = arguments
        elif isinstance(node.value, dict) and part in node.value:
            found.append(part)
            node = node.value[part]
            old = old.value[part] if isinstance(old.value, dict) and part in old.value else node
        else:
            keys = [str(key) for key in node.value] if isinstance(node.value, dict) else []
            raise ConfigError(Problem(position, where, f"has no key {part!r} to delete{did_you_mean(part, keys)}"))
    return found


def _delete(node: Node, path: Sequence[str | int], position: Position) -> Node:
    first, rest = path[0], path[1:]
    if isinstance(node.value, list):
        items = list(node.value)
        index = int(first)
        items[index : index + 1] = [_delete(items[index], rest, position)] if rest else []
        return replace(node, value=items)
    if first not in node.value:
        raise ConfigError(Problem(position, "", f"{first!r} is deleted twice"))
    entries = dict(node.value)
    child = entries.pop(first)
    if rest:
        entries = {
            key: (_delete(child, rest, position) if key == first else value) for key, value in node.value.items()
        }
    return replace(node, value=entries)


def _interpolate(node: Node, root: Node, active: tuple[str, ...]) -> Node:
    if isinstance(node.value, dict):
        return replace(node, value={key: _interpolate(child, root, active) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_interpolate(child, root, active) for child in node.value])
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    whole = _INTERPOLATION.fullmatch(node.value)
    if whole and not whole.group(1):
        return replace(_named(whole.group(2), node, root, active), position=node.position, key=node.key)

    def text(match: re.Match[str]) -> str:
        if match.group(1):
            return "${" + match.group(2) + "}"
        found = _named(match.group(2), node, root, active).plain()
        if isinstance(found, dict | list):
            raise ConfigError(
                Problem(node.position, "", f"{match.group()} is no single value, so it cannot be part of a text")
            )
        return str(found)

    return replace(node, value=_INTERPOLATION.sub(text, node.value))


def _named(name: str, node: Node, root: Node, active: tuple[str, ...]) -> Node:
    """Return what an interpolation names."""
    if name.startswith("env:"):
        variable, comma, default = name.removeprefix("env:").partition(",")
        value = os.environ.get(variable, default if comma else None)
        if value is None:
            raise ConfigError(
                Problem(node.position, "", f"the environment has no {variable}; set it, or write ${{{name},default}}")
            )
        return _environment_value(value, node)
    if name in active:
        circle = " -> ".join((*active[active.index(name) :], name))
        raise ConfigError(Problem(node.position, "", f"${{{name}}} refers to itself: {circle}"))
    found = root
    for part in name.split("."):
        children = _children(found)
        if part not in children:
            near = did_you_mean(part, children)
            raise ConfigError(Problem(node.position, "", f"${{{name}}}: the config has no {part!r} there{near}"))
        found = children[part]
    return _interpolate(found, root, (*active, name))


def _environment_value(value: str, node: Node) -> Node:
    """Read a value from the environment as a YAML scalar; text that is none stays text, and is in no message."""
    try:
        parsed = parse(value, "environment").value
    except ConfigError:
        parsed = value
    return replace(node, value=value if isinstance(parsed, dict | list) else parsed)


def _children(node: Node) -> Mapping[str, Node]:
    if isinstance(node.value, dict):
        return {str(key): child for key, child in node.value.items()}
    if isinstance(node.value, list):
        return {str(index): child for index, child in enumerate(node.value)}
    return {}


def with_defaults(config: Node, defaults: Mapping[str, Any]) -> Node:
    """Return the config with top-level keys added that it does not have."""
    added = {key: node_of(value, Position("emrun")) for key, value in defaults.items() if key not in config.value}
    return replace(config, value={**added, **config.value})
