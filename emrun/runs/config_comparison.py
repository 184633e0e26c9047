"""The configs of runs, key by key: what differs between two, hooks by their names, and all values of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from emrun.base.errors import ConfigError, Position, StorageError
from emrun.base.types import Json
from emrun.config.interpolation import interpolate
from emrun.config.overrides import hook_entry
from emrun.config.yaml_tree import Node, node_of
from emrun.runs.stored_run import StoredRun
from emrun.storage.run import CONFIG

_MOST = 1_000  # differences
_MOST_VALUES = 2_000
_DEEPEST = 50  # mappings and lists in each other


def compare_configs(a: StoredRun, b: StoredRun) -> Json:
    """Return the parts `config` and `hooks_order` of a comparison; see `compare`.

    Values are compared after references to other values are replaced. The order of keys, comments, and the way in which
    a value is written do not matter, but 1, 1.0 and true are three values. An origin is the line in `config.yaml` of
    the run and, if there was one in the command, the override.

    Raises:
        StorageError: a config cannot be read.
        ConfigError: a config is damaged.
    """
    one = _tree(a)
    other = _tree(b)
    commands = [_overrides(run.trace) for run in (a, b)]
    differing: list[Json] = []
    for key, left, right in differences(one, other):
        if len(differing) == _MOST:
            break
        sides = [_side(node, key, overrides) for node, overrides in zip((left, right), commands, strict=True)]
        differing.append({"key": key, "a": sides[0], "b": sides[1]})
    return {"config": differing, "hooks_order": order_of_hooks(one, other)}


def _tree(run: StoredRun) -> Node:
    try:
        return interpolate(run.config.root, reads_environment=False)
    except ConfigError:  # a reference leads nowhere
        return run.config.root


def _side(node: Node | None, key: str, overrides: Mapping[str, str]) -> Json | None:
    if node is None:
        return None
    line = f"config.yaml:{node.position.line}" if node.position.line else "config.yaml"
    for name, override in overrides.items():
        if f"{key}.".startswith(f"{name}."):
            line = f"{line}, override {override}"
            break
    return {"value": node.plain(), "origin": line}


def _overrides(trace: Mapping[str, Any]) -> dict[str, str]:
    """Return the overrides in the commands that started and resumed a run: key -> the override."""
    words: list[Any] = []
    for resume in trace.get("resumes", ()):
        before = resume.get("before")
        if isinstance(before, dict) and isinstance(before.get("command"), list):
            words += before["command"]
    words += trace.get("command", ())
    overrides = {}
    for word in words:
        if isinstance(word, str):
            key, sign, _ = word.partition("=")
            if sign and key and not key.startswith("-"):
                overrides[key] = word
    return overrides


def differences(
    one: Node | None, other: Node | None, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Node | None, Node | None]]:
    """Yield the keys whose values differ, as overrides write them, with both values."""
    if one is not None and other is not None:
        is_split = isinstance(one.value, dict | list) and type(one.value) is type(other.value)
        if is_split and (path == ("hooks",) or isinstance(one.value, dict) or len(one.value) == len(other.value)):
            left = children(one, path)
            right = children(other, path)
            for name in {**left, **right}:
                yield from differences(left.get(name), right.get(name), (*path, name))
            return
        if repr(one.plain()) == repr(other.plain()):
            return
    yield ".".join(path), one, other


def children(node: Node, path: tuple[str, ...]) -> Mapping[str, Node]:
    """Return what a value of a config consists of, by key or index; the hooks by name."""
    return _hooks(node) if path == ("hooks",) and isinstance(node.value, list) else node.children()


def _hooks(section: Node) -> dict[str, Node]:
    """Return the arguments of hooks by name; those of a hook that is listed twice by index and name."""
    entries = [(hook_entry(entry), entry) for entry in section.value]
    names = [name for (name, _), _ in entries]
    nodes = {}
    for index, ((name, arguments), entry) in enumerate(entries):
        if name is None:
            nodes[str(index)] = entry
            continue
        key = name if names.count(name) == 1 else f"{index}.{name}"
        if arguments is None or arguments.value is None:
            nodes[key] = Node({}, entry.position)
        else:
            nodes[key] = arguments
    return nodes


def order_of_hooks(one: Node, other: Node) -> dict[str, list[str]] | None:
    """Return the names of the hooks that two configs have in common, if they are in another order, of each side."""
    sections = [tree.get("hooks") for tree in (one, other)]
    names = [
        [str(hook_entry(entry)[0]) for entry in section.value]
        if section is not None and isinstance(section.value, list)
        else []
        for section in sections
    ]
    a = [name for name in names[0] if name in names[1]]
    b = [name for name in names[1] if name in names[0]]
    return {"a": a, "b": b} if a != b and sorted(a) == sorted(b) else None


def values_of(run: StoredRun) -> Json:
    """Return the values of the config that are neither mappings nor lists, as they are written: key -> value.

    An empty mapping or list is a value, too; so is a hook without arguments, whose value is an empty mapping. A config
    that cannot be read has none, and is a problem of the run.
    """
    try:
        tree = node_of(run.written, Position(CONFIG))
    except (ConfigError, StorageError) as error:
        run.note(str(error).partition("\n")[0])
        return {}
    values: Json = {}
    for key, value in _flat(tree, ()):
        if len(values) == _MOST_VALUES:
            run.note(f"the config has more than {_MOST_VALUES:,} values; the others are left out")
            break
        values[key] = value
    return values


def _flat(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    below = children(node, path) if len(path) < _DEEPEST else {}
    if not below:
        yield ".".join(path), node.plain()
    for key, child in below.items():
        yield from _flat(child, (*path, key))
