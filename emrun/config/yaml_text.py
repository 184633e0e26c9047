"""Writes a tree as YAML; an earlier text stays as it is, with its comments, if parts were only added."""

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
        template: the YAML text that the tree is from. It is returned, with its comments, if it has the value of the
            tree, or gets it by keys at its end and by first items of lists.
    """
    plain = node.plain()
    if template is not None:
        for text in dict.fromkeys((_with_new_parts(node, template), template)):
            if _means(text, plain):
                return text
    return _write(plain)


def _write(plain: Any) -> str:
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


def _with_new_parts(node: Node, template: str) -> str:
    """Return the template with what is not from a file: keys at the end, and first items of lists.

    It is returned as it is if there is more that is not from a file.
    """
    new = {}
    lines = template.rstrip().splitlines(keepends=True)
    count = len(lines)
    for path, child, _ in node.places():
        if child.position.line or path[0] in new:
            continue
        if len(path) == 1:
            new[path[0]] = child.plain()
        elif path[1:] == (0,):
            second = node.get(path[0], 1)
            if second is not None and second.position.line:
                before = lines[second.position.line - 1][: second.position.column - 1]
                lines.insert(second.position.line - 1, f"{before}{child.value}\n")
        else:
            return template
    if not new and len(lines) == count:
        return template
    return f"{''.join(lines)}\n{_write(new) if new else ''}"


def _means(text: str, plain: Any) -> bool:
    """Return whether a YAML text has a value, in which types count too; NaN equals NaN."""
    try:
        return saferepr(parse(text, "config").plain()) == saferepr(plain)
    except ConfigError:  # a key does not fit behind a mapping in braces, for example
        return False
