"""Writes a tree as YAML, with the comments and formatting of an earlier text where the two agree."""

from __future__ import annotations

import io
import re
import warnings
from pprint import saferepr
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from emrun.base.errors import ConfigError
from emrun.config.yaml_tree import Node, parse


def dump(node: Node, template: str | None = None) -> str:
    """Return a tree as YAML.

    Args:
        node: the tree.
        template: a YAML text; its comments and formatting are kept where it agrees with the tree.
    """
    plain = node.plain()
    kept = None if template is None else _with_new_parts(node, template) or _dump_like(plain, template)
    return _write(_round_trip(), _escaped(plain)) if kept is None else kept


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


def _escaped(plain: Any) -> Any:
    """Return a tree in which strings with Unicode line breaks will be escaped; ruamel would fold them into spaces."""
    if isinstance(plain, dict):
        return {_escaped(key): _escaped(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_escaped(value) for value in plain]
    if isinstance(plain, str) and re.search("[\x85\u2028\u2029\ufeff]", plain):
        return DoubleQuotedScalarString(plain)
    return plain


def _with_new_parts(node: Node, template: str) -> str | None:
    """Return the template with what is not from a file: keys at the end, and first items of lists.

    None when that does not have the value of the tree; `_dump_like`, which takes three times as long, may have it.
    """
    new, lines = {}, template.rstrip().splitlines(keepends=True)
    for path, child, _ in node.places():
        if not child.position.line and len(path) == 1:
            new[path[0]] = child.plain()
        elif not child.position.line:
            second = node.get(path[0], 1) if path[1:] == (0,) else None
            before = "" if second is None else lines[second.position.line - 1][: second.position.column - 1]
            if second is None or not re.fullmatch(" *- +", before):
                return None
            lines.insert(second.position.line - 1, f"{before}{child.value}\n")
    try:
        text = f"{''.join(lines)}\n{_write(_round_trip(), _escaped(new)) if new else ''}"
        return text if _is_equal(parse(text, "config").plain(), node.plain()) else None
    except ConfigError:  # a key does not fit behind a mapping in braces, for example
        return None


def _dump_like(plain: Any, template: str) -> str | None:
    """Return the template, changed so that it has the value `plain`; None when that is not possible."""
    yaml = _round_trip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor defined twice
            data = yaml.load(template)
            _adapt(data, plain)
            text = _write(yaml, data)
        return text if _is_equal(parse(text, "config").plain(), plain) else None
    except Exception:  # anchors, merge keys and misplaced comments make ruamel fail in many ways
        return None


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two plain trees have equal values and types; NaN equals NaN."""
    return saferepr(one) == saferepr(other)


def _adapt(data: Any, plain: Any) -> None:
    if isinstance(plain, dict):
        for key in [key for key in data if key not in plain]:
            del data[key]
    entries = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in entries:
        if isinstance(plain, dict) and key in data and isinstance(value, list) and value[1:] == data[key]:
            data[key].insert(0, value[0])  # keeps the comments of the other items
        if (isinstance(plain, list) or key in data) and _alike(data[key], value):
            _adapt(data[key], value)
        else:
            data[key] = value


def _alike(old: Any, new: Any) -> bool:
    """Return whether `old` can be changed into `new` in place."""
    if isinstance(new, dict):
        return isinstance(old, dict)
    if isinstance(new, list):
        return isinstance(old, list) and len(old) == len(new)
    same_kind = isinstance(old, type(new)) and isinstance(old, bool) is isinstance(new, bool)
    return same_kind and not isinstance(old, dict | list) and bool(old == new)
