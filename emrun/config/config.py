"""Configs: from files and overrides to one merged tree that knows where each value comes from."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emrun.arguments import expanded
from emrun.censor import hide_on_terminal
from emrun.config.names import normalised, same_class
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import MAX_DEPTH, MAX_NODES, Node, node_of, parse, read_scalar
from emrun.errors import TIMED_OUT, ConfigError, Position, Problem, ReadTimeout, is_timeout
from emrun.wording import did_you_mean

_Place = tuple[tuple[Any, ...], Node, Position | None]  # a path, what is there, and the alias that brought it there

_MAX_EXTENDS = 100  # files in a row
_MAX_BYTES = 40_000_000  # of a file; how many characters it may have says `parse`
_INTERPOLATION = re.compile(r"(?P<escape>\$\$\{)|\$\{(?P<name>[^{}]*)\}|\$\{")


class Config(Mapping[str, Any]):
    """A config that was read, with what it extends and its overrides: a mapping of plain values.

    It is read-only; for one with other values, `load_config(config, ["model.optimizer.lr=0.1"])`.

    Args:
        root: the merged tree, before interpolation.
        name: what the config is called: the stem of its file.
        text: the text of its file, where it is a single one.
        notes: what its overrides may not have done as they were meant.
    """

    def __init__(self, root: Node, name: str, text: str | None = None, notes: Sequence[str] = ()) -> None:
        self.root = root
        self.name = name
        self.text = text
        self.notes = tuple(notes)
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
        root = override(source.root, overrides)
        return Config(root, source.name, source.text, (*source.notes, *copies_left(source.root, root)))
    if isinstance(source, Mapping):
        return Config(override(node_of(source, Position("config")), overrides), "run")
    path, text = _read_text(expanded(source))
    node = parse(text, str(path))
    extends = isinstance(node.value, dict) and node.get("extends") is not None
    base = _Extending().read(node, path, ())
    root = override(base, overrides)
    return Config(root, Path(source).resolve().stem, None if extends else text, copies_left(base, root))


def read_config(source: Path, overrides: Sequence[str] = ()) -> Node:
    """Read a config, with what it extends and with overrides, before interpolation.

    Args:
        source: a file, or a directory that holds `config.yaml`.
        overrides: `key.path=value`, `~key.path` to delete.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit.
    """
    path, text = _read_text(expanded(source))
    return override(_Extending().read(parse(text, str(path)), path, ()), overrides)


def overlay(config: Node, stream: str) -> Node:
    """Return the config with which a stream is evaluated: `eval.<stream>` laid over it.

    Its sections are merged; its `hooks`, being a list, replace the hooks.
    """
    section = config.get("eval", stream)
    return merge(config, section) if section is not None and isinstance(section.value, dict) else config


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


def interpolate(config: Node) -> Node:
    """Replace every `${key.path}`, `${env:NAME}` and `${env:NAME,default}`; `$${` stands for `${`.

    A value that is one interpolation gets the type of what it names; one from the environment is read as a YAML scalar.

    Raises:
        ConfigError: a name is unknown, keys refer to each other in a circle, or the result is too large or too deep.
    """
    interpolated = _Interpolation(config).of(config, (), 1)
    hide_on_terminal(interpolated.secrets())
    return interpolated


def _read_text(path: Path, name: str | None = None) -> tuple[Path, str]:
    """Return the file of a config, and its text; messages call the file `name`, or else as its path is.

    The config that a command names may also be an open pipe: `/dev/stdin`, or `<(...)` of a shell.
    """
    try:
        if name is None and path.is_dir():
            path = path / "config.yaml"
        is_read = stat.S_ISREG(path.stat().st_mode) or (name is None and _is_descriptor(path))
        if not is_read:
            raise ConfigError(Problem(Position(name or str(path)), "", "is not a regular file"))
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if is_timeout(error):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {name or path}: {TIMED_OUT}") from error
        raise ConfigError(Problem(Position(name or str(path)), "", f"cannot be read: {error.strerror}")) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(Problem(Position(name or str(path)), "", f"is larger than {_MAX_BYTES} bytes"))
    try:
        return path, content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8").removeprefix("\ufeff").split("\n")
        position = Position(name or str(path), len(before), len(before[-1]) + 1)
        raise ConfigError(Problem(position, "", "is not UTF-8")) from error


def _is_descriptor(path: Path) -> bool:
    """Tell whether a path names what this process has open already, so that opening it does not wait for a writer."""
    return str(path) == "/dev/stdin" or str(path.parent) in ("/dev/fd", "/proc/self/fd")


class _Extending:
    """Reads what configs extend, each file once, however many others extend it."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[Node, int]] = {}  # file -> what it says with what it extends, and how deep that is

    def read(self, node: Node, path: Path, readers: tuple[Path, ...]) -> Node:
        """Return what a file says, merged with what it extends.

        Args:
            node: what it says.
            path: the file.
            readers: the files that extend it, directly or not.
        """
        return self._extended(node, path, readers)[0]

    def _extended(self, node: Node, path: Path, readers: tuple[Path, ...]) -> tuple[Node, int]:
        if not isinstance(node.value, dict):
            raise ConfigError(Problem(node.position, "", "a config is a mapping with the keys dataset, model, ..."))
        extends = node.value.get("extends")
        if extends is None:
            return node, 0
        node = replace(node, value={key: value for key, value in node.value.items() if key != "extends"})
        names = extends.value if isinstance(extends.value, list) else [extends]
        merged: Node | None = None
        deepest = 0
        readers = (*readers, path.resolve())
        for name in names:
            other = self._file(name, path)
            if other in readers:
                raise ConfigError(Problem(name.position, "extends", f"{name.value} extends itself"))
            if other not in self._read and len(readers) <= _MAX_EXTENDS:
                _, text = _read_text(other, _shown(other))
                self._read[other] = self._extended(parse(text, _shown(other)), other, readers)
            base, depth = self._read.get(other, (node, 0))
            deepest = max(deepest, depth + 1)
            if len(readers) - 1 + deepest > _MAX_EXTENDS:
                message = f"more than {_MAX_EXTENDS} files in a row extend one another, up to {_shown(other)}"
                raise ConfigError(Problem(name.position, "extends", message))
            merged = base if merged is None else merge(merged, base)
        return (node if merged is None else merge(merged, node)), deepest

    def _file(self, name: Node, path: Path) -> Path:
        """Return the file that is extended."""
        if not isinstance(name.value, str):
            raise ConfigError(Problem(name.position, "extends", f"{name.shown()!r} is no file name"))
        try:
            other = (path.parent / expanded(name.value)).resolve(strict=True)
            return (other / "config.yaml").resolve(strict=True) if other.is_dir() else other
        except (OSError, RuntimeError, ValueError) as error:  # not there; a circle of links; a null byte
            raise ConfigError(
                Problem(name.position, "extends", f"there is no file {str(path.parent / expanded(name.value))!r}")
            ) from error


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


def copies_left(before: Node, after: Node, *, unread: Sequence[str] = ("vars",)) -> list[str]:
    """Return a note for each value that overrides changed while a copy of it, made by an anchor of YAML, stayed.

    Args:
        before: the config without the overrides.
        after: the config with them.
        unread: sections in which a copy that stayed does not matter.
    """
    places = list(_places(before))
    if all(alias is None for _, _, alias in places):
        return []
    there, left = _by_position(places), _by_position(_places(after))
    notes = []
    reported: list[tuple[Any, ...]] = []
    for path, node, _ in places:
        kept = {other: each for other, each in left.get(node.position, {}).items() if other[0] not in unread}
        was_copied = len(there.get(node.position, ())) > max(1, len(left.get(node.position, ())))
        is_below = any(path[: len(other)] == other for other in reported)
        is_there = _at(after, path[:-1]) is not None  # otherwise more was deleted than the copy
        new = _at(after, path)
        is_same = new is not None and new.plain() == node.plain()
        if was_copied and kept and path not in left[node.position] and is_there and not (is_below or is_same):
            reported.append(path)
            notes.append(_note_of_copies(path, there[node.position][path], new, kept))
    return notes


def _places(node: Node, path: tuple[Any, ...] = (), alias: Position | None = None) -> Iterator[_Place]:
    """Yield all nodes below one with their paths, and the alias that brought them there."""
    for key, child in _items(node):
        outermost = alias or child.alias
        yield (*path, key), child, outermost
        yield from _places(child, (*path, key), outermost)


def _by_position(places: Iterable[_Place]) -> dict[Position, dict[tuple[Any, ...], Position]]:
    """Return where in a file values are from -> paths that have them -> the alias, or else the value, in the file."""
    found: dict[Position, dict[tuple[Any, ...], Position]] = {}
    for path, node, alias in places:
        if node.position.line:  # otherwise it is from no file, and has no position of its own
            found.setdefault(node.position, {})[path] = alias or node.position
    return found


def _note_of_copies(
    path: tuple[Any, ...], place: Position, new: Node | None, kept: Mapping[tuple[Any, ...], Position]
) -> str:
    places = ", ".join(f"{_key_path(other)} ({each})" for other, each in kept.items())
    if new is None:
        ways = [f"~{_key_path(other)}" for other in kept]
    else:
        value = new.shown()
        text = value if isinstance(value, str) and read_scalar(value) == value else json.dumps(value)
        ways = [f"{_key_path(other)}={text}" for other in kept]
    more = " ".join(shlex.quote(way) for way in ways)
    return (
        f"{_key_path(path)} ({place}) is overridden, but not {places}, which has the same value by an anchor of "
        f"YAML; to change that too, add {more}"
    )


def _key_path(path: Sequence[Any]) -> str:
    """Return a path in the tree as overrides write it: an index of the hooks' list is followed by arguments."""
    parts = [str(part) for part in path]
    return ".".join(parts[:2] + parts[3:] if parts[0] == "hooks" else parts)


def _at(node: Node, path: Sequence[Any]) -> Node | None:
    for part in path:
        children = dict(_items(node))
        if part not in children:
            return None
        node = children[part]
    return node


def unread_vars(config: Node) -> list[str]:
    """Return a note for each free value, under `vars`, that nothing reads.

    Args:
        config: the config before interpolation.
    """
    return [f"nothing reads ${{{_name_of(path)}}} ({node.key_position})" for path, node in _unread_vars(config)]


def _unread_vars(config: Node) -> Iterator[tuple[tuple[Any, ...], Node]]:
    places = list(_places(config))
    free = [(path, node) for path, node, _ in places if path == ("vars",) or (path[0], *path[2:]) == ("eval", "vars")]
    if not free:
        return
    texts = (node.value for _, node, _ in places if isinstance(node.value, str))
    names = {match["name"] for text in texts for match in _INTERPOLATION.finditer(text) if match["name"]}
    above = [path for path, _ in free]
    copied = {node.position for path, node, _ in places if path[:1] not in above and path[:3] not in above}
    for path, node in [leaf for section in free for leaf in _single_values(*section)]:
        name = f"{_name_of(path)}."
        is_named = any(f"{each}.".startswith(name) or name.startswith(f"{each}.") for each in names)
        if not is_named and (node.position not in copied or not node.position.line):
            yield path, node


def _single_values(path: tuple[Any, ...], node: Node) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Yield what is in a mapping and its mappings, with paths."""
    for key, child in node.value.items() if isinstance(node.value, dict) else ():
        if isinstance(child.value, dict) and child.value:
            yield from _single_values((*path, key), child)
        else:
            yield (*path, key), child


def _name_of(path: Sequence[Any]) -> str:
    """Return how an interpolation names a free value."""
    return ".".join(map(str, path[2:] if path[0] == "eval" else path))


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
        for path, node in _unread_vars(self.tree):
            if node.position.source in self._earlier and _at(before, path) is None:
                self._position = node.position
                owner = _at(before, path[:-1])
                near = did_you_mean(str(path[-1]), [str(key) for key, _ in _items(owner)] if owner else [])
                raise self._error(".".join(map(str, path[:-1])), f"nothing reads ${{{_name_of(path)}}}{near}")

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
    theirs = _children(new) if new is not None else {}
    for key, child in _children(old).items():
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
            return replace(found, value=value, position=node.position, key=node.key, former=node.former)
        return self._text(node, active, depth)

    def _text(self, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return a text with interpolations in it as one text."""
        spelling = None
        environment: list[tuple[str, str]] = []

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
                environment.extend(found.environment)
            return str(found.value)

        value = _INTERPOLATION.sub(text, node.value)
        return replace(node, value=value, spelling=spelling, environment=tuple(environment))

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
        return replace(node, value=value, spelling=node.value, environment=((value, f"${{{name}}}"),))
    if not comma:
        message = f"the environment has no {variable}; set it, or write ${{{name},default}}"
        raise ConfigError(Problem(node.position, "", message))
    return replace(node, value=default)


def _children(node: Node) -> Mapping[str, Node]:
    return {str(key): child for key, child in _items(node)}


def _items(node: Node) -> Iterable[tuple[Any, Node]]:
    if isinstance(node.value, dict):
        return node.value.items()
    return enumerate(node.value) if isinstance(node.value, list) else ()


def escaped(text: str) -> str:
    """Return a text as a config writes it that is not to be interpolated, such as a path."""
    return text.replace("${", "$${")


def with_defaults(config: Node, defaults: Mapping[str, Any]) -> Node:
    """Return the config with top-level keys added that it does not have, or has as null."""
    has = {key: node for key, node in config.value.items() if key not in defaults or node.value is not None}
    added = {key: node_of(value, Position("emrun")) for key, value in defaults.items() if key not in has}
    return replace(config, value={**added, **has})
