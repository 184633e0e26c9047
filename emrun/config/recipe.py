"""The one rule that turns a config into objects: a mapping with a `class` key is called with its other keys."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from emrun.config.names import CONFIGURE, no_dotted_path, no_member, no_model, no_module, not_configured
from emrun.config.signatures import Parameters, parameters_of
from emrun.config.yaml_tree import Node
from emrun.errors import ArgumentError, ConfigError, HookError, MissingExtra, Problem
from emrun.events import check_events
from emrun.hook import AbstractHook
from emrun.model import AbstractModel
from emrun.types import Factory, Form
from emrun.wording import did_you_mean

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'|'(\w+)' is an invalid keyword argument")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a `class` or `import` form names, found and checked against its signature, but not called yet."""

    target: Any
    node: Node
    key: str
    is_import: bool = False
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    form: Form | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, supplied: Mapping[str, Any]) -> Any:
        """Call it.

        Args:
            supplied: arguments that it gets, and so does whatever is below it, where it has parameters of that name.

        Raises:
            ConfigError: it finds that an argument is wrong.
            BaseException: whatever else it raises, with a note that tells where it stands in the config.
        """
        if self.is_import and self.form is None:
            return self.target
        args = build(self.args, supplied)
        kwargs = {name: build(value, supplied) for name, value in self.kwargs.items()}
        kwargs.update({name: supplied[name] for name in self.takes})
        if self.form is None:
            return self.call(*args, **kwargs)
        options = build(self.options, supplied)
        if self.is_import:
            return Factory(self.target, options=options, is_import=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        functools.update_wrapper(call, self.target, assigned=(), updated=())  # for its signature
        call.__qualname__ = getattr(self.target, "__qualname__", str(self.target))
        return Factory.of(call, args, kwargs, options)

    def wants(self, name: str) -> bool:
        """Tell whether it, or anything below it, takes a supplied argument."""
        return name in self.takes or any(each.wants(name) for each in _recipes((self.args, self.kwargs, self.options)))

    def is_of_classes(self) -> bool:
        """Tell whether it, and all below it, calls nothing but classes."""
        is_class = self.is_import or inspect.isclass(self.target)
        return is_class and all(each.is_of_classes() for each in _recipes((self.args, self.kwargs, self.options)))

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and tell where it stands in the config when that fails."""
        try:
            return self.target(*args, **kwargs)
        except ArgumentError as error:
            node = self.node.get(error.argument)
            position = node.position if node else self.node.key_position
            message = self.node.censored(error.message)
            raise ConfigError(Problem(position, f"{self.key}.{error.argument}", message)) from error
        except (HookError, MissingExtra) as error:
            message = self.node.censored(str(error))
            raise ConfigError(Problem(self.node.key_position, self.key, message)) from error
        except BaseException as error:
            problem = self._refused(error, kwargs)
            if problem is not None:
                raise ConfigError(problem) from error
            error.add_note(f"while building {self.key} ({self.node.key_position})")
            raise

    def _refused(self, error: BaseException, kwargs: Mapping[str, Any]) -> Problem | None:
        """Return the problem when an error says that an argument is unknown which only `**kwargs` took."""
        found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
        name = next(filter(None, found.groups()), "") if found is not None else ""
        node = self.node.get(name)
        if node is None or name not in kwargs:
            return None
        parameters = parameters_of(self.target)
        named = list(parameters.named) if parameters is not None else []
        if name in named:
            return None
        hint = did_you_mean(name, [each for each in named if each not in self.takes])
        message = self.node.censored(f"unknown argument {name!r}{hint} ({error})")
        return Problem(node.key_position, self.key, message)


def build(value: Any, supplied: Mapping[str, Any]) -> Any:
    """Build all recipes in a value."""
    if isinstance(value, Recipe):
        return value.build(supplied)
    if isinstance(value, dict):
        return {key: build(child, supplied) for key, child in value.items()}
    if isinstance(value, list):
        return [build(child, supplied) for child in value]
    return value


def _recipes(value: Any) -> Iterator[Recipe]:
    """Yield the recipes in a value, but not those inside of them."""
    if isinstance(value, Recipe):
        yield value
    elif isinstance(value, dict | list | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _recipes(child)


class Imported:
    """Finds what a config names by importing it: phase two of the check, and what is built."""

    def find(self, path: str) -> Any:
        """Return what a dotted path names; see `locate`."""
        return locate(path)

    def classes(self, package: str) -> list[str]:
        """Return the names of the classes that a package defines."""
        members = vars(importlib.import_module(package))
        return [
            name
            for name, each in members.items()
            if inspect.isclass(each) and not name.startswith("_") and f"{each.__module__}.".startswith(f"{package}.")
        ]

    def parameters(self, target: Any) -> Parameters | None:
        """Return what a target takes, None when that cannot be known."""
        return parameters_of(target)

    def refusal(self, target: Any, kind: str) -> str | None:
        """Return why a target cannot be what a config names it for, None when it can."""
        if not callable(target):
            return "is no class or function to call; 'import' names other objects"
        if kind == "hook" and not (inspect.isclass(target) and issubclass(target, AbstractHook)):
            return f"{_called(target)} is no subclass of emrun.AbstractHook"
        if kind == "model" and inspect.isclass(target) and not issubclass(target, AbstractModel):
            is_module = "torch.nn.modules.module.Module" in [_called(base) for base in target.__mro__]
            return no_model(_called(target), is_module=is_module)
        if kind == "dataset" and inspect.isclass(target) and hasattr(target, CONFIGURE):
            takes_nothing = parameters_of(target) == parameters_of(object)
            return not_configured(_called(target)) if takes_nothing and CONFIGURE not in _names_of(target) else None
        return None

    def mistaken_event(self, target: Any) -> str | None:
        """Return what is wrong with the events of a hook's class."""
        try:
            check_events(target)
        except HookError as error:
            return str(error)
        return None

    def streams(self, target: Any) -> list[str] | None:
        """Return the streams of a dataset's class, None when only a built dataset shows them."""
        if not inspect.isclass(target) or hasattr(target, "__getattr__") or _may_make_streams(target):
            return None
        return [name.removesuffix("_stream") for name in dir(target) if name.endswith("_stream")] or None


def _called(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def _may_make_streams(dataset: type) -> bool:
    """Tell whether a class's code names attributes that may be streams; then only a built dataset shows what it has."""
    names = _names_of(dataset)
    return any(name in ("setattr", "__setattr__", "__dict__") or name.endswith("_stream") for name in names)


def _names_of(dataset: type) -> set[str]:
    """Return the names that a class's code uses, that of `AbstractDataset` left out."""
    classes = [cls for cls in dataset.__mro__ if _called(cls) != "emrun.dataset.AbstractDataset"]
    functions = [each for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    return {name for function in functions for name in _names_in(function.__code__)}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def locate(path: str) -> Any:
    """Import what a dotted path names.

    Raises:
        LookupError: there is no such module, or it has no such name; the message says where a module was found.
        BaseException: what importing the module raises.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise no_dotted_path(path)
    found: Any = None
    for index, part in enumerate(parts):
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        if found is not None and not inspect.ismodule(found):
            raise _missing(found, part, path)
        module = ".".join(parts[: index + 1])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, but something that it imports is not
            raise (no_module(module) if found is None else _missing(found, part, path)) from error
    return found


def _missing(owner: Any, part: str, path: str) -> LookupError:
    return no_member(path, getattr(owner, "__name__", str(owner)), getattr(owner, "__file__", None), part, dir(owner))
