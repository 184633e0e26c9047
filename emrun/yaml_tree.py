"""YAML text to a tree of plain values with positions, and back; nothing in a text can construct anything else."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.nodes import ScalarNode

from emrun.errors import ConfigError, Position, Problem

_MAX_CHARACTERS = 10_000_000
_MAX_NODES = 200_000  # aliases expanded
_MAX_DEPTH = 100
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a config: a scalar, a mapping of nodes or a list of nodes, with its position and that of its key."""

    value: Any
    position: Position
    key: Position | None = None

    def plain(self) -> Any:
        """Return the value in plain Python types."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def get(self, *path: str) -> Node | None:
        """Return the node below, None when there is none."""
        node = self
        for part in path:
            if not isinstance(node.value, dict) or part not in node.value:
                return None
            node = node.value[part]
        return node

    @property
    def key_position(self) -> Position:
        """The position of the node's key, or of itself where it has none."""
        return self.key or self.position


def node_of(value: Any, position: Position) -> Node:
    """Return a tree of plain values whose nodes all have the same position."""
    if isinstance(value, Mapping):
        return Node({key: node_of(child, position) for key, child in value.items()}, position, position)
    if isinstance(value, list | tuple):
        return Node([node_of(child, position) for child in value], position, position)
    return Node(value, position, position)


def parse(text: str, source: str) -> Node:
    """Read one YAML 1.2 document.

    Args:
        text: the document.
        source: what it is called in positions, such as the file's name.

    Raises:
        ConfigError: it is no YAML, or has a tag, a duplicate key, a recursive alias, or is too large or too deep.
    """
    return _Parser(text, source).document()


def dump(node: Node, template: str | None = None) -> str:
    """Return a tree as YAML.

    Args:
        node: the tree.
        template: a text with comments and formatting to keep as far as the tree agrees with it.
    """
    plain = node.plain()
    if template is not None:
        text = _dump_like(plain, template)
        if text is not None:
            return text
    return _write(_round_trip(), plain)


class _Parser:
    """Builds the tree from the parser's events; aliases and sizes are counted before anything is made of them."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._text = text
        self._lines = text.splitlines()
        self._yaml = YAML(typ="safe", pure=True)
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._open: set[str] = set()
        self._count = 0
        self._depth = 0

    def document(self) -> Node:
        if len(self._text) > _MAX_CHARACTERS:
            raise self._error(Position(self._source), f"is larger than {_MAX_CHARACTERS} characters")
        node: Node | None = None
        try:
            events = iter(self._yaml.parse(self._text))
            for event in events:
                if isinstance(event, StreamStartEvent | StreamEndEvent | DocumentStartEvent | DocumentEndEvent):
                    continue
                if node is not None:
                    raise self._error(self._position(event), "a second document; a config has one")
                node = self._node(event, events, None)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = " ".join(str(error.problem or error.context or "is not valid YAML").split())
            position = self._at(mark.line, mark.column) if mark else Position(self._source)
            raise self._error(position, message) from error
        except YAMLError as error:  # unprintable characters
            raise self._error(Position(self._source), " ".join(str(error).split())) from error
        except (RecursionError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._error(Position(self._source), f"is not valid YAML ({error})") from error
        return node or Node(None, self._at(0, 0))

    def _node(self, event: Event, events: Iterator[Event], key: Position | None) -> Node:
        position = self._position(event)
        if isinstance(event, AliasEvent):
            return self._alias(str(event.anchor), position, key)
        if getattr(event, "tag", None) is not None:
            raise self._error(position, f"tag {event.tag} is not allowed; a config has plain values only")  # type: ignore[attr-defined]
        anchor = getattr(event, "anchor", None)
        before = self._count
        self._add(1, position)
        if anchor is not None:
            self._open.add(anchor)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(position, f"is nested more than {_MAX_DEPTH} levels deep")
        value: Any
        if isinstance(event, MappingStartEvent):
            value = self._mapping(events)
        elif isinstance(event, SequenceStartEvent):
            value = []
            while not isinstance(item := next(events), SequenceEndEvent):
                value.append(self._node(item, events, None))
        else:
            value = self._scalar(event)
        self._depth -= 1
        node = Node(value, position, key)
        if anchor is not None:
            self._open.discard(anchor)
            self._anchors[anchor] = (node, self._count - before)
        return node

    def _mapping(self, events: Iterator[Event]) -> dict[Any, Node]:
        entries: dict[Any, Node] = {}
        merged: dict[Any, Node] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            position = self._position(event)
            is_merge = isinstance(event, ScalarEvent) and event.value == "<<" and event.implicit[0]
            name = "<<" if is_merge else self._node(event, events, None).value
            child = self._node(next(events), events, position)
            if is_merge:
                merged = {**self._merge_key(child), **merged}
            elif isinstance(name, dict | list):
                raise self._error(position, "a key must be a single value")
            elif name in entries:
                raise self._error(position, f"key {name!r} stands twice; the first is at {entries[name].key}")
            else:
                entries[name] = child
        return {**merged, **entries}

    def _merge_key(self, child: Node) -> dict[Any, Node]:
        """Return what a `<<` key brings; of several mappings the first wins."""
        merged: dict[Any, Node] = {}
        for each in child.value if isinstance(child.value, list) else [child]:
            if not isinstance(each.value, dict):
                raise self._error(child.position, "'<<' takes a mapping or a list of mappings")
            merged = {**each.value, **merged}
        return merged

    def _alias(self, anchor: str, position: Position, key: Position | None) -> Node:
        if anchor in self._open:
            raise self._error(position, f"alias *{anchor} contains itself")
        if anchor not in self._anchors:
            raise self._error(position, f"alias *{anchor} has no anchor &{anchor} before it")
        node, size = self._anchors[anchor]
        self._add(size, position)
        return Node(node.value, node.position, key)

    def _scalar(self, event: Event) -> Any:
        assert isinstance(event, ScalarEvent)
        tag = str(self._yaml.resolver.resolve(ScalarNode, event.value, event.implicit))
        if tag not in _PLAIN_TAGS:
            return str(event.value)
        return self._yaml.constructor.construct_object(ScalarNode(tag, event.value))

    def _add(self, count: int, position: Position) -> None:
        self._count += count
        if self._count > _MAX_NODES:
            raise self._error(position, f"has more than {_MAX_NODES} values once its aliases are expanded")

    def _position(self, event: Event) -> Position:
        return self._at(event.start_mark.line, event.start_mark.column)

    def _at(self, line: int, column: int) -> Position:
        text = self._lines[line] if line < len(self._lines) else ""
        return Position(self._source, line + 1, column + 1, text)

    def _error(self, position: Position, message: str) -> ConfigError:
        return ConfigError(Problem(position, "", message))


def _round_trip() -> YAML:
    yaml = YAML()
    yaml.width = 10_000
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _write(yaml: YAML, data: Any) -> str:
    text = io.StringIO()
    yaml.dump(data, text)
    return text.getvalue()


def _dump_like(plain: Any, template: str) -> str | None:
    """Change a text until it says `plain`; None when that cannot be done."""
    yaml = _round_trip()
    try:
        data = yaml.load(template)
        _adapt(data, plain)
        text = _write(yaml, data)
        return text if parse(text, "config").plain() == plain else None
    except (YAMLError, ConfigError, AttributeError, TypeError, KeyError, IndexError, ValueError):
        return None  # anchors and merge keys can make a text that no longer says the same


def _adapt(data: Any, plain: Any) -> None:
    if isinstance(plain, dict):
        for key in [key for key in data if key not in plain]:
            del data[key]
        for key, value in plain.items():
            if key not in data or not _alike(data[key], value):
                data[key] = value
            else:
                _adapt(data[key], value)
    elif isinstance(plain, list):
        for index, value in enumerate(plain):
            if _alike(data[index], value):
                _adapt(data[index], value)
            else:
                data[index] = value


def _alike(old: Any, new: Any) -> bool:
    """Tell whether `old` can be changed into `new` in place."""
    if isinstance(new, dict):
        return isinstance(old, dict)
    if isinstance(new, list):
        return isinstance(old, list) and len(old) == len(new)
    same_kind = isinstance(old, type(new)) and isinstance(old, bool) is isinstance(new, bool)
    return same_kind and not isinstance(old, dict | list) and bool(old == new)
