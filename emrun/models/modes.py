"""The modes of a module and of its parts: training or evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def modes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the mode of a module, and the names of its parts that are in the other mode."""
    training = module.training
    others = [name for name, part in module.named_modules() if part.training is not training]
    return {"training": training, "others": others}


@contextmanager
def in_mode(module: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """A block in which a module is in training or in evaluation mode."""
    before = modes(module)
    module.train(train)
    try:
        yield
    finally:
        set_modes(module, before)


def set_modes(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore the modes that `modes` returned."""
    module.train(saved["training"])
    others = frozenset(saved["others"])
    for name, part in module.named_modules():
        if name in others:
            part.training = not saved["training"]
