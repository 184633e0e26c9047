"""Reads the names that modules bind at their top level from their files, with `ast`; nothing is imported.

A file whose text shows that it may rewrite names, for example by a call of `globals`, is skipped completely: its
names are known only after an import. Reading cannot notice one thing: that a module changes another module while it is
imported.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from emrun.config.names import INSTALLED, NoModule

TORCH = "torch"

Binding = ast.AST | str | None
"""What a name is bound to: a definition, an expression, the dotted path of an import, or None if unknown."""

_REWRITES = re.compile(
    rb"""
      (?<![.\w]) (?: globals | locals | vars | exec | eval | __import__ ) \s* \(
    | (?<![.\w]) (?: setattr | delattr ) \s* \( (?! self\b )
    | \b __ (?: setattr | path ) __ | \b sys \s* \. \s* modules \b
    | \b AbstractModel \s* (?: \. \s* register | \s as ) \b
    | \b update_wrapper \b | (?<! @ ) (?<! @functools\. ) \b wraps \s* \(
    | (?<! \bself ) \. \s* __ (?: init | new | call | getattr (?: ibute )? | bases | dict | signature | wrapped ) __
      (?! \s* \( )
    | \. \s* __ (?: code | (?:kw)?defaults | annotations ) __
    | (?<! \bself ) \. \s* \w+_stream \s* = (?!=)
    """,
    re.VERBOSE,
)
_TRUSTED = frozenset((TORCH, "emrun"))  # they do not rewrite constructors, whatever their files contain
_LAZY = ("emrun", "emrun.hooks", "emrun.datasets")  # import lazily what their `__init__.pyi` imports
_IMPORTERS = frozenset(("sys", "site", "importlib", "pkgutil", "imp"))


@dataclass(frozen=True, slots=True)
class SourceModule:
    """A module and the names that it binds.

    Args:
        name: the dotted path.
        file: the file; None for a folder without `__init__.py`.
        folders: for a package, the folders of its submodules.
        bound: name -> everything that the name is bound to.
    """

    name: str
    file: Path | None
    folders: Sequence[str] | None
    bound: dict[str, list[Binding]]


class SourceModules:
    """Reads modules, each module once."""

    def __init__(self) -> None:
        self._modules: dict[str, SourceModule | None] = {}
        self.may_find_more = False
        """Whether importing one of the modules may change where other modules are looked for."""

    def read(self, name: str) -> SourceModule | None:
        """Return a module, None where only an import could find its names.

        Raises:
            LookupError: the module does not exist.
        """
        if name not in self._modules:
            parent = name.rpartition(".")[0]
            package = self.read(parent) if parent else None
            if parent and package is None:
                return None
            self._modules[name] = self._read(name, package)
        return self._modules[name]

    def _read(self, name: str, package: SourceModule | None) -> SourceModule | None:
        try:
            if package is None:
                spec = importlib.util.find_spec(name)
            else:
                spec = importlib.machinery.PathFinder.find_spec(name, package.folders or ())
        except (ImportError, ValueError, AttributeError, KeyError):  # custom finders may raise these
            return None
        if spec is None:
            raise NoModule(name)

        # the names that its statements bind
        file = Path(spec.origin) if spec.has_location and spec.origin else None
        module = SourceModule(name, file, spec.submodule_search_locations, {})
        if name == TORCH or (spec.origin is None and module.folders):  # torch is large, and its names come from C
            return module
        if file is None or file.suffix != ".py":
            return None
        try:
            text = (file.with_suffix(".pyi") if name in _LAZY else file).read_bytes()
            tree = ast.parse(text)
            module.bound.update(bound_in(tree.body, spec.parent or ""))
        except (OSError, SyntaxError, ValueError, RecursionError, ImportError):  # an import reports these best
            return None
        top = name.partition(".")[0]
        if top in _TRUSTED:
            return module
        for node in ast.walk(tree):
            names = node.names if isinstance(node, ast.Global) else []
            if isinstance(node, ast.NamedExpr):
                names = [node.target.id]
            for bound_name in names:
                module.bound.setdefault(bound_name, []).append(None)
        if not self.may_find_more and not _is_installed(top):
            self.may_find_more = any(
                top_level in _IMPORTERS or not _is_installed(top_level) for top_level in _imported(tree, top)
            )
        return None if "*" in module.bound or _REWRITES.search(text) else module


def _imported(tree: ast.Module, this_module: str) -> Iterator[str]:
    """Yield the top-level names of all imports in a module; `this_module` is that of the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield this_module if node.level else str(node.module).partition(".")[0]


def _is_installed(top: str) -> bool:
    """Return whether a top-level module belongs to Python, an installed package or emrun."""
    files = (home / name for home in INSTALLED for name in (top, f"{top}.py"))
    return top in _TRUSTED or top in sys.stdlib_module_names or any(file.exists() for file in files)


def bound_in(body: Iterable[ast.stmt], package: str = "") -> dict[str, list[Binding]]:
    """Return the names that the statements of a module or class bind -> everything that each name is bound to.

    Args:
        body: the statements.
        package: the package that relative imports start from.

    Raises:
        ImportError: a relative import leads beyond the top-level package.
    """
    bound: dict[str, list[Binding]] = {}
    for statement in body:
        for name, what in _bindings(statement, package):
            if what is None or what not in bound.setdefault(name, []):
                bound.setdefault(name, []).append(what)
    return bound


def _bindings(statement: ast.stmt, package: str) -> Iterator[tuple[str, Binding]]:
    match statement:
        case ast.ClassDef() | ast.FunctionDef():
            yield statement.name, statement
        case ast.Import():
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
        case ast.ImportFrom():
            origin = statement.module or ""
            if statement.level:
                origin = importlib.util.resolve_name("." * statement.level + origin, package)
            for alias in statement.names:
                yield alias.asname or alias.name, origin if alias.name == "*" else f"{origin}.{alias.name}"
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            if statement.value is not None:
                yield name, statement.value
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
            pass
        case _:
            for node in ast.walk(statement):
                if isinstance(node, ast.alias):
                    yield node.asname or node.name.partition(".")[0], None
                elif not isinstance(getattr(node, "ctx", None), ast.Load):
                    names = (getattr(node, kind, None) for kind in ("id", "name", "rest"))
                    yield from ((name, None) for name in names if isinstance(name, str))
