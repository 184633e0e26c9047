"""What a config names, read from Python files with `ast`: nothing is imported, no code of a user runs.

Only what stands there literally is taken for known: a class with directly named bases and a plain constructor, a
function without decorators, types made of names. Of everything else `find` says None, and whoever asks leaves it to
the import. A module or class that another module changes while it is imported is the one thing that reading cannot
notice.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import re
import sysconfig
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emrun.config.names import CONFIGURE, no_dotted_path, no_member, no_model, no_module, not_configured
from emrun.config.signatures import UNREAD, Parameters, Share, handed_on, takes_keywords
from emrun.events import misspelt_event, no_event
from emrun.hook import AbstractHook
from emrun.types import Factory, Form

_ANY = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)
_PLAIN_BASES: dict[str, inspect.Signature | None] = {  # their constructors, where a subclass may have none of its own
    "builtins.object": None,
    "abc.ABC": None,
    "typing.Generic": None,
    "torch.nn.Module": _ANY,
    "torch.nn.modules.module.Module": _ANY,
    "torch.optim.Optimizer": _ANY,
    "torch.optim.optimizer.Optimizer": _ANY,
    "torch.utils.data.Dataset": None,
    "emrun.dataset.AbstractDataset": None,
    "emrun.hook._NotesNames": None,
}
_MODULES = frozenset(("torch.nn.Module", "torch.nn.modules.module.Module"))
_WITHOUT_STREAMS = frozenset(("builtins.object", "abc.ABC", "typing.Generic", "emrun.dataset.AbstractDataset"))
_TYPES: dict[str, Any] = {
    **{
        f"builtins.{each.__name__}": each
        for each in (bool, int, float, complex, str, list, tuple, dict, set, frozenset)
    },
    "builtins.object": object,
    "builtins.type": type,
    "emrun.types.Factory": Factory,
    "emrun.hook.AbstractHook": AbstractHook,
    "pathlib.Path": pathlib.Path,
    "os.PathLike": os.PathLike,
}
_TYPING = ("Any", "Union", "Optional", "Literal", "Annotated", "List", "Tuple", "Dict", "Set", "FrozenSet", "Final")
_TYPES.update({f"typing.{name}": getattr(typing, name) for name in _TYPING})
for _name in ("Sequence", "Mapping", "Iterable", "Collection", "Callable", "MutableMapping", "MutableSequence"):
    _TYPES[f"typing.{_name}"] = getattr(typing, _name)
    _TYPES[f"collections.abc.{_name}"] = getattr(collections.abc, _name)
for _path in ("torch.Tensor", "torch.device", "torch.dtype", "torch.nn.Module", "numpy.ndarray"):
    _package, _, _name = _path.rpartition(".")
    _module = {"torch.nn": "torch.nn.modules.module"}.get(_package, _package)
    _TYPES[_path] = type(_name, (), {"__module__": _module})  # stands for the class, which nobody imported

_TRUSTED = "torch"  # what its modules say of themselves in ways that cannot be read changes no constructor
_LAZY = ("emrun", "emrun.hooks", "emrun.datasets")  # import, when asked, what they import for type checkers
_DYNAMIC = frozenset(("globals", "exec", "eval", "vars", "locals", "__import__", "__path__"))
_HARMLESS = frozenset(("__doc__", "__name__", "__qualname__", "__module__", "__version__", "__all__"))
_INNER = frozenset(("__dict__", "__setattr__"))  # with which anything can be changed
_CHANGING = frozenset(("update", "pop", "setdefault", "clear"))
_SPECIAL = frozenset(("__new__", "__signature__", "__init_subclass__", "__class_getitem__"))
_IMPORTERS = frozenset(("sys", "site", "importlib", "pkgutil", "imp"))
_MAX_FILES = 200
_HOMES = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(__file__).parents[1],
)


@dataclass(slots=True)
class _Module:
    """What a file binds at its top, each name with what is bound: a statement, an expression, or None if unsure."""

    name: str
    file: Path | None
    folders: list[str] | None  # of a package
    bound: dict[str, list[ast.AST | str | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    is_dynamic: bool = False
    tree: ast.Module | None = None

    @property
    def package(self) -> str:
        return self.name if self.folders is not None else self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Source:
    """A class or function as it stands in a file.

    Args:
        name: its dotted path.
        signatures: its own and those to which it hands `**kwargs` on; see `Parameters.of_signatures`.
        bases: of a class, the dotted paths of all its bases.
        definitions: of a class, it and its bases as far as they were read.
    """

    name: str
    signatures: tuple[inspect.Signature, ...]
    bases: tuple[str, ...] = ()
    definitions: tuple[ast.ClassDef, ...] = ()


class Sources:
    """Finds what a config names in its source: phase one of the check."""

    def __init__(self) -> None:
        self._modules: dict[str, _Module | None] = {}
        self._found: dict[tuple[str, str], Source | None] = {}
        self._installed: dict[str, bool] = {}
        self._may_find_more = False  # a module that a config names may change where the next ones are looked for

    def find(self, path: str) -> Source | None:
        """Return the class or function that a dotted path names, None where only importing it would tell.

        Raises:
            LookupError: there is no such thing.
        """
        parts = path.split(".")
        if not all(part.isidentifier() for part in parts):
            raise no_dotted_path(path)
        found = self._lookup(parts, path, 0)
        if not isinstance(found, Source) and parts[0] == _TRUSTED:
            return Source(path, (_ANY,))  # whatever it takes, it takes no `Factory`
        return found if isinstance(found, Source) else None

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None where only importing it would tell."""
        module = self._walk_to(package)
        if module is None or module.stars:
            return None
        names = []
        for name, (bound, *_) in module.bound.items():
            is_elsewhere = isinstance(bound, str) and not bound.startswith(f"{package}.")
            is_elsewhere |= module.bound[name] == [None] and name in _for_type_checkers(module)
            if name[:1].isupper() and not is_elsewhere and not isinstance(bound, ast.Constant):
                names.append(name)
        return names

    def parameters(self, target: Source) -> Parameters | None:
        """Return what a class or function takes."""
        found = Parameters.of_signatures(target.signatures or (inspect.Signature(),))
        return found if target.name.startswith(f"{_TRUSTED}.") else replace(found, unknown=UNREAD)

    def refusal(self, target: Source, kind: str) -> str | None:
        """Return why a class cannot be what a config names it for, where its bases tell; else None."""
        bases = {base for base in target.bases if base != "builtins.object"}
        if kind == "model" and bases & _MODULES and "emrun.model.AbstractModel" not in bases:
            return no_model(target.name, is_module=True)
        if kind == "dataset" and target.definitions and not target.signatures:
            methods = _Module("", None, None)
            for definition in target.definitions:
                _bind(methods, definition, direct=True)
            found = methods.bound.get(CONFIGURE, [])
            nodes = [node for definition in target.definitions for node in ast.walk(definition)]
            is_called = any(isinstance(node, ast.Attribute) and node.attr == CONFIGURE for node in nodes)
            if len(found) == 1 and isinstance(found[0], ast.FunctionDef) and not is_called:
                return not_configured(target.name)
        return None

    def mistaken_event(self, target: Source) -> str | None:
        """Return which method of a hook's class is a misspelt event."""
        if AbstractHook not in [_TYPES.get(base) for base in target.bases]:
            return None
        methods: dict[str, list[ast.AST | str | None]] = {}
        for definition in target.definitions:
            inside = _Module("", None, None)
            _bind(inside, definition, direct=True)
            methods = {**inside.bound, **methods}  # a class hides what its bases have
        for name, (method, *others) in methods.items():
            near = misspelt_event(name)
            if near is not None and not others and isinstance(method, ast.FunctionDef) and not method.decorator_list:
                return no_event(target.name.rpartition(".")[2], name, near)
        return None

    def streams(self, target: Source) -> list[str] | None:
        """Return the streams of a dataset's class, None where only a built dataset shows them."""
        names: dict[str, None] = {}
        if not target.definitions or not _WITHOUT_STREAMS.issuperset(_PLAIN_BASES.keys() & target.bases):
            return None
        for definition in target.definitions:
            for node in ast.walk(definition):
                if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                    return None
                name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
                if name in ("setattr", "__setattr__", "__dict__") or name.endswith("_stream"):
                    return None
            for statement in definition.body:
                if isinstance(statement, ast.FunctionDef):
                    names[statement.name] = None
                elif not isinstance(statement, ast.Expr | ast.AnnAssign):
                    return None
        return [name.removesuffix("_stream") for name in names if name.endswith("_stream")] or None

    # Modules

    def _module(self, name: str) -> _Module | None:
        """Return a module that was read, None when it cannot be.

        Raises:
            LookupError: there is no such module.
        """
        if name not in self._modules:
            parent = name.rpartition(".")[0]
            above = self._module(parent) if parent else None
            if parent and (above is None or above.folders is None or (above.is_dynamic and parent != _TRUSTED)):
                self._modules[name] = None
            else:
                module = self._modules[name] = self._read(name, above.folders if above is not None else None)
                if module is not None:
                    for star in module.stars:
                        self._follow(star, module)
        return self._modules[name]

    def _read(self, name: str, folders: Sequence[str] | None) -> _Module | None:
        try:
            if folders is None:
                spec = importlib.util.find_spec(name)
            else:
                spec = importlib.machinery.PathFinder.find_spec(name, folders)
        except (ImportError, ValueError, AttributeError, KeyError):  # what a finder of another kind may say
            return None
        if spec is None:
            raise no_module(name)
        inside = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if spec.origin is None and inside is not None:
            return _Module(name, None, inside)
        if spec.origin is None or not spec.origin.endswith(".py"):
            return None
        module = _Module(name, Path(spec.origin), inside)
        if name == _TRUSTED:  # large, and what it has is made in C
            module.is_dynamic = True
            return module
        try:
            module.tree = ast.parse(module.file.read_bytes() if module.file else b"")
        except (OSError, SyntaxError, ValueError, RecursionError):  # importing it tells in the best way
            return None
        _bind(module, module.tree, direct=True)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
                module.bound.setdefault(node.target.id, []).append(None)
            elif isinstance(node, ast.Global):
                for each in node.names:
                    module.bound.setdefault(each, []).append(None)
            elif _is_dynamic(node) and name.partition(".")[0] != _TRUSTED:
                module.is_dynamic = True
        return module

    def _follow(self, star: str, module: _Module) -> None:
        """Bind what `from star import *` brings; when that cannot be read, nothing about the module is sure."""
        try:
            other = self._walk_to(star)
            names: Any
            (names,) = other.bound["__all__"] if other is not None else [None]
            for each in ast.literal_eval(names):
                module.bound.setdefault(str(each), []).append(f"{star}.{each}")
        except (LookupError, ValueError, TypeError):
            module.is_dynamic = True

    def _walk_to(self, path: str) -> _Module | None:
        """Return the module of a dotted path that is known to be one."""
        module = None
        parts = path.split(".")
        for index in range(len(parts)):
            module = self._module(".".join(parts[: index + 1]))
            if module is None:
                return None
        return module

    def _lookup(self, parts: Sequence[str], path: str, depth: int) -> Any:
        """Return what a dotted path names: a `Source`, what a name is bound to, or None.

        Raises:
            LookupError: there is no such thing.
        """
        if depth > 20:
            return None
        try:
            module = self._module(parts[0])
        except LookupError:
            if depth or self._may_find_more:
                return None
            raise
        if depth == 0 and module is not None and not self._may_find_more:
            self._may_find_more = self._may_change_paths(module)
        for index, part in enumerate(parts[1:], 1):
            if module is None or part.startswith("__"):
                return None
            if module.is_dynamic and module.name != _TRUSTED:
                return None
            rest = parts[index + 1 :]
            bindings = module.bound.get(part, ())
            is_module = bindings == [f"{module.name}.{part}"]  # `from . import part`
            if rest and bindings == [None] and parts[0] == _TRUSTED:  # `del part`: still there for whoever imports it
                is_module = True
            if bindings and not is_module:
                return self._bound(module, part, bindings, rest, path, depth)
            owner = module
            try:
                if owner.folders is None:
                    raise LookupError  # it is no package
                module = self._module(f"{owner.name}.{part}")
            except LookupError:
                if depth or owner.name == _TRUSTED or "__getattr__" in owner.bound:
                    return None
                file = None if owner.file is None else str(owner.file)
                there = owner.bound.keys() - _for_type_checkers(owner)
                raise no_member(path, owner.name, file, part, there) from None
        return None

    def _bound(
        self, module: _Module, name: str, bindings: Sequence[Any], rest: Sequence[str], path: str, depth: int
    ) -> Any:
        """Return what a name of a module is, and what the rest of the path is in it."""
        if len(bindings) != 1 or bindings[0] is None:
            return None
        bound = bindings[0]
        if isinstance(bound, str):  # imported
            return self._lookup([*bound.split("."), *rest], path, depth + 1)
        if rest:
            return None
        if isinstance(bound, ast.ClassDef):
            return self._class(module, bound)
        if isinstance(bound, ast.FunctionDef):
            if bound.decorator_list:
                return None
            key = (module.name, name)
            if key not in self._found:
                self._found[key] = None  # of a function that is annotated with itself
                self._found[key] = Source(f"{module.name}.{name}", (self._signature(bound, module, frozenset()),))
            return self._found[key]
        return (module, bound) if depth else None

    def _may_change_paths(self, module: _Module) -> bool:
        """Tell whether importing a module may let other modules be found: it, or one of the user's that it imports."""
        seen: set[str] = set()
        to_do = [module]
        while to_do:
            each = to_do.pop()
            if each.name in seen or self._is_installed(each.name.partition(".")[0]):
                continue
            seen.add(each.name)
            if (each.tree is None and each.file is not None) or len(seen) > _MAX_FILES:
                return True
            for name in _imports(each):
                top = name.partition(".")[0]
                if top in _IMPORTERS:
                    return True
                try:
                    other = None if self._is_installed(top) else self._walk_to(name)
                except LookupError:  # a name in a module, or a module that is nowhere
                    continue
                if other is not None:
                    to_do.append(other)
        return False

    def _is_installed(self, top: str) -> bool:
        """Tell whether a module without a dot belongs to Python, an installed package or emrun, not to the user."""
        if top not in self._installed:
            try:
                spec = importlib.util.find_spec(top)
            except (ImportError, ValueError, AttributeError):
                spec = None
            file = spec.origin if spec is not None else None
            self._installed[top] = file is not None and (
                file in ("built-in", "frozen") or any(Path(file).is_relative_to(home) for home in _HOMES)
            )
        return self._installed[top]

    # Classes

    def _class(self, module: _Module, definition: ast.ClassDef) -> Source | None:
        key = (module.name, definition.name)
        if key not in self._found:
            self._found[key] = None  # of a class that is its own base, should that happen
            self._found[key] = self._read_class(module, definition)
        return self._found[key]

    def _read_class(self, module: _Module, definition: ast.ClassDef) -> Source | None:
        if definition.decorator_list or definition.keywords:
            return None
        inside = _Module("", None, None)
        _bind(inside, definition, direct=True)
        if inside.is_dynamic or _SPECIAL & inside.bound.keys():
            return None
        own = inside.bound.get("__init__", [])
        if len(own) > 1 or not all(isinstance(each, ast.FunctionDef) and not each.decorator_list for each in own):
            return None
        signatures: list[inspect.Signature] = []
        is_closed = False
        for each in own:
            assert isinstance(each, ast.FunctionDef)
            signatures.append(self._signature(each, module, inside.bound.keys(), bound=True))
            is_closed = not takes_keywords(signatures[0]) or handed_on(each) is not Share.ALL
        bases: list[str] = []
        definitions = [definition]
        literal = 0
        for expression in definition.bases:
            base = self._dotted(expression.value if isinstance(expression, ast.Subscript) else expression, module)
            found = None
            if base is not None and base not in _PLAIN_BASES:
                found = self._lookup(base.split("."), base, 1)
                base = found.name if isinstance(found, Source) else None
            if base is None:
                return None
            bases.append(base)
            if base in _PLAIN_BASES:
                inherited = [plain] if (plain := _PLAIN_BASES[base]) is not None else []
                signatures += [] if is_closed else inherited
                is_closed |= bool(inherited)
                continue
            literal += 1
            if found is None or not found.definitions or literal > 1:
                return None
            signatures += [] if is_closed else found.signatures
            is_closed |= bool(found.signatures)
            bases += found.bases
            definitions += found.definitions
        return Source(f"{module.name}.{definition.name}", tuple(signatures), tuple(bases), tuple(definitions))

    def _signature(
        self, function: ast.FunctionDef, module: _Module, hidden: Any, *, bound: bool = False
    ) -> inspect.Signature:
        """Return the signature of a function, without `self` when it is a method."""
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
        kinds: list[Any] = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
        kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
        found = [
            self._parameter(argument, default, kind, module, hidden)
            for argument, default, kind in zip(positional, defaults, kinds, strict=True)
        ]
        if arguments.vararg is not None:
            found.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
        found += [
            self._parameter(argument, default, inspect.Parameter.KEYWORD_ONLY, module, hidden)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
        if arguments.kwarg is not None:
            found.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(found[1:] if bound and positional else found)

    def _parameter(
        self, argument: ast.arg, default: ast.expr | None, kind: Any, module: _Module, hidden: Any
    ) -> inspect.Parameter:
        value: Any = inspect.Parameter.empty
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                value = UNREAD
        hint = None if argument.annotation is None else self._hint(argument.annotation, module, hidden, 0)
        return inspect.Parameter(argument.arg, kind, default=value, annotation=hint)

    # Names and types

    def _dotted(self, expression: ast.expr, module: _Module, hidden: Any = ()) -> str | None:
        """Return the dotted path that an expression of names stands for, None when it is another or unsure."""
        if isinstance(expression, ast.Attribute):
            owner = self._dotted(expression.value, module, hidden)
            return None if owner is None else f"{owner}.{expression.attr}"
        if not isinstance(expression, ast.Name) or expression.id in hidden or module.is_dynamic:
            return None
        bindings = module.bound.get(expression.id)
        if bindings is None:
            return f"builtins.{expression.id}"
        if len(bindings) != 1 or bindings[0] is None or hasattr(builtins, expression.id):  # which of both, and when
            return None
        bound = bindings[0]
        return bound if isinstance(bound, str) else f"{module.name}.{expression.id}"

    def _hint(self, expression: ast.expr, module: _Module, hidden: Any, depth: int) -> Any:
        """Return the type that an annotation means, or `UNREAD`."""
        if depth > 20:
            return UNREAD
        if isinstance(expression, ast.Constant):
            if expression.value is None or expression.value is Ellipsis:
                return expression.value
            if not isinstance(expression.value, str):
                return UNREAD
            try:
                return self._hint(ast.parse(expression.value, mode="eval").body, module, hidden, depth + 1)
            except (SyntaxError, ValueError):
                return None  # as when it is evaluated: no hint at all
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
            sides = [self._hint(each, module, hidden, depth + 1) for each in (expression.left, expression.right)]
            if any(isinstance(getattr(each, "value", None), str) for each in (expression.left, expression.right)):
                return UNREAD  # `int | "str"` is an error when it is evaluated
            try:
                return UNREAD if UNREAD in sides else typing.Union[sides[0], sides[1]]  # noqa: UP007
            except TypeError:  # `Literal | None`
                return UNREAD
        if isinstance(expression, ast.Subscript):
            return self._subscript(expression, module, hidden, depth)
        path = self._dotted(expression, module, hidden)
        if path is None:
            return UNREAD
        if path in _TYPES:
            return _TYPES[path]
        try:
            found = self._lookup(path.split("."), path, 1)
        except LookupError:
            return UNREAD
        if isinstance(found, tuple):  # an alias
            is_plain = isinstance(found[1], ast.expr) and not isinstance(found[1], ast.Constant)
            return self._hint(found[1], found[0], (), depth + 1) if is_plain else UNREAD
        if isinstance(found, Source) and found.definitions:
            return _TYPES.get(found.name) or type(found.name.rpartition(".")[2], (), {})
        return UNREAD

    def _subscript(self, expression: ast.Subscript, module: _Module, hidden: Any, depth: int) -> Any:
        owner = self._hint(expression.value, module, hidden, depth + 1)
        inner = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
        if not inner:
            return UNREAD
        if owner is typing.Literal:
            values = [each.value if isinstance(each, ast.Constant) else UNREAD for each in inner]
            return UNREAD if UNREAD in values else typing.Literal[tuple(values)]
        if owner is typing.Annotated:
            hint = self._hint(inner[0], module, hidden, depth + 1)
            forms = [form for each in inner[1:] if (form := self._form(each, module)) is not None]
            if hint is UNREAD or (hint is Factory and len(forms) != len(inner) - 1):
                return UNREAD
            return typing.Annotated[hint, forms[0]] if forms else hint
        hints = [self._hint(each, module, hidden, depth + 1) for each in inner]
        if owner in (typing.Callable, collections.abc.Callable):
            return owner
        if owner is UNREAD or UNREAD in hints:
            return UNREAD
        try:
            return owner[tuple(hints) if len(hints) > 1 else hints[0]]
        except TypeError:
            is_own = inspect.isclass(owner) and owner.__module__ == __name__  # stands for a class of somebody's
            return owner if is_own else UNREAD

    def _form(self, expression: ast.expr, module: _Module) -> Form | None:
        if not isinstance(expression, ast.Call) or self._dotted(expression.func, module) != "emrun.types.Form":
            return None
        try:
            return Form(
                *map(ast.literal_eval, expression.args),
                **{str(each.arg): ast.literal_eval(each.value) for each in expression.keywords},
            )
        except (ValueError, TypeError):
            return None


def _bind(module: _Module, node: ast.AST, *, direct: bool) -> None:
    """Note the names that a module or class binds, at its top or, not `direct`, under a condition."""

    def note(name: str, what: ast.AST | str | None) -> None:
        module.bound.setdefault(name, []).append(what if direct else None)

    children: Iterator[ast.AST] = iter(node.body) if isinstance(node, ast.ClassDef) else ast.iter_child_nodes(node)
    for child in children:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            note(child.name, None if isinstance(child, ast.AsyncFunctionDef) else child)
        elif isinstance(child, ast.If) and module.name in _LAZY and ast.unparse(child.test) == "TYPE_CHECKING":
            _bind(module, child, direct=True)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                note(
                    alias.asname or alias.name.partition(".")[0],
                    alias.name if alias.asname else alias.name.partition(".")[0],
                )
        elif isinstance(child, ast.ImportFrom):
            origin = _origin(child, module)
            for alias in child.names:
                if alias.name == "*" and direct and origin:
                    module.stars.append(origin)
                elif alias.name == "*":
                    module.is_dynamic = True
                else:
                    note(alias.asname or alias.name, f"{origin}.{alias.name}" if origin else None)
        elif isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
            note(child.targets[0].id, child.value)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if child.value is not None:
                note(child.target.id, child.value)
        elif isinstance(child, ast.Name):
            if not isinstance(child.ctx, ast.Load):
                note(child.id, None)
        elif isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        else:
            name = getattr(child, "name", None) or getattr(child, "rest", None)  # of an `except` or a `case`
            if isinstance(name, str):
                note(name, None)
            _bind(module, child, direct=False)


def _origin(statement: ast.ImportFrom, module: _Module) -> str:
    """Return the module that a `from` statement imports from, empty when it cannot be told."""
    if not statement.level:
        return statement.module or ""
    package = module.package.split(".") if module.name else []
    above = package[: len(package) - statement.level + 1]
    return ".".join([*above, *([statement.module] if statement.module else [])]) if above else ""


def _is_dynamic(node: ast.AST) -> bool:
    """Tell whether a node may change what the names of its module mean."""
    if isinstance(node, ast.Name):
        return node.id in _DYNAMIC or node.id == "update_wrapper"
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if isinstance(node.ctx, ast.Load):
            is_own = owner in ("self", "object", "super()")
            if node.attr in _CHANGING and owner.endswith(("__annotations__", "__kwdefaults__")):
                return True
            return (owner, node.attr) == ("sys", "modules") or (node.attr in _INNER and not is_own)
        is_special = node.attr[:2] == node.attr[-2:] == "__" and node.attr not in _HARMLESS
        return owner != "self" and (is_special or node.attr.endswith("_stream"))
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return ast.unparse(node.value).endswith(("__annotations__", "__kwdefaults__"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return not (node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "self")
    if isinstance(node, ast.Call):  # `update_wrapper(f, g)` and `wraps(g)(f)` without an @ lend f the signature of g
        called = ast.unparse(node.func)
        return called.endswith(".update_wrapper") or bool(re.match(r"(functools\.)?wraps\(", called))
    return False


def _for_type_checkers(module: _Module) -> set[str]:
    """Return the names that a module imports only under `if TYPE_CHECKING:`, which are not there when it runs."""
    blocks = [each for each in (module.tree.body if module.tree is not None else ()) if isinstance(each, ast.If)]
    statements = [each for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for each in block.body]
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for each in imports for alias in each.names}


def _imports(module: _Module) -> Iterator[str]:
    """Yield all that a module imports anywhere, as dotted paths of what may be modules."""
    for node in ast.walk(module.tree) if module.tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (origin := _origin(node, module)):
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names if alias.name != "*")
