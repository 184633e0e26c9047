"""Reads single values of a YAML text: only their part of the text is parsed, since parsing takes milliseconds.

A text that is written as most are, with an entry per line, is split at the keys of its mappings and the dashes of its
lists by their indentation. Whatever is not that simple is left to the parser of configs, in the smallest part that has
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from emrun.base.errors import ConfigError
from emrun.config.yaml_tree import parse

_ENTRY = re.compile(r"([A-Za-z_][\w.-]*):(?: +(.*))?")
_ITEM = re.compile(r"- +(.*)")
_UNUSUAL = re.compile(r"<<|[\t\r\x85\u2028\u2029]")  # merge keys; blanks and ends of lines that YAML has besides
_SIMPLE = re.compile(r"([\w.+/-]+|'[^'\\]*'|\"[^\"\\]*\")(?: +#.*)?")
_PAIR = re.compile(r"([A-Za-z_][\w.-]*): ([\w.+/-]+|'[^'\\,{}\[\]]*')")
_FLOW = re.compile(rf"\{{{_PAIR.pattern}(?:, {_PAIR.pattern})*\}}")
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_TEXT = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"))
_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_DECIMAL = re.compile(r"-?(?:0|[1-9]\d{0,17})\.\d+(?:[eE][-+]?\d{1,3})?")
_REMEMBERED = 1000  # characters of a part that is remembered

MISSING: Final = object()
"""Stands for a value that is not there; null is None."""


class Unclear(Exception):
    """The text is not as simple as it seemed: only the parser of configs can tell what it holds."""


class YamlPart:
    """A value in a YAML text.

    Args:
        first: what follows its key or its dash on the same line.
        lines: the lines below.
        children: its entries, if they are known; see `children`.
    """

    __slots__ = ("_children", "_first", "_lines")

    def __init__(
        self, first: str, lines: list[str], children: Mapping[str, YamlPart] | object | None = MISSING
    ) -> None:
        self._first = first
        self._lines = lines
        self._children = children

    def children(self) -> Mapping[str, YamlPart] | None:
        """Return the entries of a mapping by key, or of a list by index as text; None if only the parser can tell."""
        if self._children is MISSING:
            is_flow = self._first.startswith("{") and not self._lines
            self._children = _split_flow(self._first) if is_flow else None if self._first else _block(self._lines)
        return self._children  # type: ignore[return-value]

    def get(self, *path: str) -> Any:
        """Return the value at a path in plain types, `MISSING` if there is none.

        Raises:
            Unclear: the parser of configs may return something else.
        """
        part = self
        for index, name in enumerate(path):
            children = part.children()
            if children is None:
                return below(part.plain(), path[index:])
            if name not in children:
                return MISSING
            part = children[name]
        return part.plain()

    def plain(self) -> Any:
        """Return the value in plain types.

        Raises:
            Unclear: the parser of configs may return something else.
        """
        if not any(line and not line.lstrip(" ").startswith("#") for line in self._lines):
            return _scalar(self._first)
        return _parsed("\n".join((f"value: {self._first}", *(f" {line}" for line in self._lines))))


def split_text(text: str) -> YamlPart | None:
    """Return a text as a part to read values from; None if it has what only the parser understands."""
    part = YamlPart("", text.split("\n"), None if _UNUSUAL.search(text) else _split(text.split("\n")))
    return None if part.children() is None else part


def below(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path below a plain value, `MISSING` if there is none."""
    for name in path:
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        value = next((entry for key, entry in entries if str(key) == name), MISSING)
    return value


def _block(lines: list[str]) -> Mapping[str, YamlPart] | None:
    """Return the parts of a block as `_split` does; of many runs, most blocks are the same."""
    text = "\n".join(lines)
    return _remembered_block(text) if len(text) <= _REMEMBERED else _split(lines)


@lru_cache(1000)
def _remembered_block(text: str) -> Mapping[str, YamlPart] | None:
    return _split(text.split("\n"))


def _split(lines: list[str]) -> Mapping[str, YamlPart] | None:
    """Return the parts of a mapping or a list that begins on a line of its own; None if it is not that simple."""
    found: dict[str, YamlPart] = {}
    indent = -1
    below: list[str] | None = None
    first, is_list = "", False
    deeper = " "
    for line in lines:
        if below is not None and line.startswith(deeper):
            below.append(line)
            continue
        bare = line.lstrip(" ")
        if not bare or bare[0] == "#":
            if below is not None:
                below.append(line)
            continue
        here = len(line) - len(bare)
        if indent < 0:
            indent, is_list, deeper = here, bare.startswith("- "), " " * (here + 1)
        match = (_ITEM if is_list else _ENTRY).fullmatch(bare)
        if here == indent and match is None and not is_list and below is not None and not first and bare[:2] == "- ":
            below.append(line)  # a list may begin below the key itself
            continue
        if here != indent or match is None:
            return None
        first = (match[match.lastindex or 0] if is_list else match[2]) or ""
        first = "" if first.startswith("#") else first.rstrip(" ")
        key = str(len(found)) if is_list else match[1]
        if key in found or key.lower() in _NOT_TEXT:
            return None
        below = []
        if is_list and _ENTRY.fullmatch(first):  # a mapping that begins after the dash
            below.append(" " * (here + len(bare) - len(match[1])) + first)
            first = ""
        elif not _is_closed(first):
            return None
        found[key] = YamlPart(first, below)
    return found or None


def _split_flow(first: str) -> Mapping[str, YamlPart] | None:
    """Return the parts of a mapping such as `{class: AdamW, lr: 0.1}`; None if it is not that simple."""
    pairs = _PAIR.findall(first) if _FLOW.fullmatch(first) else []
    found = {name: YamlPart(value, []) for name, value in pairs if name.lower() not in _NOT_TEXT}
    return found if pairs and len(found) == len(pairs) else None


def _is_closed(first: str) -> bool:
    """Return whether a value that begins on a line cannot continue on lines that are not indented more."""
    if not first or _SIMPLE.fullmatch(first):
        return True
    if first[0] in "|>":
        return False  # what follows depends on the indentation of the whole
    pairs = (("{", "}"), ("[", "]"))
    return all(first.count(a) == first.count(b) for a, b in pairs) and first.count("'") % 2 == first.count('"') % 2 == 0


def _scalar(first: str) -> Any:
    """Return the value of a text on one line."""
    match = _SIMPLE.fullmatch(first)
    word = match[1] if match else ""
    if word[:1] in ("'", '"') and word:
        return word[1:-1]
    if _WORD.fullmatch(word) and word.lower() not in _NOT_TEXT:
        return word
    if _WHOLE.fullmatch(word):
        return int(word)
    if _DECIMAL.fullmatch(word):
        return float(word)
    return _parsed(f"value: {first}")


def _parsed(text: str) -> Any:
    value = _remembered(text) if len(text) <= _REMEMBERED else _parse(text)
    if isinstance(value, ConfigError):
        raise Unclear from value
    return value


def _parse(text: str) -> Any:
    try:
        return parse(text, "").plain()["value"]
    except ConfigError as error:
        return error


_remembered = lru_cache(1000)(_parse)
