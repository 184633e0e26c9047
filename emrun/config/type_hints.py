"""Values of a config against the type hints of the parameters that they are for."""

from __future__ import annotations

import collections.abc
import inspect
import os
import types
import typing
from typing import Any

from emrun.config.yaml_tree import Node
from emrun.types import Factory, Form
from emrun.wording import listed

SCALARS: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    complex: (int, float),
    str: (str,),
    type(None): (type(None),),
}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", complex: "a number", str: "a text"}
NO_TEXT = frozenset(("torch.Tensor", "torch.nn.modules.module.Module", "numpy.ndarray"))
SEQUENCES = (list, tuple, set, frozenset, collections.abc.Iterable, collections.abc.Collection)


def mismatch(node: Node, hint: Any, default: Any = inspect.Parameter.empty) -> str | None:
    """Return what is wrong with a value, None when it may be right.

    Only what can never be right is wrong: of types that a config cannot write, such as `torch.device`, nothing is said.

    Args:
        node: the value.
        hint: the type of the parameter; None when it is not known.
        default: the parameter's default; a hint that this contradicts counts for nothing.
    """
    if hint is None or _accepts(node, hint):
        return None
    if default is not inspect.Parameter.empty and (default is node.value or not _accepts(_as_node(default), hint)):
        return None
    value = node.value
    allowed = _describe(hint)
    if allowed.startswith("one of "):
        return f"{node.shown()!r} is not {allowed}"
    hint_to_fix = ""
    if isinstance(value, str) and not _accepts_kind(hint, str) and _is_number(value):
        hint_to_fix = "; write it without quotes"
    elif isinstance(value, int | float) and not isinstance(value, bool) and _accepts_kind(hint, str):
        hint_to_fix = "; write it in quotes"
    shown = node.shown()
    kind = "a mapping" if isinstance(shown, dict) else "a list" if isinstance(shown, list) else repr(shown)
    return f"{kind} is not {allowed}{hint_to_fix}"


def _accepts(node: Node, hint: Any) -> bool:
    value = node.value
    if isinstance(value, dict) and ("class" in value or "import" in value):
        return True  # an object that is not built yet
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _accepts(node, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(node, each) for each in arguments)
    if origin is typing.Literal:
        return any(value == each and type(value) is type(each) for each in arguments)
    if hint in SCALARS:
        return isinstance(value, SCALARS[hint]) and (hint is bool or not isinstance(value, bool))
    kind = origin or hint
    if not inspect.isclass(kind):
        return True
    if issubclass(kind, os.PathLike):
        return isinstance(value, str)
    if issubclass(kind, collections.abc.Mapping):
        inner = arguments[1] if len(arguments) == 2 else Any
        return isinstance(value, dict) and all(_accepts(child, inner) for child in value.values())
    if kind in SEQUENCES or (kind is not str and issubclass(kind, collections.abc.Sequence)):
        return _accepts_sequence(value, kind, arguments)
    if isinstance(value, str):
        return NO_TEXT.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return True


def _accepts_sequence(value: Any, kind: type, arguments: tuple[Any, ...]) -> bool:
    if isinstance(value, str | dict):  # a text is a sequence of texts, a mapping is an iterable of keys
        return inspect.isabstract(kind) and not (isinstance(value, dict) and issubclass(kind, collections.abc.Sequence))
    if not isinstance(value, list):
        return False
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(_accepts, value, arguments))
    inner = arguments[0] if arguments else Any
    return all(_accepts(child, inner) for child in value)


def _accepts_kind(hint: Any, kind: type) -> bool:
    """Tell whether a hint has a type at its top."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return any(_accepts_kind(each, kind) for each in typing.get_args(hint))
    return hint is kind


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(each) for each in arguments))
    if origin is typing.Literal:
        return f"one of {listed([str(each) for each in arguments])}"
    if hint in (None, type(None)):
        return "null"
    if hint in _WORDS:
        return _WORDS[hint]
    kind = origin or hint
    if inspect.isclass(kind) and issubclass(kind, os.PathLike):
        return "a path"
    if inspect.isclass(kind) and issubclass(kind, collections.abc.Mapping):
        return "a mapping" + (f" whose values are {_plural(arguments[1])}" if len(arguments) == 2 else "")
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)}: {', '.join(map(_describe, arguments))}"
    if kind in SEQUENCES or (inspect.isclass(kind) and issubclass(kind, collections.abc.Sequence)):
        return "a list" + (f" of {_plural(arguments[0])}" if arguments else "")
    return str(getattr(kind, "__name__", kind))


def _plural(hint: Any) -> str:
    described = _describe(hint)
    return described.removeprefix("a ") + "s" if described in _WORDS.values() and hint is not bool else described


def _as_node(value: Any) -> Node:
    if isinstance(value, dict):
        return Node({key: _as_node(child) for key, child in value.items()}, None)  # type: ignore[arg-type]
    if isinstance(value, list | tuple | set | frozenset):
        return Node([_as_node(child) for child in value], None)  # type: ignore[arg-type]
    return Node(value, None)  # type: ignore[arg-type]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def form_in(hint: Any) -> Form | None:
    """Return how a parameter's `Factory` is written, None when it is no factory."""
    if hint is Factory:
        return Form()
    if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is Factory:
        return next((each for each in hint.__metadata__ if isinstance(each, Form)), Form())
    return next((form for each in typing.get_args(hint) if (form := form_in(each)) is not None), None)


def allows_mapping(hint: Any) -> bool:
    """Tell whether a hint is a mapping, or has one among its alternatives."""
    origin = typing.get_origin(hint)
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Mapping):
        return True
    return any(allows_mapping(each) for each in typing.get_args(hint))
