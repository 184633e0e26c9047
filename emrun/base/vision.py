"""Imports torchvision, also where its compiled operators are those of another build of torch."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

_LOG = logging.getLogger(__name__)
_ASKED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor a, Tensor b, float c) -> Tensor",
)
_DECLARED: list[Any] = []  # torch forgets the operators of a library that is deleted


def import_vision(module: str = "torchvision") -> ModuleType:
    """Import a module of torchvision.

    PyPI has torchvision for torch with CUDA. Beside torch for CPUs, its compiled operators cannot be loaded, and the
    import asks for some of them. Transforms and models of classification need none: they are declared then, with a
    warning, and an operator that is called raises an error.

    Raises:
        ImportError: it is not installed.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _DECLARED:
            raise
        import torch

        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        _DECLARED.append(library)
        for operator in _ASKED:
            library.define(operator)
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")
        _LOG.warning(
            "torchvision was compiled for another build of torch than %s: its operators, such as nms of detection, "
            "cannot be called; transforms need none of them",
            torch.__version__,
        )
    return importlib.import_module(module)
