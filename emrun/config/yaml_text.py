"""Writes a tree as YAML, with the comments and formatting of an earlier text if no value of that has changed."""

from __future__ import annotations

import io
import re
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
        template: a YAML text; its comments and formatting are kept if the tree has its values, new keys at the end,
            and new items at the beginning of lists.
    """
    kept = None if template is None else _with_new_parts(node, template)
    return _written(node.plain()) if kept is None else kept


def _written(plain: Any) -> str:
    yaml = YAML()
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(_escaped(plain), text)
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

    None when that does not have the value of the tree.
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
        text = f"{''.join(lines)}\n{_written(new) if new else ''}"
        # NaN equals NaN, and the number 1 does not equal true
        return text if saferepr(parse(text, "config").plain()) == saferepr(node.plain()) else None
    except ConfigError:  # a key does not fit behind a mapping in braces, for example
        return None
