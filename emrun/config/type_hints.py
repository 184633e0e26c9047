"""Checks values of a config against the type hints of their parameters."""

from __future__ import annotations

import collections.abc
import inspect
import os
import re
import shlex
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from emrun.base.errors import ArgumentError, Position
from emrun.base.types import AtLeast, Factory, Form, Interval, Units
from emrun.base.wording import did_you_mean, listed
from emrun.config.data_numbers import DataNumber
from emrun.config.names import instead
from emrun.config.signatures import UNREAD
from emrun.config.yaml_tree import Node, node_of, of_each, read_scalar

Mark = TypeVar("Mark", Units, AtLeast)

BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""Words that are texts in YAML 1.2, but were booleans in YAML 1.1 -> the booleans."""
_SHOWN: dict[Any, str] = {dict: "this mapping", list: "this list"}
_QUOTED = {"true": "true", "false": "false"}
_WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number", str: "a string"}
_WORDS |= {float: "a number", complex: "a number", type(None): "null", None: "null"}
_NO_TEXT = frozenset(("torch.Tensor", "torch.nn.modules.module.Module", "numpy.ndarray"))
_SEQUENCES = (list, tuple, set, frozenset, collections.abc.Iterable, collections.abc.Collection)


def mismatch(node: Node, hint: Any, default: Any = inspect.Parameter.empty, name: str = "") -> str | None:
    """Return why a value does not have the type of its parameter, None when it may have the type.

    Types that a config cannot write, such as `torch.device`, accept every value.

    Args:
        node: the value.
        hint: the type of the parameter; None or `UNREAD` when it is not known.
        default: the parameter's default; a hint that contradicts the default is ignored.
        name: the name of the parameter, for advice.
    """
    value = node.value
    if isinstance(value, DataNumber):
        fits = _mark_in(hint, Units) is not None or _accepts(node, hint) or contradicts(default, hint)
        return None if fits else f"{value} is a whole number, not {describe(hint)}"

    # values with units, and with a least value
    units = _mark_in(hint, Units)
    if units is not None and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            Interval.parse("", value, units.allowed)
        except ArgumentError as error:
            return error.message
        return None
    limit = _mark_in(hint, AtLeast)
    if limit is not None and type(value) in (int, float) and value < limit.minimum:
        return f"must be at least {limit.minimum}, not {value!r}"

    # the type
    meant = (BOOLEANS | _QUOTED).get(value.lower()) if isinstance(value, str) else None
    if meant is not None and _wants_boolean(value, hint, default):
        return f"{node.shown()!r} is a text, not true or false; write {meant}"
    if _accepts(node, hint) or default is value or contradicts(default, hint):
        return None

    # what to write instead
    of_items = [inner[0] for sort, _, inner in alternatives(hint) if sort == "sequence" and inner]
    takes_text = any(kind is str for _, kind, _ in alternatives(hint))
    advice = instead(str(value), name)
    if advice is not None:
        how = f"; {advice}"
    elif isinstance(value, str) and not takes_text and type(read_scalar(value)) in (int, float):
        how = "; write the number without quotes"
    elif isinstance(value, str):
        literals = [literal for sort, _, values in alternatives(hint) if sort == "literal" for literal in values]
        how = did_you_mean(value, map(str, literals))
    elif type(value) in (int, float, bool) and takes_text:
        how = _in_quotes(node)
    elif isinstance(value, dict) and any(map(allows_mapping, of_items)):
        how = f"; write a list: [{', '.join(f'{key}: ...' for key in value)}]"
    else:
        how = ""
    shown = _SHOWN.get(type(value)) or repr(node.shown())
    return f"{shown} is not {describe(hint)}{how}"


def with_texts(node: Node, hint: Any) -> Node:
    """Return a value with texts of the environment, instead of what they are in YAML, where only a text is allowed."""
    if isinstance(node.value, dict | list):
        wanted = "mapping" if isinstance(node.value, dict) else "sequence"
        inner = next((values[-1] for sort, _, values in alternatives(hint) if sort == wanted and values), None)
        return replace(node, value=of_each(node.value, lambda child: with_texts(child, inner)))
    is_text = node.text is not None and any(kind is str for _, kind, _ in alternatives(hint))
    return replace(node, value=node.text) if is_text and not _accepts(node, hint) else node


def takes_tensor(value: Any, hint: Any) -> bool:
    """Return whether a value is a list for a hint that allows a tensor, and no list."""
    sorts = {sort: kind for sort, kind, _ in alternatives(hint)} if isinstance(value, list) else {}
    return getattr(sorts.get("no text"), "__name__", "") == "Tensor" and sorts.keys() <= {"no text", "scalar"}


def _wants_boolean(value: str, hint: Any, default: Any) -> bool:
    """Return whether a parameter is a boolean by its hint or its default, and no text such as `value`."""
    allowed = list(alternatives(hint))
    takes_text = any(sort != "anything" and _is_one(value, sort, *rest) for sort, *rest in allowed)
    return not takes_text and (type(default) is bool or any(kind is bool for _, kind, _ in allowed))


def _in_quotes(node: Node) -> str:
    """Return how to write a text that is a number in YAML: in a shell, the quotes themselves are quoted."""
    match = re.fullmatch(r"override ['\"](.+?)=(.*)['\"]", node.position.source)
    if match is None or node.position.line:
        return "; write it in quotes"
    quoted = f'{match[1]}="{match[2]}"'
    return f"; write {shlex.quote(quoted)}"


def contradicts(default: Any, hint: Any) -> bool:
    """Return whether a default does not, or may not, have the type of its parameter; such a hint is ignored."""
    if default is UNREAD or default is inspect.Parameter.empty:
        return default is UNREAD
    value = list(default) if isinstance(default, set | frozenset) else default
    return not _accepts(node_of(value, Position("default")), hint)


def alternatives(hint: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield the alternatives that a hint allows: the sort, type and arguments of each.

    The sorts are `literal`, `scalar`, `path`, `mapping`, `tuple` (of a fixed length), `sequence`, `no text` (a class
    that accepts no string, such as a tensor) and `anything`.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    kind = origin or hint
    cls = kind if inspect.isclass(kind) else object
    sort = "anything"
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType):
        hints = arguments[:1] if origin is typing.Annotated else arguments
        for inner in hints:
            yield from alternatives(inner)
        return
    if origin is typing.Literal:
        sort = "literal"
    elif hint in _WORDS and hint is not None:
        sort = "scalar"
    elif issubclass(cls, os.PathLike):
        sort = "path"
    elif issubclass(cls, collections.abc.Mapping):
        sort = "mapping"
    elif kind is tuple and arguments and arguments[-1] is not Ellipsis:
        sort = "tuple"
    elif cls in _SEQUENCES or issubclass(cls, collections.abc.Sequence):
        sort = "sequence"
    elif not _NO_TEXT.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__):
        sort = "no text"
    yield sort, kind, arguments


def _accepts(node: Node, hint: Any) -> bool:
    value = 1 if isinstance(node.value, DataNumber) else node.value
    return node.is_form or any(_is_one(value, *alternative) for alternative in alternatives(hint))


def _is_one(value: Any, sort: str, kind: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether an alternative of a hint allows a value."""
    match sort:
        case "literal":
            return any(value == allowed and type(value) is type(allowed) for allowed in arguments)
        case "scalar":
            is_kind = isinstance(value, int | float if kind in (float, complex) else kind)
            return is_kind and (kind is bool or not isinstance(value, bool))
        case "path":
            return isinstance(value, str)
        case "mapping":
            inner = arguments[1] if len(arguments) == 2 else Any
            return isinstance(value, dict) and all(_accepts(child, inner) for child in value.values())
        case "tuple":
            return isinstance(value, list) and len(value) == len(arguments) and all(map(_accepts, value, arguments))
        case "sequence" if isinstance(value, list):
            return all(_accepts(child, arguments[0] if arguments else Any) for child in value)
        case "sequence":  # a string is a sequence of strings, a mapping an iterable of keys
            has_keys = isinstance(value, dict) and not issubclass(kind, collections.abc.Sequence)
            return (isinstance(value, str) or has_keys) and inspect.isabstract(kind)
        case "no text":
            return not isinstance(value, str | dict | None)
    return True


def describe(hint: Any) -> str:
    """Return what a config can write for a hint; objects only where nothing else is allowed."""
    allowed = list(alternatives(hint))
    written = [alternative for alternative in allowed if alternative[0] != "no text"] or allowed
    return " or ".join(dict.fromkeys(_described(*alternative) for alternative in written))


def _described(sort: str, kind: Any, arguments: tuple[Any, ...]) -> str:
    match sort:
        case "literal":
            return f"one of {listed([str(value) for value in arguments])}"
        case "path":
            return "a path"
        case "mapping":
            values = arguments[1] if len(arguments) == 2 else Any
            return "a mapping" + (f" whose values are {_plural(values)}" if values is not Any else "")
        case "tuple":
            return f"a list of {len(arguments)} values: {', '.join(map(describe, arguments))}"
        case "sequence":
            return "a list" + (f" of {_plural(arguments[0])}" if arguments else "")
        case "no text":
            return f"a {kind.__name__}, written as {{class: NAME, ...}}"
    return _WORDS[kind] if kind in _WORDS else str(getattr(kind, "__name__", kind))


def _plural(hint: Any) -> str:
    counted = [word for word in (*_WORDS.values(), "a mapping", "a list") if word.startswith("a ")]
    parts = describe(hint).split(" or ")
    return " or ".join(f"{part.removeprefix('a ')}s" if part in counted else part for part in parts)


def values_of_mapping(hint: Any) -> Any:
    """Return the type of the values if a hint allows a mapping of one type of values, None if it does not."""
    inner = [arguments[1] for sort, _, arguments in alternatives(hint) if sort == "mapping" and len(arguments) == 2]
    return inner[0] if len(inner) == 1 else None


def _mark_in(hint: Any, kind: type[Mark]) -> Mark | None:
    """Return the mark of a kind in an annotated hint, e.g. the units of an interval; None if there is none."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        return next((mark for mark in hint.__metadata__ if isinstance(mark, kind)), None)
    if origin in (typing.Union, types.UnionType):
        return next((mark for argument in arguments if (mark := _mark_in(argument, kind)) is not None), None)
    return None


def form_in(hint: Any) -> Form | None:
    """Return the form in which a config writes a `Factory`, None when the hint contains no `Factory`."""
    if hint is Factory:
        return Form()
    if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is Factory:
        return next((mark for mark in hint.__metadata__ if isinstance(mark, Form)), Form())
    return next((form for argument in typing.get_args(hint) if (form := form_in(argument)) is not None), None)


def allows_mapping(hint: Any) -> bool:
    """Return whether a hint is a mapping or has a mapping among its alternatives."""
    return any(sort == "mapping" for sort, _, _ in alternatives(hint))
