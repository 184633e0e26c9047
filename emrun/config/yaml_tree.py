"""Parses YAML into a tree of plain values with positions; no YAML text can construct another object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError

from emrun.base.errors import ConfigError, Position, Problem
from emrun.config.yaml_slips import Slip

_MAX_CHARACTERS = 10_000_000
MAX_NODES = 200_000  # after aliases are expanded
MAX_DEPTH = 100  # after aliases are expanded; far below Python's recursion limit
_MERGE = ("<<",)  # the key of what is merged, which no key of a text equals
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a config: a scalar, a mapping of nodes or a list of nodes, with its position and that of its key.

    A scalar from the environment has a `spelling`, its text in the config for messages, and its `text` as it is there.
    A copy that a YAML anchor made of a value also has the position of its `alias`.
    """

    value: Any
    position: Position
    key: Position | None = None
    spelling: str | None = None
    alias: Position | None = None
    text: str | None = None

    def plain(self) -> Any:
        """Return the value in plain Python types."""
        return of_each(self.value, Node.plain)

    def shown(self) -> Any:
        """Return the value as messages show it: the text of the config in place of values from the environment."""
        return of_each(self.value, Node.shown) if self.spelling is None else self.spelling

    def entries(self) -> Iterable[tuple[Any, Node]]:
        """Return the entries of a mapping by key or of a list by index; a scalar has none."""
        if isinstance(self.value, dict):
            return self.value.items()
        return enumerate(self.value) if isinstance(self.value, list) else ()

    def children(self) -> Mapping[str, Node]:
        """Return the entries by key or index as a string."""
        return {str(key): child for key, child in self.entries()}

    def get(self, *path: Any) -> Node | None:
        """Return the node at a path below this node, None when there is none."""
        node: Node | None = self
        for part in path:
            node = node.children().get(str(part)) if node is not None else None
        return node

    def places(self, path: tuple[Any, ...] = (), alias: Position | None = None) -> Iterator[Place]:
        """Yield all nodes below with their paths and the outermost alias that copied them there, if any."""
        for key, child in self.entries():
            outermost = alias or child.alias
            yield (*path, key), child, outermost
            yield from child.places((*path, key), outermost)

    def error(self, message: str, key: str = "", code: str = "config.value") -> ConfigError:
        """Return the error for a single problem with the node."""
        return ConfigError(Problem(self.position, key, message, code))

    @property
    def key_position(self) -> Position:
        """The position of the node's key, or of the node when it has no key."""
        return self.key or self.position

    @property
    def is_form(self) -> bool:
        """Whether the node is a mapping with `class` or `import`, which stands for an object."""
        return not {"class", "import"}.isdisjoint(mapping_in(self))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is written for the key."""
        return self.value is None and self.position == self.key


Place = tuple[tuple[Any, ...], Node, Position | None]
"""A path, the node at the path, and the position of the YAML alias that copied it there, if any."""


def mapping_in(node: Node | None) -> dict[Any, Node]:
    """Return the entries of a node that is a mapping; otherwise none."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


def list_in(node: Node | None) -> list[Node]:
    """Return the entries of a node that is a list; otherwise none."""
    return node.value if node is not None and isinstance(node.value, list) else []


def of_each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a mapping or a list with a function applied to each value; return any other value unchanged."""
    if isinstance(value, dict):
        return {key: function(child) for key, child in value.items()}
    return [function(child) for child in value] if isinstance(value, list) else value


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
        source: the name of the document in positions, such as the file name.

    Raises:
        ConfigError: the text is not YAML, has a tag, a duplicate key or a recursive alias, or is too large or deep.
    """
    return _Parser(text, source).document()


def parse_typed(text: str, source: str, advice: str) -> Node:
    """Read the value of an argument of the command line, as `parse` does; nothing that was typed may be lost.

    Args:
        text: the value.
        source: the argument.
        advice: how to write a text that YAML does not read as it stands.

    Raises:
        ConfigError: see `parse`; or YAML drops a part of the text, such as a comment.
    """
    try:
        node = parse(text, source)
    except ConfigError as error:
        message = f"{error.problems[0].message}; {advice}"
        raise ConfigError(replace(error.problems[0], message=message)) from error
    words = [event for event in YAML(typ="safe", pure=True).parse(text) if isinstance(event, events.ScalarEvent)]
    between = text  # brackets, commas, dashes and comments
    for word in reversed(words):
        between = between[: word.start_mark.index] + between[word.end_mark.index :]
    is_other = isinstance(node.value, str) and words[0].style is None and node.value != text
    if is_other or text.lstrip().startswith("&") or re.search("#|---|[.]{3}", between):
        message = f"YAML drops a part of this text, and reads {node.plain()!r}; {advice}"
        raise ConfigError(Problem(Position(source), "", message, "config.override"))
    return node


def read_scalar(text: str) -> Any:
    """Return the value of a YAML scalar, plain or in quotes; any other text is returned unchanged."""
    word = text.strip()
    try:
        if word[:1] not in ("'", '"'):
            return _plain_scalar(YAML(typ="safe", pure=True), word, text)
        value = parse(text, "").value
    except ValueError:  # an unclosed quote, more digits than Python reads
        return text
    return text if isinstance(value, dict | list) else value


class _Parser:
    """Builds the tree from the parser's events; sizes, including aliases, are checked before values are built."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._text = text
        self._lines = re.split(r"\r\n|\r|\n", text)
        self._yaml = YAML(typ="safe", pure=True)
        self._anchors: dict[str, Node | None] = {}  # None while the value is read
        self._count = 0

    def document(self) -> Node:
        if len(self._text) > _MAX_CHARACTERS:
            raise self._error(Position(self._source), f"is larger than {_MAX_CHARACTERS} characters")
        node: Node | None = None
        try:
            rest = iter(self._yaml.parse(self._text))
            for event in rest:
                if isinstance(event, events.DocumentStartEvent) and event.version not in (None, (1, 2)):
                    raise self._error(self._position(event), "unsupported version of YAML; a config must be YAML 1.2")
                if not isinstance(event, events.NodeEvent):
                    continue
                if node is not None:
                    message = "a second YAML document begins here; a config must have only one"
                    raise self._error(self._position(event), message)
                node = self._node(event, rest, None, 1)
        except MarkedYAMLError as error:
            line, column, message = Slip(error, self._lines).explained()
            raise self._error(self._at(line, column), message) from error
        except ReaderError as error:
            before = re.split(r"\r\n|\r|\n", self._text[: error.position])
            position = Position(self._source, len(before), len(before[-1]) + 1)  # the line may not be printable
            raise self._error(position, f"character U+{ord(self._text[error.position]):04X} is not allowed") from error
        return node or Node(None, self._at(0, 0))

    def _node(self, event: events.Event, rest: Iterator[events.Event], key: Position | None, depth: int) -> Node:
        """Return the value that begins with an event; it is `depth` levels deep."""
        position = self._position(event)
        anchor = getattr(event, "anchor", None)
        if isinstance(event, events.AliasEvent):
            return self._alias(str(anchor), position, key, depth)
        if getattr(event, "tag", None) is not None:
            raise self._error(position, f"tag {event.tag} is not allowed; a config has plain values only")  # type: ignore[attr-defined]
        if anchor is not None:
            self._anchors[anchor] = None
        self._add(position, 1, depth)
        value: Any
        if isinstance(event, events.MappingStartEvent):
            value = self._mapping(rest, bool(event.flow_style), depth + 1)
        elif isinstance(event, events.SequenceStartEvent):
            value = []
            while not isinstance(item := next(rest), events.SequenceEndEvent):
                value.append(self._node(item, rest, None, depth + 1))
        else:
            value = self._scalar(event, position)
        node = Node(value, position, key)
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _mapping(self, rest: Iterator[events.Event], is_flow: bool, depth: int) -> dict[Any, Node]:
        entries: dict[Any, Node] = {}
        while not isinstance(event := next(rest), events.MappingEndEvent):
            position = self._position(event)
            name = _MERGE if _is_plain(event) and event.value == "<<" else self._node(event, rest, None, depth).value
            following = next(rest)
            child = self._node(following, rest, position, depth)
            if child.value is None and following.start_mark.index == following.end_mark.index:
                child = replace(child, position=position)  # the parser finds an empty value at the next key
            match = re.fullmatch(r"([\w.]+):(\S+)", name) if is_flow and isinstance(name, str) else None
            if match and _is_plain(event) and _is_plain(following) and child.value is None:
                raise self._error(position, f"write a space after the colon: {match[1]}: {match[2]}")
            if isinstance(name, dict | list):
                raise self._error(position, "a key must be a single value, not a list or a mapping")
            if name in entries:
                shown = "<<" if name is _MERGE else name
                raise self._error(position, f"key {shown!r} appears twice; the first is at {entries[name].key}")
            entries[name] = child
        merge = entries.pop(_MERGE, None)
        return entries if merge is None else {**self._merged(merge), **entries}

    def _merged(self, child: Node) -> dict[Any, Node]:
        """Return the entries that a `<<` key adds; of several mappings the first has priority."""
        merged: dict[Any, Node] = {}
        mappings = child.value if isinstance(child.value, list) else [child]
        for mapping in mappings:
            if not isinstance(mapping.value, dict):
                raise self._error(child.position, "the value of '<<' must be a mapping or a list of mappings")
            copies = mapping.value
            if mapping.alias is not None:
                copies = of_each(copies, partial(replace, alias=mapping.alias))
            merged = {**copies, **merged}
        return merged

    def _alias(self, anchor: str, position: Position, key: Position | None, depth: int) -> Node:
        if anchor not in self._anchors:
            raise self._error(
                position, f"alias *{anchor} has no anchor &{anchor} before it; for a string, use quotes: '*{anchor}'"
            )
        node = self._anchors[anchor]
        if node is None:
            raise self._error(position, f"alias *{anchor} contains itself")
        lengths = [len(path) for path, _, _ in node.places()]
        self._add(position, 1 + len(lengths), depth + max(lengths, default=0))
        return Node(node.value, node.position, key, alias=position)

    def _scalar(self, event: Any, position: Position) -> Any:
        if not event.implicit[0]:  # in quotes
            return str(event.value)
        try:
            return _plain_scalar(self._yaml, event.value, event.value)
        except ValueError as error:  # `0x_`, or more digits than Python reads
            raise self._error(position, f"{event.value[:20]!r} is not a number; for a string, use quotes") from error

    def _add(self, position: Position, count: int, depth: int) -> None:
        """Count values, of which the deepest is `depth` levels deep."""
        self._count += count
        if self._count > MAX_NODES:
            raise self._error(position, f"has more than {MAX_NODES} values after its aliases are expanded")
        if depth > MAX_DEPTH:
            raise self._error(position, f"is nested more than {MAX_DEPTH} levels deep")

    def _position(self, event: events.Event) -> Position:
        return self._at(event.start_mark.line, event.start_mark.column)

    def _at(self, line: int, column: int) -> Position:
        text = self._lines[line] if line < len(self._lines) else ""
        return Position(self._source, line + 1, column + 1, text)

    def _error(self, position: Position, message: str) -> ConfigError:
        return ConfigError(Problem(position, "", message, "config.syntax"))


def _is_plain(event: events.Event) -> TypeGuard[events.ScalarEvent]:
    return isinstance(event, events.ScalarEvent) and bool(event.implicit[0])


def _plain_scalar(yaml: YAML, word: str, text: str) -> Any:
    """Return the number, boolean or null that a word without quotes stands for, otherwise `text`."""
    tag = str(yaml.resolver.resolve(ScalarNode, word, (True, False)))
    return yaml.constructor.construct_object(ScalarNode(tag, word)) if tag in _PLAIN_TAGS else str(text)
