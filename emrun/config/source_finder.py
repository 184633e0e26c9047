"""What a config names, read from Python files: nothing is imported, no code of a user runs.

Only what stands there literally is taken for known: a class with directly named bases and a plain constructor, a
function without decorators, types made of names. Of everything else `find` says None, and whoever asks leaves it to
the import.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import os
import pathlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from emrun.config.names import CONFIGURE, no_dotted_path, no_member, no_model, not_configured
from emrun.config.signatures import UNREAD, Parameters, Share, handed_on, takes_keywords
from emrun.config.source_modules import TORCH, Binding, SourceModule, SourceModules, bound_in
from emrun.events import misspelt_event, no_event
from emrun.hook import AbstractHook
from emrun.types import Factory, Form


@dataclass(frozen=True, slots=True)
class Source:
    """A class or function as it stands in a file.

    Args:
        name: its dotted path.
        signatures: its own and those to which it hands `**kwargs` on; see `Parameters.of_signatures`.
        bases: of a class, the dotted paths of all its bases.
        definitions: of a class, it and its bases as far as they were read.
        members: of a class, what it and its bases bind; a class hides what its bases have.
    """

    name: str
    signatures: tuple[inspect.Signature, ...] = ()
    bases: tuple[str, ...] = ()
    definitions: tuple[ast.ClassDef, ...] = ()
    members: Mapping[str, list[Binding]] = field(default_factory=dict)


_ANY = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)
_MODULES = frozenset(("torch.nn.Module", "torch.nn.modules.module.Module"))
_BASES = {
    name: Source(name, (_ANY,)) for name in (*_MODULES, "torch.optim.Optimizer", "torch.optim.optimizer.Optimizer")
}
_WITHOUT_STREAMS = frozenset(("builtins.object", "abc.ABC", "typing.Generic", "emrun.dataset.AbstractDataset"))
_BASES |= {name: Source(name) for name in (*_WITHOUT_STREAMS, "torch.utils.data.Dataset", "emrun.hook._NotesNames")}
"""The bases that are not read; what a subclass without a constructor takes is that of the base."""

_HOMES: dict[str, Any] = {"builtins": builtins, "typing": typing, "collections.abc": collections.abc}
_TYPES: dict[str, Any] = {
    "emrun.types.Factory": Factory,
    "emrun.hook.AbstractHook": AbstractHook,
    "pathlib.Path": pathlib.Path,
    "os.PathLike": os.PathLike,
}
for _path in ("torch.Tensor", "torch.device", "torch.dtype", "torch.nn.Module", "numpy.ndarray"):
    _package, _, _name = _path.rpartition(".")
    _module = {"torch.nn": "torch.nn.modules.module"}.get(_package, _package)
    _TYPES[_path] = type(_name, (), {"__module__": _module})  # stands for the class, which nobody imported
_SPECIAL = frozenset(("__new__", "__signature__", "__init_subclass__", "__class_getitem__"))
_FORM = "emrun.types.Form"
_MAX_DEPTH = 20  # of names that mean others


class Sources:
    """Finds what a config names in its source: phase one of the check."""

    def __init__(self) -> None:
        self._modules = SourceModules()
        self._found: dict[str, Source | None] = {}

    def find(self, path: str) -> Source | None:
        """Return the class or function that a dotted path names, None where only importing it would tell.

        Raises:
            LookupError: there is no such thing.
        """
        if not all(part.isidentifier() for part in path.split(".")):
            raise no_dotted_path(path)
        found = self._lookup(path)
        if not isinstance(found, Source) and path.startswith(f"{TORCH}."):
            return Source(path, (_ANY,))  # whatever it takes, it takes no `Factory`
        return found if isinstance(found, Source) else None

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None where only importing it would tell."""
        module = self._modules.read(package)
        if module is None:
            return None
        return [
            name
            for name, (bound, *_) in module.bound.items()
            if name[:1].isupper() and not isinstance(bound, ast.Constant)
            if not isinstance(bound, str) or bound.startswith(f"{package}.")
        ]

    def parameters(self, target: Source) -> Parameters | None:
        """Return what a class or function takes."""
        found = Parameters.of_signatures(target.signatures or (inspect.Signature(),))
        return found if target.name.startswith(f"{TORCH}.") else replace(found, unknown=UNREAD)

    def refusal(self, target: Source, kind: str) -> str | None:
        """Return why a class cannot be what a config names it for, where its bases tell; else None."""
        if kind == "model" and _MODULES & set(target.bases) and "emrun.model.AbstractModel" not in target.bases:
            return no_model(target.name, is_module=True)
        if kind == "dataset" and not target.signatures and _is_method(target.members.get(CONFIGURE, [])):
            return not_configured(target.name) if CONFIGURE not in _words(target) else None
        return None

    def mistaken_event(self, target: Source) -> str | None:
        """Return which method of a hook's class is a misspelt event."""
        for name, bound in target.members.items() if "emrun.hook.AbstractHook" in target.bases else ():
            near = misspelt_event(name)
            if near is not None and _is_method(bound):
                return no_event(target.name.rpartition(".")[2], name, near)
        return None

    def streams(self, target: Source) -> list[str] | None:
        """Return the streams of a dataset's class, None where only a built dataset shows them."""
        names = [name for name in target.members if name.endswith("_stream")]
        words = _words(target) | ({"setattr"} if "__getattr__" in target.members else set())
        if any(word in ("setattr", "__setattr__", "__dict__") or word.endswith("_stream") for word in words):
            return None
        is_sure = _WITHOUT_STREAMS.issuperset(_BASES.keys() & target.bases)
        is_sure = is_sure and all(_is_method(target.members[name]) for name in names)
        return [name.removesuffix("_stream") for name in names] if names and is_sure else None

    # Names

    def _lookup(self, path: str, depth: int = 0) -> Source | tuple[SourceModule, ast.expr] | None:
        """Return what a dotted path names: a class or function, an expression with its module, or None.

        Args:
            path: the path.
            depth: after how many other names; 0 for that in the config. What is missing behind others is None.

        Raises:
            LookupError: there is no such thing.
        """
        module: SourceModule | None = None
        parts = path.split(".")
        for index, part in enumerate(parts if depth < _MAX_DEPTH else ()):
            rest = parts[index + 1 :]
            bound = [] if module is None else module.bound.get(part, [])
            is_module = module is None or bound == [f"{module.name}.{part}"]  # `from . import part`
            if module is not None and bound and not is_module and not (rest and parts[0] == TORCH):
                return self._meaning(module, part, bound, rest, depth)
            try:
                inner = None if part.startswith("__") else self._modules.read(".".join(parts[: index + 1]))
            except LookupError:
                if module is None and not depth and not self._modules.may_find_more:
                    raise
                if module is None or depth or parts[0] == TORCH or "__getattr__" in module.bound:
                    return None
                file = str(module.file) if module.file else None
                raise no_member(path, module.name, file, part, module.bound) from None
            if inner is None:
                return None
            module = inner
        return None

    def _meaning(
        self, module: SourceModule, name: str, bound: list[Binding], rest: Sequence[str], depth: int
    ) -> Source | tuple[SourceModule, ast.expr] | None:
        """Return what a name of a module is, and what the rest of the path is in it."""
        match bound:
            case [str() as imported]:
                return self._lookup(".".join((imported, *rest)), depth + 1)
            case [ast.ClassDef() | ast.FunctionDef() as definition] if not rest and not definition.decorator_list:
                path = f"{module.name}.{name}"
                if path not in self._found:
                    self._found[path] = None  # while it is read: it may be its own base, or the type of an argument
                    if isinstance(definition, ast.ClassDef):
                        self._found[path] = self._class(path, module, definition)
                    else:
                        self._found[path] = Source(path, (self._signature(definition, module),))
                return self._found[path]
            case [ast.expr() as expression] if not rest and depth:
                return module, expression
        return None

    def _path(self, expression: ast.expr, module: SourceModule) -> str:
        """Return the dotted path that an expression of names stands for.

        Raises:
            TypeError: it is another one, or unsure.
        """
        match expression:
            case ast.Attribute():
                return f"{self._path(expression.value, module)}.{expression.attr}"
            case ast.Name(id=name):
                match module.bound.get(name, [f"builtins.{name}"]):
                    case [ast.AST() | str() as bound] if name not in module.bound or not hasattr(builtins, name):
                        return bound if isinstance(bound, str) else f"{module.name}.{name}"
        raise TypeError

    # Classes and functions

    def _class(self, name: str, module: SourceModule, definition: ast.ClassDef) -> Source | None:
        members = bound_in(definition.body)
        if definition.keywords or _SPECIAL & members.keys():
            return None
        inside = replace(module, bound={**module.bound, **{each: [None] for each in members}})
        signatures: tuple[inspect.Signature, ...] = ()
        bases: tuple[str, ...] = ()
        definitions: tuple[ast.ClassDef, ...] = (definition,)
        hands_on = True
        match members.get("__init__", []):
            case [ast.FunctionDef(decorator_list=[]) as constructor]:
                signatures = (self._signature(constructor, inside, skip=1),)
                hands_on = takes_keywords(signatures[0]) and handed_on(constructor) is Share.ALL
            case [_, *_]:
                return None
        for expression in definition.bases:
            base = self._base(expression, module)
            if base is None or (base.definitions and definitions[1:]):
                return None
            bases += (base.name, *base.bases)
            definitions += base.definitions
            members = {**members, **base.members, **members}
            if hands_on and base.signatures:
                signatures += base.signatures
                hands_on = False
        return Source(name, signatures, bases, definitions, members)

    def _base(self, expression: ast.expr, module: SourceModule) -> Source | None:
        """Return the class that a class names as its base, None when that is unsure."""
        try:
            path = self._path(expression.value if isinstance(expression, ast.Subscript) else expression, module)
        except TypeError:
            return None
        found = _BASES.get(path) or self._lookup(path, 1)
        return found if isinstance(found, Source) and (found.definitions or path in _BASES) else None

    def _signature(self, function: ast.FunctionDef, module: SourceModule, skip: int = 0) -> inspect.Signature:
        """Return the signature of a function without its first parameters."""
        given = function.args
        positional = [*given.posonlyargs, *given.args]
        defaults: dict[ast.arg, Any] = dict(zip(reversed(positional), reversed(given.defaults), strict=False))
        defaults.update((each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True))
        kinds: tuple[tuple[Any, Sequence[ast.arg | None]], ...] = (
            (inspect.Parameter.POSITIONAL_ONLY, given.posonlyargs),
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, given.args),
            (inspect.Parameter.VAR_POSITIONAL, [given.vararg]),
            (inspect.Parameter.KEYWORD_ONLY, given.kwonlyargs),
            (inspect.Parameter.VAR_KEYWORD, [given.kwarg]),
        )
        parameters = [
            inspect.Parameter(
                each.arg, kind, default=_default(defaults.get(each)), annotation=self._hint(each.annotation, module)
            )
            for kind, arguments in kinds
            for each in arguments
            if each is not None
        ]
        return inspect.Signature(parameters[skip if positional else 0 :])

    # Types

    def _hint(self, annotation: ast.expr | None, module: SourceModule) -> Any:
        """Return the type that an annotation means, None without one, or `UNREAD`."""
        try:
            return annotation and self._type(annotation, module)
        except Exception:  # whatever Python makes of a type that makes no sense
            return UNREAD

    def _type(self, expression: ast.expr, module: SourceModule) -> Any:
        """Return the type that an expression means.

        Raises:
            TypeError: it is not made of names that can be read.
            Exception: it makes no sense.
        """
        match expression:
            case ast.Constant(value=str() as text):
                return self._type(ast.parse(text, mode="eval").body, module)
            case ast.Constant(value=value) if value is None or value is ...:
                return value
            case ast.List():
                return [self._type(each, module) for each in expression.elts]
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                if any(isinstance(getattr(each, "value", None), str) for each in (left, right)):
                    raise TypeError("a text has no operator |")
                return self._type(left, module) | self._type(right, module)
            case ast.Subscript(value=owner, slice=ast.Tuple(elts=inner)):
                return self._subscript(self._type(owner, module), inner, module)
            case ast.Subscript(value=owner, slice=index):
                return self._subscript(self._type(owner, module), index, module)
        path = self._path(expression, module)
        if (known := _known(path)) is not None:
            return known
        match self._lookup(path, 1):
            case (other, alias) if not isinstance(alias, ast.Constant):
                return self._type(alias, other)
            case Source(definitions=[_, *_]) as found:
                return _known(found.name) or type(found.name.rpartition(".")[2], (), {})
        raise TypeError(f"{path} cannot be read")

    def _subscript(self, owner: Any, index: ast.expr | list[ast.expr], module: SourceModule) -> Any:
        inner = index if isinstance(index, list) else [index]
        if owner is typing.Literal:
            return typing.Literal[tuple(map(ast.literal_eval, inner))]
        types = [self._type(each, module) for each in (inner[:1] if owner is typing.Annotated else inner)]
        if owner is not typing.Annotated:
            return owner[tuple(types) if isinstance(index, list) else types[0]]
        match inner[1:]:
            case [ast.Call(func=called, args=args, keywords=keywords)] if self._path(called, module) == _FORM:
                options = {str(each.arg): ast.literal_eval(each.value) for each in keywords}
                return typing.Annotated[types[0], Form(*map(ast.literal_eval, args), **options)]
        if types[0] is Factory:
            raise TypeError("its form cannot be read")
        return types[0]


def _known(path: str) -> Any:
    """Return the type of a dotted path, None where that is not one of Python's, emrun's or torch's."""
    owner, _, name = path.rpartition(".")
    return _TYPES[path] if path in _TYPES else getattr(_HOMES.get(owner), name, None)


def _default(expression: ast.expr | None) -> Any:
    if expression is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNREAD


def _words(target: Source) -> set[str]:
    """Return the names and attributes that a class and its bases use."""
    nodes = [node for definition in target.definitions for node in ast.walk(definition)]
    return {str(getattr(node, "attr", getattr(node, "id", ""))) for node in nodes}


def _is_method(bound: list[Binding]) -> bool:
    """Tell whether a class binds a name to a function once and for all."""
    return len(bound) == 1 and isinstance(bound[0], ast.FunctionDef)
