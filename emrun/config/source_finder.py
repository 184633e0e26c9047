"""Finds the classes and functions that a config names in Python files, without importing or running user code.

The result is a stand-in: a class or function that Python builds from the definition alone, to be inspected and never
called. Only literal definitions have one: classes with directly named bases and a plain constructor, and functions
without decorators. For everything else `find` returns None, and the check is left to the import.
"""

from __future__ import annotations

import abc
import ast
import builtins
import collections.abc
import contextlib
import os
import pathlib
import typing
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import emrun.base.types
from emrun.base.types import AtLeast, Form, Units
from emrun.config.import_finder import Imported
from emrun.config.names import NoModule, no_member, parts_of
from emrun.config.signatures import UNREAD, Parameters, ReadLater, anything, parameters_of
from emrun.config.source_modules import TORCH, Binding, SourceModule, SourceModules, bound_in
from emrun.hook import EVENTS, AbstractHook
from emrun.model import AbstractModel


def _class_of(path: str, **members: Any) -> type:
    """Return an empty class that stands for the class of a dotted path."""
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": module, **members})


_MODULE = _class_of("torch.nn.modules.module.Module", __init__=anything, more=UNREAD)
_OPTIMIZER = _class_of("torch.optim.optimizer.Optimizer", __init__=anything)
_BASES: dict[str, type] = {
    "builtins.object": object,
    "abc.ABC": abc.ABC,
    "typing.Generic": _class_of("typing.Generic"),
    "torch.nn.Module": _MODULE,
    "torch.nn.modules.module.Module": _MODULE,
    "torch.optim.Optimizer": _OPTIMIZER,
    "torch.optim.optimizer.Optimizer": _OPTIMIZER,
    "torch.utils.data.Dataset": _class_of("torch.utils.data.dataset.Dataset", more=UNREAD),
    "emrun.hook.AbstractHook": AbstractHook,
    "emrun.model.AbstractModel": AbstractModel,
}
"""Base classes that are not read from files -> their stand-ins; `more=UNREAD` means that there are more members."""
_TYPES: dict[str, Any] = {
    **{
        f"{home.__name__}.{name}": member
        for home in (builtins, typing, collections.abc, emrun.base.types)
        for name, member in vars(home).items()
        if not name.startswith("_")  # a private class of `typing` warns when it is compared
    },
    **{path: _class_of(path) for path in ("torch.Tensor", "torch.device", "torch.dtype", "numpy.ndarray")},
    **_BASES,
    "pathlib.Path": pathlib.Path,
    "os.PathLike": os.PathLike,
}
_MARKS = (Form, Units, AtLeast)  # what a type may call
_NO_BASES = frozenset(cls for cls in _TYPES.values() if isinstance(cls, type)) - frozenset(_BASES.values())
_RUNNING = frozenset(("__init_subclass__", "__class_getitem__"))  # would run when a class is created or subscripted
_SURE = _RUNNING | {"__init__", "__new__", "__getattr__", "__getattribute__"}  # must be literal
_MAKES_NO_STREAM = frozenset(("property", "staticmethod", "classmethod"))


class Unimported(Imported):
    """Finds the objects that a config names in source files: for phase one of the check."""

    def __init__(self) -> None:
        self._modules = SourceModules()
        self._stand_ins = dict(_TYPES)

    def find(self, path: str) -> Any:
        """Return a stand-in for the object that a dotted path names, None where only an import could find it.

        Raises:
            LookupError: the object does not exist.
        """
        parts_of(path)
        target = self._lookup(path)
        if isinstance(target, LookupError) and not (isinstance(target, NoModule) and self._modules.may_find_more):
            raise target
        if isinstance(target, type | FunctionType):
            return target
        return anything if path.startswith(f"{TORCH}.") else None  # its parameters are unknown, but none is a `Factory`

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None when they cannot be read."""
        module = self._modules.read(package)
        if module is None or "*" in module.bound:
            return None
        return [
            name
            for name, (bound, *_) in module.bound.items()
            if name[:1].isupper() and not isinstance(bound, ast.Constant)
            if not isinstance(bound, str) or bound.startswith(f"{package}.")
        ]

    def parameters(self, target: Any) -> Parameters | None:
        """Return the parameters of a class or function."""
        parameters = parameters_of(target, self._hint)
        is_known = target is anything or target.__module__.startswith(f"{TORCH}.")
        return parameters if parameters is None or is_known else replace(parameters, unknown=UNREAD)

    def refusal(self, target: Any, kind: str) -> str | None:
        """Return why a class cannot be a `dataset`, `model` or `hook`, None when it can or that is not known."""
        return None if target is anything else super().refusal(target, kind)

    def streams(self, target: Any) -> list[str] | None:
        """Return the streams of a dataset's class, None when only a built dataset shows its streams."""
        members = [member for base in getattr(target, "__mro__", ()) for member in vars(base).values()]
        return None if any(member is UNREAD for member in members) else super().streams(target)

    # Names

    def _lookup(self, path: str) -> Any:
        """Return what a dotted path names: a stand-in, an expression with its module, a `LookupError`, or None."""
        if path not in self._stand_ins:
            self._stand_ins[path] = None  # stops cycles: a class as its own base, an import cycle
            with contextlib.suppress(TypeError, ValueError, SyntaxError, RecursionError):  # not literal, or not Python
                self._stand_ins[path] = self._member(path)
        return self._stand_ins[path]

    def _member(self, path: str) -> Any:
        module: SourceModule | None = None
        parts = path.split(".")
        for index, part in enumerate(parts):
            rest = parts[index + 1 :]
            if module is not None:
                bound = module.bound.get(part) or module.bound.get("*", [])
                is_module = bound in ([], [f"{module.name}.{part}"]) or (rest and parts[0] == TORCH)
                if not is_module:
                    return self._meaning(module, part, bound, rest)
            try:
                inner = None if part.startswith("__") else self._modules.read(".".join(parts[: index + 1]))
            except LookupError as error:
                if module is None:
                    return error
                file = str(module.file) if module.file else None
                is_sure = parts[0] != TORCH and "__getattr__" not in module.bound
                return no_member(path, module.name, file, part, module.bound) if is_sure else None
            if inner is None:
                return None
            module = inner
        return None

    def _meaning(self, module: SourceModule, name: str, bound: list[Binding], rest: Sequence[str]) -> Any:
        """Return what a name of a module, followed by the rest of the path, refers to."""
        match bound:
            case [str() as imported]:
                named = imported if name in module.bound else f"{imported}.{name}"
                target = self._lookup(".".join((named, *rest)))
                return None if isinstance(target, LookupError) else target
            case [ast.ClassDef(decorator_list=[], keywords=[]) as definition] if not rest:
                return self._class(module, definition)
            case [ast.FunctionDef(decorator_list=[]) as definition] if not rest:
                return self._annotated(_made(_literal(definition), module), definition, module)
            case [ast.expr() as expression] if not rest:
                return module, expression
        return None

    def _path(self, expression: ast.expr, module: SourceModule) -> str:
        """Return the dotted path that an expression of names stands for.

        Raises:
            TypeError: the expression has another form, or a name is ambiguous.
        """
        match expression:
            case ast.Attribute():
                return f"{self._path(expression.value, module)}.{expression.attr}"
            case ast.Name(id=name):
                match module.bound.get(name, [f"builtins.{name}"]):
                    case [ast.AST() | str() as bound] if name not in module.bound or not hasattr(builtins, name):
                        return bound if isinstance(bound, str) else f"{module.name}.{name}"
        raise TypeError

    # Stand-ins

    def _class(self, module: SourceModule, definition: ast.ClassDef) -> type:
        """Return a class with the methods of a definition; its other members exist, but may have other values.

        Raises:
            TypeError: the definition is not literal.
        """
        members = bound_in(definition.body)
        methods: dict[str, ast.FunctionDef] = {}
        others: dict[str, Any] = {}
        for name, bound in members.items():
            match bound:
                case [ast.FunctionDef(decorator_list=[]) as method] if name not in _RUNNING:
                    methods[name] = _literal(method)
                case _ if name in _SURE:
                    raise TypeError(name)
                case _ if not name.startswith("__"):
                    value = property() if all(map(_makes_no_stream, bound)) else _value(bound)
                    others[name] = anything if name in EVENTS else value
        bases = [self._base(expression, module) for expression in definition.bases]
        docstring = ast.Expr(ast.Constant(ast.get_docstring(definition, clean=False)))
        base = ast.Starred(ast.Name("bases", ast.Load()), ast.Load())
        tree = ast.fix_missing_locations(ast.ClassDef(definition.name, [base], [], [docstring], []))
        tree.body += methods.values()
        stand_in: type = _made(tree, module, bases=bases)
        for name, value in others.items():
            setattr(stand_in, name, value)
        for name in _SURE & methods.keys():
            function = getattr(vars(stand_in)[name], "__func__", vars(stand_in)[name])
            self._annotated(function, methods[name], module, frozenset(members))
        return stand_in

    def _base(self, expression: ast.expr, module: SourceModule) -> type:
        named = expression.value if isinstance(expression, ast.Subscript) else expression
        base = self._lookup(self._path(named, module))
        if not isinstance(base, type) or base in _NO_BASES:
            raise TypeError("not a class, or not readable")
        return base

    @staticmethod
    def _annotated(
        function: FunctionType, definition: ast.FunctionDef, module: SourceModule, hidden: frozenset[str] = frozenset()
    ) -> FunctionType:
        """Return a function with its annotations, to be read later; `hidden` are the names of its class."""
        arguments = (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)
        function.__annotations__ = {
            argument.arg: ReadLater(argument.annotation, module.name, hidden)
            for argument in arguments
            if argument.annotation is not None
        }
        return function

    # Types

    def _hint(self, later: ReadLater) -> Any:
        """Return the type that an annotation stands for, or `UNREAD`."""
        try:
            module = self._modules.read(later.module)
            if module is None:
                return UNREAD
            inside = replace(module, bound={**module.bound, **{name: [None] for name in later.hidden}})
            return self._type(later.annotation, inside)
        except Exception:  # a meaningless type can raise any error
            return UNREAD

    def _type(self, expression: ast.expr, module: SourceModule) -> Any:
        """Return the type that an expression stands for.

        Raises:
            TypeError: a name in the expression cannot be read.
            Exception: the expression is not a meaningful type.
        """
        match expression:
            case ast.Constant(value=str() as text):
                return self._type(ast.parse(text, mode="eval").body, module)
            case ast.Constant(value=value) if value is None or value is ...:
                return value
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                if any(isinstance(getattr(side, "value", None), str) for side in (left, right)):
                    raise TypeError("a string has no operator |")
                return self._type(left, module) | self._type(right, module)
            case ast.Call(func=called, args=args, keywords=keywords) if (mark := self._type(called, module)) in _MARKS:
                return mark(
                    *map(ast.literal_eval, args),
                    **{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords},
                )
            case ast.Subscript(value=owner, slice=index):
                outer = self._type(owner, module)
                if outer is typing.Literal:
                    return outer[ast.literal_eval(index)]
                if isinstance(index, ast.Tuple):
                    return outer[tuple(self._type(part, module) for part in index.elts)]
                return outer[self._type(index, module)]
        match self._lookup(self._path(expression, module)):
            case (other, alias) if not isinstance(alias, ast.Constant):
                return self._type(alias, other)
            case None | tuple() | LookupError() | FunctionType():
                raise TypeError("not a type, or not readable")
            case target:
                return target


def _made(definition: ast.ClassDef | ast.FunctionDef, module: SourceModule, **names: Any) -> Any:
    """Return the class or function that Python builds from a literal definition.

    Raises:
        TypeError, ValueError, SyntaxError: Python rejects the definition.
    """
    namespace = {"__name__": module.name, "UNREAD": UNREAD, **names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python shows the warning when the module is imported
        code = compile(ast.Module([definition], []), str(module.file), "exec", annotations.compiler_flag, True)
    exec(code, namespace)
    return namespace[definition.name]


def _literal(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function with `UNREAD` instead of defaults that are not literal."""
    for defaults in (function.args.defaults, function.args.kw_defaults):
        for index, default in enumerate(defaults):
            if default is not None and _value([default]) is UNREAD:
                defaults[index] = ast.copy_location(ast.Name("UNREAD", ast.Load()), default)
    return function


def _value(bound: Sequence[Any]) -> Any:
    """Return the literal that the only one of some expressions stands for, or `UNREAD`."""
    try:
        (expression,) = bound
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNREAD


def _makes_no_stream(bound: Binding) -> bool:
    """Return whether the decorators of a method, such as `@property`, show that it adds no stream to a dataset."""
    decorators = getattr(bound, "decorator_list", None) or [None]
    names = [node.value if isinstance(node, ast.Attribute) else node for node in decorators]  # `@size.setter`
    property_name = getattr(bound, "name", None)
    return all(isinstance(node, ast.Name) and node.id in {*_MAKES_NO_STREAM, property_name} for node in names)
