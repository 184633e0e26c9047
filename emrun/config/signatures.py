"""What callables take: their parameters with types and defaults, read from the living object.

What Python accepts counts, not what `inspect.signature` says: a decorator, a `__signature__` or a metaclass may promise
more or less than the call takes.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import FunctionType
from typing import Any, Final

from emrun.types import evaluated

UNREAD: Final = object()
"""A type or a default that stands in a source in a form that only running it would tell."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a callable takes.

    Args:
        named: its parameters. The `annotation` of each is the type itself, None without one that can be evaluated, or
            `UNREAD`; so is the `default`.
        takes_any: it takes any other keyword arguments.
        takes_more: it takes any number of positional arguments.
        others: types of arguments beside those named, which may be handed on to a base.
        unknown: the type of all others: None, or `UNREAD` when there may be more than could be read.
    """

    named: Mapping[str, inspect.Parameter]
    takes_any: bool
    takes_more: bool
    others: Mapping[str, Any] = field(default_factory=dict)
    unknown: Any = None

    def hint(self, name: str) -> Any:
        """Return the type of an argument given by name."""
        return self.named[name].annotation if name in self.named else self.others.get(name, self.unknown)

    def by_position(self, count: int) -> list[str]:
        """Return the names of the first `count` parameters that can be given by position."""
        return [p.name for p in self.named.values() if p.kind is not p.KEYWORD_ONLY][:count]


def takes_keywords(signature: inspect.Signature) -> bool:
    """Tell whether a signature has `**kwargs`."""
    return any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())


class Share(IntEnum):
    """How much of its `**kwargs` a function hands on to the next one, as far as its code tells."""

    NONE = 0
    SOME = 1
    ALL = 2


def handed_on(function: ast.FunctionDef) -> Share:
    """Return how much of its `**kwargs` a constructor hands on to that of a base.

    All of it is handed on by a plain statement `super().__init__(..., **kwargs)` that nothing can pass by, where
    `kwargs` is used for nothing else.
    """
    if function.args.kwarg is None:
        return Share.NONE
    name = function.args.kwarg.arg
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    constructors = [call for call in calls if ast.unparse(call.func).endswith(".__init__")]
    handing = [call for call in constructors if f"**{name}" in map(ast.unparse, call.keywords)]
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    if not handing:
        return Share.NONE
    for statement in function.body:
        if isinstance(statement, ast.Expr) and statement.value is handing[0]:
            is_plain = ast.unparse(handing[0].func) == "super().__init__"
            return Share.ALL if is_plain and len(uses) == 1 else Share.SOME
        if any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(statement)):
            break
    return Share.SOME


def parameters_of(target: Callable[..., Any]) -> Parameters | None:
    """Return what the target of a config takes, None when it has no signature that can be read.

    A class that hands its `**kwargs` on to its base has the parameters of the base.
    """
    try:
        receivers = list(_receivers(target))
    except (TypeError, ValueError):  # written in C
        return None
    hints = _hints([each.function for each in receivers])
    named: dict[str, inspect.Parameter] = {}
    sure = [each for each in receivers if each.share is Share.ALL]
    for receiver in (*sure, *(each for each in receivers if each.share is Share.SOME)):
        default = None if receiver.share is Share.ALL else UNREAD
        for each in receiver.signature.parameters.values():
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                typed = each.replace(annotation=hints.get(each.name))
                behind = typed.replace(kind=each.KEYWORD_ONLY, default=default)  # the one before may hand it on itself
                named.setdefault(each.name, typed if receiver is receivers[0] else behind)
    takes_more = any(each.kind is each.VAR_POSITIONAL for each in receivers[0].signature.parameters.values())
    return Parameters(named, takes_keywords(sure[-1].signature), takes_more, hints)


@dataclass(frozen=True, slots=True)
class _Receiver:
    """A function that gets arguments of a call.

    Args:
        function: the function.
        signature: what it accepts, without what Python supplies.
        share: how much it gets of what those before it do not name.
    """

    function: Any
    signature: inspect.Signature
    share: Share


@dataclass(frozen=True, slots=True)
class _Method:
    """A function that a class has, with how many arguments Python supplies to it."""

    owner: type
    function: Any
    supplied: int


def _receivers(target: Any, share: Share = Share.ALL) -> Iterator[_Receiver]:
    """Yield the functions that get the arguments of a call, in order, up to one that closes it.

    Raises:
        TypeError, ValueError: it is written in C and has no signature.
    """
    if isinstance(target, functools.partial):
        first, *others = _receivers(target.func, share)

        def stand_in() -> None: ...

        stand_in.__signature__ = first.signature  # type: ignore[attr-defined]
        made = functools.partial(stand_in, *target.args, **target.keywords)
        yield from (replace(first, signature=inspect.signature(made)), *others)
        return
    steps = _construction(target) if inspect.isclass(target) else [_called(target)]
    for step in steps:
        for function in _layers(step.function):
            if function is not step.function and not inspect.isfunction(function):  # a class that a function wraps
                yield from _receivers(function, share)
                return
            receiver = _Receiver(function, _accepted(function, step), share)
            yield receiver
            if not takes_keywords(receiver.signature):
                return
            share = min(share, _handed_on(function, step.owner))


def _called(target: Any) -> _Method:
    """Return the function that is called for what is not a class."""
    if inspect.ismethod(target):
        return _Method(object, target.__func__, 1)
    if inspect.isroutine(target) or isinstance(target, _CACHED):
        return _Method(object, target, 0)
    return next(_methods(type(target), "__call__"))


def _construction(target: type) -> Iterator[_Method]:
    """Yield the functions that are called for a class: of its metaclass, `__new__`, and the constructors in order.

    A `__new__` that only looks at the arguments, as that of hooks does, leaves it to the others to take them.
    """
    new = next(each for each in _methods(target, "__new__") if not getattr(each.function, "only_looks", False))
    for method in (next(_methods(type(target), "__call__")), new):
        if inspect.isfunction(method.function):
            yield method
    first, *others = _methods(target, "__init__")
    is_c = first.owner is object and new.owner is not object and not inspect.isfunction(new.function)
    yield from (_Method(object, new.owner, 0) if is_c else first, *others)


def _methods(cls: type, name: str) -> Iterator[_Method]:
    """Yield the functions of a name that a class and its bases have."""
    for owner in cls.__mro__:
        found = vars(owner).get(name)
        function = getattr(found, "__func__", found)
        if inspect.isroutine(function) or isinstance(function, _CACHED):
            yield _Method(owner, function, int(not isinstance(found, staticmethod) or name == "__new__"))
        elif found is not None:
            yield _Method(owner, anything, 0)


def anything(*args: Any, **kwargs: Any) -> None:
    """Stand for what is there but cannot be read."""


_CACHED = type(functools.lru_cache(anything))


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and what it wraps; a cache takes what it wraps takes."""
    seen: list[Any] = []
    while function is not None and function not in seen:
        seen.append(function)
        if not isinstance(function, _CACHED):
            yield function
        function = getattr(function, "__wrapped__", None)


def _accepted(function: Any, method: _Method) -> inspect.Signature:
    """Return what a function accepts beside what Python supplies, whatever it says of itself."""
    if function is object.__init__:
        return inspect.Signature()
    if inspect.isfunction(function):  # a copy has neither `__wrapped__` nor `__signature__`
        code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
        copied = FunctionType(code, {}, function.__name__, defaults, closure)
        copied.__kwdefaults__ = function.__kwdefaults__
        function = copied
    signature = inspect.signature(function, follow_wrapped=False)
    parameters = list(signature.parameters.values())
    is_bound = method.supplied and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:]) if is_bound else signature


def _handed_on(function: Any, owner: type) -> Share:
    """Return how much of its `**kwargs` a function hands on to the one that comes next."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__") or function.__name__ != "__init__":
        return Share.SOME
    try:
        text = inspect.getsource(function.__code__)
        tree = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
    except (OSError, TypeError, SyntaxError, ValueError):  # typed in
        tree = ast.Module([], [])
    definition = next((each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)), None)
    if definition is None or definition.name != function.__code__.co_name:  # or changed since
        return Share.SOME if "__init__" in function.__code__.co_names else Share.NONE
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    is_own = "__class__" in cells and cells["__class__"].cell_contents is owner
    return min(handed_on(definition), Share.ALL if is_own else Share.SOME)


def _hints(functions: Sequence[Any]) -> dict[str, Any]:
    """Return the types of the parameters of functions; the first that has one counts."""
    found: dict[str, Any] = {}
    for function in functions:
        for name, annotation in getattr(function, "__annotations__", {}).items():
            if name not in found:
                found[name] = evaluated(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    return found
