"""Configs: from files and overrides to one merged tree that knows where each value comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emrun.errors import ConfigError, Position, Problem, did_you_mean
from emrun.names import normalised
from emrun.yaml_tree import MAX_DEPTH, MAX_NODES, Node, dump, node_of, parse, read_scalar

_INTERPOLATION = re.compile(r"(?P<escape>\$\$\{)|\$\{(?P<name>[^{}]*)\}|\$\{")


class Config(Mapping[str, Any]):
    """A config that was read, with what it extends and its overrides: a mapping of plain values.

    It is read-only; for one with other values, `load_config(config, ["model.optimizer.lr=0.1"])`.

    Args:
        root: the merged tree, before interpolation.
        name: what the config is called: the stem of its file.
        text: the text of its file, where it is a single one.
    """

    def __init__(self, root: Node, name: str, text: str | None = None) -> None:
        self.root = root
        self.name = name
        self.text = text
        plain = interpolate(root).plain()
        self._plain: dict[str, Any] = plain if isinstance(plain, dict) else {}

    def __getitem__(self, key: str) -> Any:
        return self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __repr__(self) -> str:
        return dump(node_of(self.root.shown(), self.root.position))


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config, to look at it or to build from it.

    Args:
        source: a file, or a directory that holds `config.yaml`, or a mapping, or a config that was loaded before.
        overrides: `key.path=value`, `~key.path` to delete.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit, or a `${...}` names nothing.
    """
    if isinstance(source, Config):
        return Config(override(source.root, overrides), source.name, source.text)
    if isinstance(source, Mapping):
        return Config(override(node_of(source, Position("config")), overrides), "run")
    path, text = _read_text(Path(source))
    node = parse(text, str(path))
    extends = isinstance(node.value, dict) and node.get("extends") is not None
    root = override(_extended(node, path, ()), overrides)
    return Config(root, Path(source).resolve().stem, None if extends else text)


def read_config(source: Path, overrides: Sequence[str] = ()) -> Node:
    """Read a config, with what it extends and with overrides, before interpolation.

    Args:
        source: a file, or a directory that holds `config.yaml`.
        overrides: `key.path=value`, `~key.path` to delete.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit.
    """
    path, text = _read_text(source)
    return override(_extended(parse(text, str(path)), path, ()), overrides)


def overlay(config: Node, stream: str) -> Node:
    """Return the config with which a stream is evaluated: `eval.<stream>` laid over it.

    Its sections are merged; its `hooks`, being a list, replace the hooks.
    """
    section = config.get("eval", stream)
    return merge(config, section) if section is not None and isinstance(section.value, dict) else config


def merge(base: Node, over: Node) -> Node:
    """Merge two trees: mappings key by key, lists replace, a mapping whose `class` (or `import`) differs replaces."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    if _form_of(over) is not None and _form_of(base) != _form_of(over):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(base.value[key], node) if key in base.value else node
    return replace(over, value=merged)


def _form_of(node: Node) -> tuple[str, Any] | None:
    """Return what a form names, None when the mapping is no form."""
    return next(((key, node.value[key].plain()) for key in ("class", "import") if key in node.value), None)


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
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(Problem(position, "", "an override is key=value, or ~key to delete"))
        change = replace(parse(value, position.source), position=position, key=position)
        for part in reversed(_path_of(key, position)):
            change = Node({part: change}, position, position)
        changes = _joined(changes, change, ())
    changed = _apply(config, changes, ())
    doomed: dict[tuple[str | int, ...], Position] = {}
    for path, position in deletions:
        found = tuple(_resolve(config, changed, path, position))
        if found in doomed:
            raise ConfigError(Problem(position, "", f"{'.'.join(path)} is deleted twice, also by {doomed[found]}"))
        doomed[found] = position
    for found in sorted(doomed, key=lambda each: [str(part).rjust(9) for part in each], reverse=True):
        changed = _delete(changed, found)
    return changed


def interpolate(config: Node) -> Node:
    """Replace every `${key.path}`, `${env:NAME}` and `${env:NAME,default}`; `$${` stands for `${`.

    A value that is one interpolation gets the type of what it names; one from the environment is read as a YAML scalar.

    Raises:
        ConfigError: a name is unknown, keys refer to each other in a circle, or the result is too large or too deep.
    """
    return _Interpolation(config).of(config, (), 1)


def _read_text(path: Path, name: str | None = None) -> tuple[Path, str]:
    """Return the file of a config, and its text; messages call the file `name`, or else as its path is."""
    try:
        if name is None and path.is_dir():
            path = path / "config.yaml"
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(Problem(Position(name or str(path)), "", f"cannot be read: {error.strerror}")) from error
    try:
        return path, content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8").removeprefix("\ufeff").split("\n")
        position = Position(name or str(path), len(before), len(before[-1]) + 1)
        raise ConfigError(Problem(position, "", "is not UTF-8")) from error


def _extended(node: Node, path: Path, readers: tuple[Path, ...]) -> Node:
    """Return what a file says, merged with what it extends."""
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
            raise ConfigError(Problem(name.position, "extends", f"{name.shown()!r} is no file name"))
        try:
            other = (path.parent / name.value).resolve(strict=True)
            other = (other / "config.yaml").resolve(strict=True) if other.is_dir() else other
        except (OSError, RuntimeError, ValueError) as error:  # not there; a circle of links; a null byte
            raise ConfigError(
                Problem(name.position, "extends", f"there is no file {str(path.parent / name.value)!r}")
            ) from error
        if other in (*readers, path.resolve()):
            raise ConfigError(Problem(name.position, "extends", f"{name.value} extends itself"))
        _, text = _read_text(other, _shown(other))
        base = _extended(parse(text, _shown(other)), other, (*readers, path.resolve()))
        merged = base if merged is None else merge(merged, base)
    return node if merged is None else merge(merged, node)


def _shown(path: Path) -> str:
    """Return a path as a message shows it: relative where it is below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _path_of(text: str, position: Position) -> list[str]:
    path = text.split(".")
    if len(path) > MAX_DEPTH:
        raise ConfigError(Problem(position, "", f"has more than {MAX_DEPTH} parts"))
    if not all(path):
        raise ConfigError(Problem(position, "", f"{text!r} is no key; write for example model.optimizer.lr=0.1"))
    return path


def _joined(older: Node, newer: Node, path: tuple[str, ...]) -> Node:
    """Put two trees of overrides together, whose order does not matter unless both set the same key."""
    if isinstance(older.value, dict) is not isinstance(newer.value, dict):
        message = f"{'.'.join(path)} is also set to {older.plain()!r} by {older.position}"
        raise ConfigError(Problem(newer.position, "", message))
    if not isinstance(older.value, dict):
        return newer
    forms = _form_of(older), _form_of(newer)
    if None not in forms and forms[0] != forms[1]:
        return newer
    joined = dict(older.value)
    for key, node in newer.value.items():
        joined[key] = _joined(joined[key], node, (*path, str(key))) if key in joined else node
    return replace(older, value=joined)


def _apply(base: Node, changes: Node, path: tuple[str, ...]) -> Node:
    """Merge the tree of overrides; where the config has a list, their keys are indices, or names of hooks."""
    if isinstance(base.value, list) and isinstance(changes.value, dict):
        items = list(base.value)
        for part, node in changes.value.items():
            key = str(part)
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
    for part, node in changes.value.items():
        key = _own_key(merged, part)
        if key == "hooks" and not path and key not in merged and isinstance(node.value, dict):
            merged[key] = Node([], node.position, node.key)
        merged[key] = _apply(merged[key], node, (*path, str(key))) if key in merged else node
    return replace(base, value=merged)


def _own_key(mapping: Mapping[Any, Node], part: Any) -> Any:
    """Return the key of a mapping that a part of a path means; keys that are no texts are compared as texts."""
    return part if part in mapping else next((key for key in mapping if str(key) == str(part)), part)


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
    if re.fullmatch(r"[0-9]+", key):
        if len(key) > 9 or int(key) >= len(items):
            raise ConfigError(Problem(position, where, f"has no item {key}; it has {len(items)}, counted from 0"))
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
        elif isinstance(node.value, dict) and (key := _own_key(node.value, part)) in node.value:
            found.append(key)
            node = node.value[key]
            old = old.value[key] if isinstance(old.value, dict) and key in old.value else node
        else:
            keys = [str(key) for key in node.value] if isinstance(node.value, dict) else []
            raise ConfigError(Problem(position, where, f"has no key {part!r} to delete{did_you_mean(part, keys)}"))
    return found


def _delete(node: Node, path: Sequence[Any]) -> Node:
    first, rest = path[0], path[1:]
    if isinstance(node.value, list):
        items = list(node.value)
        items[first : first + 1] = [_delete(items[first], rest)] if rest else []
        return replace(node, value=items)
    entries = dict(node.value)
    if rest:
        entries[first] = _delete(entries[first], rest)
    else:
        del entries[first]
    return replace(node, value=entries)


class _Interpolation:
    """Replaces what stands in `${...}`, and counts what comes of it: references can multiply like aliases."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._count = 0

    def of(self, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return a tree without interpolations; `active` are the names that are being looked up."""
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self._count > MAX_NODES else f"{MAX_DEPTH} levels"
            raise ConfigError(Problem(node.position, "", f"has more than {limit} once its references are followed"))
        if isinstance(node.value, dict):
            return replace(node, value={key: self.of(child, active, depth + 1) for key, child in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[self.of(child, active, depth + 1) for child in node.value])
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        whole = _INTERPOLATION.fullmatch(node.value)
        if whole and whole["name"] is not None:
            found = self._named(whole["name"], node, active, depth)
            value = read_scalar(found.value) if whole["name"].startswith("env:") else found.value
            return replace(found, value=value, position=node.position, key=node.key)
        return self._text(node, active, depth)

    def _text(self, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return a text with interpolations in it as one text."""
        spelling = None

        def text(match: re.Match[str]) -> str:
            nonlocal spelling
            if match["escape"]:
                return "${"
            if match["name"] is None:
                raise ConfigError(Problem(node.position, "", "'${' without '}'; '$${' stands for a plain '${'"))
            found = self._named(match["name"], node, active, depth)
            if isinstance(found.value, dict | list):
                message = f"{match.group()} is no single value, so it cannot be part of a text"
                raise ConfigError(Problem(node.position, "", message))
            if found.spelling is not None:
                spelling = node.value
            return str(found.value)

        return replace(node, value=_INTERPOLATION.sub(text, node.value), spelling=spelling)

    def _named(self, name: str, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return what an interpolation names."""
        if name.startswith("env:"):
            return _environment(name, node)
        if name in active:
            circle = " -> ".join((*active[active.index(name) :], name))
            raise ConfigError(Problem(node.position, "", f"${{{name}}} refers to itself: {circle}"))
        active = (*active, name)
        found = self._root
        for part in name.split("."):
            if isinstance(found.value, str):
                found = self.of(found, active, depth + 1)
            children = _children(found)
            if part not in children:
                near = did_you_mean(part, children)
                raise ConfigError(Problem(node.position, "", f"${{{name}}}: the config has no {part!r} there{near}"))
            found = children[part]
        return self.of(found, active, depth + 1)


def _environment(name: str, node: Node) -> Node:
    """Return the text of `env:NAME` or `env:NAME,default`; messages show what the config says instead."""
    variable, comma, default = name.removeprefix("env:").partition(",")
    value = os.environ.get(variable)
    if value is not None:
        return replace(node, value=value, spelling=node.value)
    if not comma:
        message = f"the environment has no {variable}; set it, or write ${{{name},default}}"
        raise ConfigError(Problem(node.position, "", message))
    return replace(node, value=default)


def _children(node: Node) -> Mapping[str, Node]:
    if isinstance(node.value, dict):
        return {str(key): child for key, child in node.value.items()}
    if isinstance(node.value, list):
        return {str(index): child for index, child in enumerate(node.value)}
    return {}


def with_defaults(config: Node, defaults: Mapping[str, Any]) -> Node:
    """Return the config with top-level keys added that it does not have, or has as null."""
    has = {key: node for key, node in config.value.items() if key not in defaults or node.value is not None}
    added = {key: node_of(value, Position("emrun")) for key, value in defaults.items() if key not in has}
    return replace(config, value={**added, **has})
