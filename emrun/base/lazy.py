"""Public names of a package that are imported on first use, so that `import emrun` stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` that imports each name from its module, and a `__dir__` that lists the names.

    Args:
        package: the package that offers the names.
        homes: name -> the module that defines the name, relative to the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(f"{package}.{homes[name]}", fromlist=[name]), name)

    def __dir__() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*homes, *(name for name in own if name.startswith("__") and name.endswith("__"))})

    return __getattr__, __dir__
