"""What a config names, found by importing it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from emrun.config.names import NoModule, no_dotted_path, no_member
from emrun.config.signatures import Parameters, parameters_of
from emrun.hook import AbstractHook
from emrun.model import AbstractModel

_CONFIGURE = "_configure_dataset"
"""The method of emloop's datasets that took the keys of their section."""


class Imported:
    """Finds what a config names by importing it: phase two of the check, and what is built.

    Phase one has a subclass that does not import; it says None of what only importing would tell.
    """

    def find(self, path: str) -> Any:
        """Return what a dotted path names.

        Raises:
            LookupError: there is no such thing.
        """
        return locate(path)

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None where only importing it would tell."""
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
        """Return why a target cannot be a `dataset`, a `model`, a `hook`, or called at all; None when it can."""
        if not callable(target):
            return "is no class or function to call; 'import' names other objects"
        if kind == "hook" and not (inspect.isclass(target) and issubclass(target, AbstractHook)):
            return f"{_called(target)} is no subclass of emrun.AbstractHook"
        if kind == "model" and inspect.isclass(target) and not issubclass(target, AbstractModel):
            if "torch.nn.modules.module.Module" in [_called(base) for base in target.__mro__]:
                called = _called(target)
                return f"{called} is a torch.nn.Module; write it under model.module: {{class: {called}, ...}}"
            return f"{_called(target)} is no subclass of emrun.AbstractModel"
        is_configured = kind == "dataset" and inspect.isclass(target) and hasattr(target, _CONFIGURE)
        if is_configured and parameters_of(target) == parameters_of(object) and _CONFIGURE not in _names_of(target):
            hint = "which emrun does not call; rename it to __init__, with the same parameters"
            return f"{_called(target)} has {_CONFIGURE}, {hint}"
        return None

    def streams(self, target: Any) -> list[str] | None:
        """Return the streams of a dataset's class, None when only a built dataset shows them."""
        if not inspect.isclass(target) or hasattr(target, "__getattr__"):
            return None
        used = _names_of(target)  # of attributes that may be streams: then only a built dataset shows what it has
        if any(name in ("setattr", "__setattr__", "__dict__") or name.endswith("_stream") for name in used):
            return None
        return [name.removesuffix("_stream") for name in dir(target) if name.endswith("_stream")] or None


def _called(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


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
            raise (NoModule(module) if found is None else _missing(found, part, path)) from error
    return found


def _missing(owner: Any, part: str, path: str) -> LookupError:
    return no_member(path, getattr(owner, "__name__", str(owner)), getattr(owner, "__file__", None), part, dir(owner))
