"""Public names of a package that are imported when they are first asked for, so that importing emrun stays light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds each name in its home.

    Args:
        package: the name of the package whose names these are.
        homes: name -> the module that defines it, relative to the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(f"{package}.{homes[name]}", fromlist=[name]), name)

    return __getattr__
