"""Public names of a package that are imported when they are first asked for, so that importing emrun stays light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's `__getattr__`, which finds each name in its home, and its `__dir__`, which lists the names.

    Args:
        package: the name of the package whose names these are.
        homes: name -> the module that defines it, relative to the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(f"{package}.{homes[name]}", fromlist=[name]), name)

    def __dir__() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*homes, *(name for name in own if name.startswith("__") and name.endswith("__"))})

    return __getattr__, __dir__
