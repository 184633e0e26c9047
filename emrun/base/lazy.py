"""Public names of a package that are imported on first use, so that `import emrun` stays fast."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_NAME = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


@cache
def homes(stub: Path) -> dict[str, str]:
    """Return the public names that a stub imports -> the module of each."""
    return {name: module for module, name in _NAME.findall(stub.read_text(encoding="utf-8"))}


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` that imports each name from its module, and a `__dir__` that lists the names.

    The names are those that the file `__init__.pyi` imports for type checkers.

    Args:
        package: the package that offers the names.
        file: its `__init__.py`.
    """
    stub = Path(file).with_suffix(".pyi")

    def __getattr__(name: str) -> Any:
        if name not in homes(stub):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(homes(stub)[name], fromlist=[name]), name)

    def __dir__() -> list[str]:
        names = vars(sys.modules[package])
        return sorted({*homes(stub), *(name for name in names if name.startswith("__") and name.endswith("__"))})

    return __getattr__, __dir__
