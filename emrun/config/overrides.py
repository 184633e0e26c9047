"""Merges configs (`extends`, sections under `eval`) and applies overrides."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emrun.base.errors import ConfigError, Position, Problem, UsageError
from emrun.base.wording import did_you_mean, listed, normalised
from emrun.config.interpolation import name_of, unread_values
from emrun.config.names import same_class
from emrun.config.type_hints import BOOLEANS
from emrun.config.yaml_tree import MAX_DEPTH, Node, mapping_in, parse_typed

_LONGEST_PART = 24  # of an override in a name


def merge(base: Node, over: Node, section: str | None = "") -> Node:
    """Merge two trees: mappings key by key; a list, or a mapping with another `class` or `import`, replaces.

    The section `model` keeps its keys if it only gets another `class`, as with an override.

    Args:
        base: the tree.
        over: what is laid over it.
        section: the key of a section; empty for a whole config, None for anything else.
    """
    are_mappings = isinstance(base.value, dict) and isinstance(over.value, dict)
    keeps = section == "model" and are_mappings and list(over.value) == ["class"]
    if not are_mappings or (not keeps and _is_another_form(base, over)):
        return over
    merged = {
        key: merge(base.value[key], node, None if section != "" else key) if key in base.value else node
        for key, node in over.value.items()
    }
    return replace(over, value={**base.value, **merged})


def _is_another_form(base: Node, over: Node) -> bool:
    """Return whether `over` has a `class` or `import` that names something else than the one of `base`."""
    old = _form_of(base)
    new = _form_of(over)
    if new is None or old == new:
        return False
    return old is None or old[0] != new[0] or new[0] == "import" or not same_class(old[1], new[1])


def _form_of(node: Node) -> tuple[str, Any] | None:
    """Return the key `class` or `import` of a mapping with its value, None when the mapping has neither."""
    return next(((key, node.value[key].plain()) for key in ("class", "import") if key in node.value), None)


def hook_entry(entry: Node) -> tuple[str | None, Node | None]:
    """Return the name and the arguments of an entry of the list of hooks; the name is None for a malformed entry."""
    if isinstance(entry.value, str):
        return entry.value, None
    entries = mapping_in(entry)
    name, arguments = next(iter(entries.items()), (None, None))
    return (name, arguments) if isinstance(name, str) and len(entries) == 1 else (None, None)


def with_hooks(hooks: list[Node], changes: Node) -> Node:
    """Return a list of hooks with the arguments of some changed, as overrides do, and others added at its end.

    Args:
        hooks: the list.
        changes: a mapping, name of a hook -> arguments.

    Raises:
        ConfigError: a hook is listed twice, or its arguments cannot be changed.
    """
    overriding = _Overriding(Node({"hooks": replace(changes, value=hooks)}, changes.position), "config.extends")
    for name, arguments in changes.value.items():
        given = replace(arguments, value={}) if arguments.value is None else arguments
        overriding.set_at(["hooks", str(name)], given)
    changed: Node = overriding.tree.value["hooks"]
    return changed


def override(config: Node, overrides: Sequence[str]) -> Node:
    """Apply overrides from left to right.

    A mapping as the value is merged as `merge` does; over a list, its keys are indices, or it replaces the list. An
    override of a single `class` (or `import`) by its key path keeps the other keys of the mapping.

    Raises:
        ConfigError: an override is malformed, refers to a missing key or item, or undoes an earlier override.
    """
    overriding = _Overriding(config)
    for text in overrides:
        overriding.apply(text)
    overriding.check_vars(config)
    return overriding.tree


class _Overriding:
    """Applies overrides to a tree, one after another.

    Args:
        tree: the tree before the overrides.
        code: the code of errors.
    """

    def __init__(self, tree: Node, code: str = "config.override") -> None:
        self.tree = tree
        self._code = code
        self._position = Position("override")  # of the override that is applied
        self._path: list[str] = []
        self._earlier: dict[str, list[str]] = {}  # source of the position of each override that set a value -> its path

    def apply(self, text: str) -> None:
        """Apply an override: `key.path=value`, or `~key.path` to delete."""
        self._position = here = Position(f"override {text!r}")
        key, equals, value = (text[1:], "", "") if text.startswith("~") else text.partition("=")
        if not equals and not text.startswith("~"):
            raise self._error("", f"an override must be key=value, or ~key to delete a key: {text}=VALUE or ~{text}")
        if key.startswith("+"):
            raise self._error("", f"keys that are missing are added without a '+': write {text.lstrip('+')}")
        typed = parse_typed(value, here.source, f"for a text, write {shlex.quote(f'{key}={json.dumps(value)}')}")
        new = replace(typed, position=here, key=here) if equals else None
        self._path = path = re.sub(r"\[([0-9]+)\]", r".\1", key).split(".")  # messages write hooks[0]
        if len(path) > MAX_DEPTH:
            raise self._error("", f"the key has more than {MAX_DEPTH} parts")
        if any(not part or part != part.strip() for part in path):
            raise self._error(
                "",
                f"{key!r} is not a key; write its parts with one dot between them and no blanks, such as "
                "model.optimizer.lr=0.1",
            )
        hooks = self.tree.get("hooks") or Node(None, here, here)
        if new is not None and path[0] == "hooks" and hooks.value is None:
            self.tree = replace(self.tree, value={**self.tree.value, "hooks": replace(hooks, value=[])})
        if len(path) > 1 and path[0] == "hooks":
            _, name, rest = hooks_at(path[1:], [str(hook_entry(item)[0]) for _, item in hooks.entries()])
            path[1:] = [name, *rest]
        self.tree = self._changed(self.tree, path, new, "")
        if new is not None:
            self._earlier[here.source] = path

    def set_at(self, path: list[str], new: Node) -> None:
        """Set what a file has at a path."""
        self._position = new.key_position
        self._path = path
        self.tree = self._changed(self.tree, path, new, "")

    def check_vars(self, before: Node) -> None:
        """Check that overrides add no free values that are never used: such a mistake would be silent."""
        for path, node in unread_values(self.tree):
            if node.position.source in self._earlier and before.get(*path) is None:
                self._position = node.position
                owner = before.get(*path[:-1])
                near = did_you_mean(str(path[-1]), owner.children() if owner else [])
                raise self._error(".".join(map(str, path[:-1])), f"${{{name_of(path)}}} is never used{near}")

    def _changed(self, base: Node, path: Sequence[Any], new: Node | None, above: str) -> Node:
        """Return `base`, the value at the path `above`, with a path below it set to `new`, or deleted."""
        is_list = isinstance(base.value, list)
        part, *rest = path
        where = f"{above}.{part}".removeprefix(".")
        self._check_dots(base, path, above)
        if not is_list and not isinstance(base.value, dict):
            if new is not None and base.position.source in self._earlier:
                raise self._error(
                    "", f"{above} is also set to {base.shown()!r} by {base.position}; remove one of the two"
                )
            base = Node({}, self._position, base.key or self._position)
        entries = dict(base.entries())
        key = self._index(base.value, str(part), above, new) if is_list else self._key(entries, part, above, new)
        if new is None and not rest:
            del entries[key]
        elif is_list and above == "hooks":
            entries[key] = self._hook(entries.get(key) or Node(str(part), self._position), rest, new, where)
        elif rest or new is None:
            entries[key] = self._changed(entries.get(key) or Node({}, self._position, self._position), rest, new, where)
        else:
            if key in ("class", "import"):
                entries.pop("import" if key == "class" else "class", None)
            entries[key] = self._laid(entries[key], new, where) if key in entries else new
        return replace(base, value=list(entries.values()) if is_list else entries)

    def _check_dots(self, base: Node, path: Sequence[Any], above: str) -> None:
        """Refuse a path that may mean a key with dots, such as `layers.0`: a dot separates keys."""
        rest = f"{'.'.join(map(str, path))}."
        meant = next((key for key in base.children() if "." in key and rest.startswith(f"{key}.")), None)
        if meant is not None and len(path) > 1:
            raise self._error(
                above,
                f"the key {meant!r} has a dot, which separates keys; write {above}={{{json.dumps(meant)}: "
                f"VALUE}}, or change the file",
            )

    def _hook(self, entry: Node, path: Sequence[Any], new: Node | None, where: str) -> Node:
        """Return an entry of the list of hooks, a name or a mapping name -> arguments, with changed arguments."""
        if not path and new is not None and not isinstance(new.value, dict):
            raise self._error(
                where, f"must be a mapping of the hook's arguments, not {new.plain()!r}; write {{ARGUMENT: VALUE}}"
            )
        name, arguments = hook_entry(entry)
        if name is None:  # reported when the hooks are built
            return entry if new is not None else self._changed(entry, path, new, where)
        old = Node({}, self._position) if arguments is None else replace(arguments, value=mapping_in(arguments))
        changed = self._changed(old, path, new, where) if path or new is None else self._laid(old, new, where)
        key = (arguments and arguments.key) or entry.position
        return replace(entry, value={name: replace(changed, key=key)})

    def _laid(self, base: Node, new: Node, where: str) -> Node:
        """Return the value of an override merged over the previous value."""
        is_same = isinstance(base.value, dict) and isinstance(new.value, dict) and not _is_another_form(base, new)
        has_items = where == "hooks" or any(re.fullmatch(r"[0-9]+", str(key)) for key in new.children())
        if isinstance(new.value, dict) and (is_same or (isinstance(base.value, list) and new.value and has_items)):
            for part, node in new.value.items():
                base = self._changed(base, [part], node, where)
            return base
        for path, lost, _ in base.places():
            if new.get(*path) is None and self._earlier.get(lost.position.source, self._path) != self._path:
                raise self._error("", f"would undo {lost.position}; remove one of the two, or write this one first")
        return new

    def _key(self, entries: Mapping[Any, Node], part: Any, above: str, new: Node | None) -> Any:
        """Return the key of a mapping that a part of a path refers to; other keys than strings match by their text."""
        key = part if part in entries else next((key for key in entries if str(key) == str(part)), part)
        if new is None and key not in entries:
            near = did_you_mean(part, map(str, entries))
            raise self._error(above, f"has no key {part!r} to delete{near}")
        return key

    def _index(self, items: Sequence[Node], part: str, where: str, new: Node | None) -> int:
        """Return the index that a part of a path refers to; a hook that is not listed gets the index after the last."""
        if part in map(str, range(len(items))):
            return int(part)
        if where != "hooks" or part.isdecimal():
            raise self._error(
                where,
                f"there is no item {part!r}; the list has length {len(items)}, and indices begin at 0; to "
                f"replace the list, write {where}=...",
            )
        names = [str(hook_entry(item)[0]) for item in items]
        indices, _, _ = hooks_at([part], names)
        if len(indices) > 1:
            raise self._error(where, f"{part} is listed {len(indices)} times; use one of the indices {indices} instead")
        if not indices and new is None:
            near = did_you_mean(part, names if "." in part else [name.rpartition(".")[2] for name in names])
            raise self._error(where, f"there is no hook {part!r} in the list{near}")
        return indices[0] if indices else len(items)

    def _error(self, key: str, message: str) -> ConfigError:
        return ConfigError(Problem(self._position, key, message, self._code))


def stream_of_eval(text: str) -> str | None:
    """Return the stream in whose section of `eval` an override sets or deletes something.

    Returns:
        None if it changes another section; an empty text if it sets or deletes the whole section `eval`.
    """
    match = re.match(r"~?eval(?:\.([^.=\[]+))?(?=[.=\[]|$)", text)
    return (match[1] or "") if match else None


def check_streams_of_eval(overrides: Sequence[str], streams: Sequence[str]) -> None:
    """Check that no override is of the evaluation of a stream that is not evaluated.

    Raises:
        UsageError: such an override has no effect.
    """
    for text in overrides:
        if (stream := stream_of_eval(text)) and stream not in streams:
            raise UsageError(f"{text} has no effect: the stream {stream} is not evaluated, only {listed(streams)}")


def hooks_at(path: Sequence[str], names: Sequence[str]) -> tuple[list[int], str, list[str]]:
    """Return the indices of the hooks that a path below `hooks` begins with, their part of the path, and the rest.

    A hook is an index, perhaps followed by its name, as emrun prints such paths; or a name, which may be a dotted path.
    A hook that is not listed is named up to the first part with a capital: `my_module.MyHook.argument`.

    Args:
        path: the path, as overrides have it.
        names: the names of the listed hooks.
    """
    first, *rest = path
    if first in map(str, range(len(names))):
        parts = names[int(first)].split(".")
        return [int(first)], first, rest[len(parts) :] if rest[: len(parts)] == parts else rest
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        if indices := [index for index, listed_name in enumerate(names) if is_hook(name, listed_name)]:
            return indices, name, [*path[length:]]
    length = next((index for index, part in enumerate(path) if part[:1].isupper()), 0) + 1
    return [], ".".join(path[:length]), [*path[length:]]


def is_hook(part: str, name: str) -> bool:
    """Return whether a part of a path is the name of a hook, whole or, without regard to case, without the module."""
    return part == name or normalised(part) == normalised(name.rpartition(".")[2])


def copies_left(before: Node, after: Node, *, unread: Sequence[str] = ("vars",)) -> Iterator[str]:
    """Yield a note for each value that overrides changed while a copy of it, made by a YAML anchor, did not change.

    Args:
        before: the config without the overrides.
        after: the config with the overrides.
        unread: sections in which an unchanged copy does not matter.
    """
    copies_before = _by_position(before)
    copies_after = _by_position(after)
    reported: list[tuple[Any, ...]] = []
    for path, node, _ in before.places():
        copies = copies_before.get(node.position, {})
        same = copies_after.get(node.position, {})
        kept = [other for other in copies if other in same and other[0] not in unread]
        is_below = any(path[: len(other)] == other for other in reported)
        is_there = after.get(*path[:-1]) is not None  # otherwise the mapping around the value was deleted too
        new = after.get(*path)
        is_same = path in same or (new is not None and new.plain() == node.plain())
        if kept and is_there and not (is_below or is_same):
            reported.append(path)
            others = ", ".join(f"{_key_path(other)} ({copies[other]})" for other in kept)
            before_key, after_key = ("~", "") if new is None else ("", f"={json.dumps(new.shown())}")
            more = shlex.join(f"{before_key}{_key_path(other)}{after_key}" for other in kept)
            yield (
                f"{_key_path(path)} ({copies[path]}) is overridden, but not {others}, which a YAML anchor gives the "
                f"same value; to change that value too, add {more}"
            )


def words_in(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a note for each override whose value is a word such as `no`, which is a text and so true."""
    for text in overrides:
        key, _, value = text.partition("=")
        if value.strip().lower() in BOOLEANS:
            meant = BOOLEANS[value.strip().lower()]
            yield f"override {text!r}: {value.strip()} is a text; for a boolean write {key}={meant}"


def in_name(overrides: Sequence[str], most: int = 36) -> str:
    """Return overrides as a part of the name of a file: `lr=0.01_epochs=3`; what does not fit is left out.

    Of a key the last part is shown, of a path too. Left out are lists, mappings, addresses and references, which may
    hold a password, and values of keys that sound secret.
    """
    parts: dict[str, str] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        last = key.removeprefix("~").rpartition(".")[2]
        shown = f"no-{last}" if key.startswith("~") else f"{last}={value.rstrip('/').rpartition('/')[2]}"
        if key != "name" and not re.search(
            r"(?i)(key|token|secret|password)[^=]*=|=.*([\[{@$]|://)", f"{last}={value}"
        ):
            parts[key] = re.sub(r"[^\w.=+-]+", "-", shown, flags=re.ASCII)[:_LONGEST_PART].strip("-.")
    name = ""
    for part in parts.values():
        longer = f"{name}_{part}" if name else part
        if part and len(longer) <= most:
            name = longer
    return name


def _by_position(tree: Node) -> dict[Position, dict[tuple[Any, ...], Position]]:
    """Return position of a value in a file -> paths with that value -> the position of their alias, or of the value."""
    paths: dict[Position, dict[tuple[Any, ...], Position]] = {}
    for path, node, alias in tree.places():
        if node.position.line:  # a value that is not from a file has no position of its own
            paths.setdefault(node.position, {})[path] = alias or node.position
    return paths


def _key_path(path: Sequence[Any]) -> str:
    """Return a path in the tree as overrides write it, without the name of the hook after an index of `hooks`."""
    parts = [str(part) for part in path]
    return ".".join(parts[:2] + parts[3:] if parts[0] == "hooks" else parts)
