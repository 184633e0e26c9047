"""What is imported on first use: public names of a package, so that `import emrun` stays fast, and torchvision."""

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


def prepare_torchvision() -> None:
    """Import torchvision, also where its compiled operators are those of another build of torch.

    PyPI has torchvision for torch with CUDA. Beside torch for CPUs, its operators cannot be loaded, and the import asks
    for two of them. Transforms and models of classification need none: the two are declared then, with a warning, and
    an operator that is called raises an error.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import torchvision  # noqa: F401 - this is what may fail
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _DECLARED:
            raise
        torch = sys.modules["torch"]
        library = torch.library.Library("torchvision", "DEF")
        _DECLARED.append(library)
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        import logging

        logging.getLogger(__name__).warning(
            "torchvision was compiled for another build of torch than %s: its operators, such as nms of detection, "
            "cannot be called; transforms need none of them",
            torch.__version__,
        )


_DECLARED: list[Any] = []  # the operators of a library end with it
