"""Finds the classes, functions and objects that a config names by importing them."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from emrun.base.errors import fitting_torchvision
from emrun.base.types import takes_path
from emrun.base.wording import from_here, sure
from emrun.config.names import NoModule, no_member, parts_of
from emrun.config.signatures import Parameters, parameters_of
from emrun.hook import AbstractHook
from emrun.model import AbstractModel

_CONFIGURE = "_configure_dataset"
"""The method of emloop's datasets that received the keys of their section."""


class Imported:
    """Finds the objects that a config names by importing them: for phase two of the check, and for building.

    The finder of phase one is a subclass that imports nothing and returns None where only an import could find
    an object.
    """

    def find(self, path: str) -> Any:
        """Return the object that a dotted path names.

        Raises:
            LookupError: the object does not exist.
        """
        return locate(path)

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None where only an import of it could find them."""
        return [
            name
            for name, member in vars(importlib.import_module(package)).items()
            if inspect.isclass(member)
            and not name.startswith("_")
            and f"{member.__module__}.".startswith(f"{package}.")
        ]

    def parameters(self, target: Any) -> Parameters | None:
        """Return the parameters of a target, None when they cannot be known."""
        return parameters_of(target)

    def refusal(self, target: Any, kind: str) -> str | None:
        """Return why a target cannot be called, or not as a `dataset`, `model` or `hook`; None when it can."""
        if not callable(target):
            return "'class' must name a class or a function; use 'import' for any other object"
        if kind == "hook" and not (inspect.isclass(target) and issubclass(target, AbstractHook)):
            return f"{_called(target)} is not a subclass of emrun.AbstractHook"
        if kind == "model" and inspect.isclass(target) and not issubclass(target, AbstractModel):
            if "torch.nn.modules.module.Module" in [_called(base) for base in target.__mro__]:
                called = _called(target)
                return f"{called} is a torch.nn.Module; write it under model.module: {{class: {called}, ...}}"
            return f"{_called(target)} is not a subclass of emrun.AbstractModel"
        is_configured = kind == "dataset" and inspect.isclass(target) and hasattr(target, _CONFIGURE)
        if is_configured and parameters_of(target) == parameters_of(object) and _CONFIGURE not in _names_of(target):
            return (
                f"{_called(target)} has {_CONFIGURE}, which emrun does not call; rename it to __init__, with "
                "the same parameters"
            )
        return None

    def streams(self, target: Any) -> list[str] | None:
        """Return the streams of a dataset's class, None when only a built dataset shows its streams."""
        if not inspect.isclass(target) or hasattr(target, "__getattr__"):
            return None
        names_in_code = _names_of(target)  # the code may add streams to the object, which only a built dataset shows
        if any(name in ("setattr", "__setattr__", "__dict__") or name.endswith("_stream") for name in names_in_code):
            return None
        names = [name.removesuffix("_stream") for name in dir(target) if name.endswith("_stream")]
        return [name for name in names if not takes_path(name, getattr(target, f"{name}_stream"))] or None


def _called(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def _names_of(dataset: type) -> set[str]:
    """Return the names that the code of a class and its bases uses, except the code of `AbstractDataset`."""
    classes = [cls for cls in dataset.__mro__ if _called(cls) != "emrun.dataset.AbstractDataset"]
    functions = [member for cls in classes for member in vars(cls).values() if inspect.isfunction(member)]
    return {name for function in functions for name in _names_in(function.__code__)}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def locate(path: str) -> Any:
    """Import the object that a dotted path names.

    Raises:
        LookupError: the module does not exist, or does not have the name; the message says where a module was found.
        BaseException: the error that importing the module raises.
    """
    parts = parts_of(path)
    target: Any = None
    for index, part in enumerate(parts):
        if target is not None and hasattr(target, part):
            target = getattr(target, part)
            continue
        if target is not None and not inspect.ismodule(target):
            raise _missing(target, part, path)
        module = ".".join(parts[: index + 1])
        try:
            with fitting_torchvision(path):
                target = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, but a module that it imports does not
            raise (NoModule(module) if target is None else _missing(target, part, path)) from error
    return target


_PACKAGES = {"sklearn": "scikit-learn", "PIL": "Pillow", "cv2": "opencv-python", "yaml": "PyYAML"}
"""Module -> the package that has it, where the names differ."""


def not_installed(error: ModuleNotFoundError, path: str) -> str:
    """Return what to do if a module that a dotted path names imports one that does not exist."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{path} imports {error.name!r} in {from_here(Path(place.filename))}:{place.lineno}, which is "
        f"{instead_of(error)}"
    )


def instead_of(error: ModuleNotFoundError) -> str:
    """Return that a module is not installed, and what to install or to write instead."""
    top = str(error.name).partition(".")[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    near = sure(top, [file.stem for file in Path(place.filename).parent.glob("*.py")])
    advice = f": pip install {_PACKAGES.get(top, top)}; or, if it is a module of yours, put it beside the others"
    return f"not installed{f'; did you mean {near!r}?' if near else advice}"


def _missing(owner: Any, part: str, path: str) -> LookupError:
    return no_member(path, getattr(owner, "__name__", str(owner)), getattr(owner, "__file__", None), part, dir(owner))
