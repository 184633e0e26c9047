"""Reads the parameters of callables, with types and defaults, from the imported objects.

What Python accepts counts, not what `inspect.signature` says: a decorator, a `__signature__` or a metaclass may show
more or fewer parameters than the call accepts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import FunctionType
from typing import Any, Final, get_args

from emrun.base.types import evaluated

UNREAD: Final = object()
"""Stands for a type or a default in a source file that is only known by running the code."""


@dataclass(frozen=True, slots=True)
class ReadLater:
    """Stands for the type of a parameter in a source file, which is read when it is asked for.

    It names the module, and does not hold it: a class lives until the garbage collector finds it, and all syntax trees
    would live as long.

    Args:
        annotation: what the source says.
        module: the dotted path of the module.
        hidden: names of the module that do not mean the same in the class of the parameter's method.
    """

    annotation: ast.expr
    module: str
    hidden: frozenset[str]


class TypedParameter(inspect.Parameter):
    """A parameter whose type is found when it is asked for: most are not, and to find one may read other modules."""

    @property
    def annotation(self) -> Any:
        """The type, None without an annotation or where it cannot be evaluated, or `UNREAD`."""
        return super().annotation()


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a callable.

    Args:
        named: name -> parameter. Its `annotation` is the type itself, None when it is missing or cannot be evaluated,
            or `UNREAD`; its `default` may be `UNREAD` too.
        takes_any: the callable accepts any other keyword arguments.
        takes_more: the callable accepts any number of positional arguments.
        others: name -> function that returns the type of an argument, also one that may be passed on to a base class.
        unknown: the type of all other arguments: None, or `UNREAD` when there may be parameters that were not read.
    """

    named: Mapping[str, TypedParameter]
    takes_any: bool
    takes_more: bool
    others: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    unknown: Any = None

    def hint(self, name: str) -> Any:
        """Return the type of a keyword argument."""
        if name in self.named:
            return self.named[name].annotation
        return self.others[name]() if name in self.others else self.unknown

    def by_position(self, count: int) -> list[str]:
        """Return the names of the first `count` parameters that can be given by position."""
        return [p.name for p in self.named.values() if p.kind is not p.KEYWORD_ONLY][:count]


def takes_text(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is for a text, by its type or its default."""
    return isinstance(parameter.default, str) or str in (parameter.annotation, *get_args(parameter.annotation))


def takes_keywords(signature: inspect.Signature) -> bool:
    """Return whether a signature has `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


class Share(IntEnum):
    """How much of its `**kwargs` a function passes on to the next constructor, judged by its code."""

    NONE = 0
    SOME = 1
    ALL = 2


def handed_on(function: ast.FunctionDef) -> Share:
    """Return how much of its `**kwargs` a constructor passes on to the constructor of a base class.

    The answer is `ALL` for a plain statement `super().__init__(..., **kwargs)` that always runs, when `kwargs` is not
    used anywhere else.
    """
    if function.args.kwarg is None:
        return Share.NONE
    name = function.args.kwarg.arg
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    text = "\n".join(map(ast.unparse, body))  # each simple statement is one line
    if not re.search(rf"\.__init__\(.*\*\*{name}\b", text):
        return Share.NONE
    hands = re.search(rf"^super\(\)\.__init__\(.*\*\*{name}\b", text, re.MULTILINE)
    is_used_once = len(re.findall(rf"\b{name}\b", text)) == 1
    may_end = hands is not None and re.search(r"\b(return|yield)\b", text[: hands.start()])
    return Share.ALL if hands is not None and is_used_once and not may_end else Share.SOME


def parameters_of(
    target: Callable[..., Any], read: Callable[[ReadLater], Any] = lambda annotation: UNREAD
) -> Parameters | None:
    """Return the parameters of a callable, None when it has no readable signature.

    A class that passes its `**kwargs` on to its base has the parameters of the base too.

    Args:
        target: the callable.
        read: reads the types of a callable that stands for one in a source file.
    """
    try:
        receivers = list(_receivers(target))
    except (TypeError, ValueError):  # written in C
        return None
    hints = _hints([function for function, _, _ in receivers], read)
    named: dict[str, TypedParameter] = {}
    first = receivers[0][1]
    for _, signature, share in receivers:
        default = None if share is Share.ALL else UNREAD
        for parameter in signature.parameters.values():
            if share is not Share.NONE and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                name, kind, value = parameter.name, parameter.kind, parameter.default
                if signature is not first:  # the function before may set it
                    kind, value = parameter.KEYWORD_ONLY, default
                hint = hints.get(name, _without_type)
                named.setdefault(name, TypedParameter(name, kind, default=value, annotation=hint))
    last = [signature for _, signature, share in receivers if share is Share.ALL][-1]
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in first.parameters.values())
    return Parameters(named, takes_keywords(last), takes_more, hints)


_Method = tuple[type, Any, int]
"""A class, a function of it, and the number of arguments that Python supplies, such as `self`."""


def _receivers(target: Any, share: Share = Share.ALL) -> Iterator[tuple[Any, inspect.Signature, Share]]:
    """Yield the functions that receive the arguments of a call, in order, up to the first without `**kwargs`.

    Each has its signature, without arguments that Python supplies, and how much it receives of the arguments that the
    functions before it do not name.

    Raises:
        TypeError, ValueError: a function is written in C and has no signature.
    """
    called = _construction(target) if inspect.isclass(target) else [_called(target)]
    for owner, outermost, supplied in called:
        for function in _layers(outermost):
            if function is not outermost and not inspect.isfunction(function):  # a class that a function wraps
                yield from _receivers(function, share)
                return
            yield function, (signature := _accepted(function, supplied)), share
            if not takes_keywords(signature):
                return
            share = min(share, _handed_on(function, owner))


def _called(target: Any) -> _Method:
    """Return the function that is called for a target that is not a class."""
    if inspect.ismethod(target):
        return object, target.__func__, 1
    if inspect.isroutine(target) or isinstance(target, _CACHED):
        return object, target, 0
    return next(_methods(type(target), "__call__"))


def _construction(target: type) -> Iterator[_Method]:
    """Yield the functions that a call of a class runs: of its metaclass, `__new__`, and the constructors in order.

    A `__new__` that only inspects the arguments, such as the one of hooks, is left out.
    """
    news = (method for method in _methods(target, "__new__") if not getattr(method[1], "only_looks", False))
    owner, function, _ = new = next(news)
    for method in (next(_methods(type(target), "__call__")), new):
        if inspect.isfunction(method[1]):
            yield method
    first, *others = _methods(target, "__init__")
    is_c = first[0] is object and owner is not object and not inspect.isfunction(function)
    yield from ((object, owner, 0) if is_c else first, *others)


def _methods(cls: type, name: str) -> Iterator[_Method]:
    """Yield the functions with a name in a class and its bases."""
    for owner in cls.__mro__:
        member = vars(owner).get(name)
        function = getattr(member, "__func__", member)
        if inspect.isroutine(function) or isinstance(function, _CACHED):
            yield owner, function, int(not isinstance(member, staticmethod) or name == "__new__")
        elif member is not None:
            yield owner, anything, 0


def anything(*args: Any, **kwargs: Any) -> None:
    """Stand for a function that exists but cannot be read."""


_CACHED = type(functools.lru_cache(anything))


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and the functions it wraps, without caches, which accept what the wrapped function accepts."""
    seen: list[Any] = []
    while function is not None and function not in seen:
        seen.append(function)
        if not isinstance(function, _CACHED):
            yield function
        function = getattr(function, "__wrapped__", None)


def _accepted(function: Any, supplied: int) -> inspect.Signature:
    """Return the signature by which Python calls a function, whatever its `__signature__` says."""
    if function is object.__init__:
        return inspect.Signature()
    if inspect.isfunction(function):  # a copy has neither `__wrapped__` nor `__signature__`
        code = function.__code__
        copied = FunctionType(code, {}, function.__name__, function.__defaults__, function.__closure__)
        copied.__kwdefaults__ = function.__kwdefaults__
        function = copied
    signature = inspect.signature(function, follow_wrapped=False)
    parameters = list(signature.parameters.values())
    is_bound = supplied and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:]) if is_bound else signature


def _handed_on(function: Any, owner: type) -> Share:
    """Return how much of its `**kwargs` a function passes on to the next constructor."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__") or function.__name__ != "__init__":
        return Share.SOME
    is_own = any(
        name == "__class__" and cell.cell_contents is owner
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    return min(_in_source(function), Share.ALL if is_own else Share.SOME)


@functools.lru_cache(maxsize=256)  # most of the time of a check of a config whose modules are imported
def _in_source(function: FunctionType) -> Share:
    """Return how much of its `**kwargs` a constructor passes on by its source, which is read once."""
    try:
        text = inspect.getsource(function.__code__)
        nodes = ast.walk(ast.parse(f"if True:\n{text}" if text[:1].isspace() else text))
        definition = next((node for node in nodes if isinstance(node, ast.FunctionDef)), None)
    except (OSError, TypeError, SyntaxError, ValueError):  # e.g. defined in an interactive session
        definition = None
    if definition is None or definition.name != function.__code__.co_name:  # or the file has changed since the import
        return Share.SOME if "__init__" in function.__code__.co_names else Share.NONE
    return handed_on(definition)


def _hints(functions: Sequence[Any], read: Callable[[ReadLater], Any]) -> dict[str, Callable[[], Any]]:
    """Return name -> function that returns the type of a parameter, by the first function that has an annotation."""
    hints: dict[str, Callable[[], Any]] = {}
    for function in functions:
        for name, annotation in getattr(function, "__annotations__", {}).items():
            if isinstance(annotation, ReadLater):
                find = functools.partial(read, annotation)
            else:
                names = getattr(inspect.unwrap(function), "__globals__", {})
                find = functools.partial(evaluated, annotation, names)
            hints.setdefault(name, functools.cache(find))
    return hints


def _without_type() -> None:
    """Return the type of a parameter that has no annotation."""
