"""The modes of a module and of its parts, training or evaluation; its buffers, to restore them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.types import State, Values

Tensors = Mapping[str, Tensor]
"""Name of a source, a parameter or a buffer -> tensor."""


def modes(module: Module) -> State:
    """Return the mode of a module, and the names of its parts that are in the other mode."""
    training = module.training
    return {
        "training": training,
        "others": [name for name, part in module.named_modules() if part.training is not training],
    }


@contextmanager
def in_mode(module: Module, *, train: bool) -> Iterator[None]:
    """A block in which a module is in training or in evaluation mode."""
    before = modes(module)
    module.train(train)
    try:
        yield
    finally:
        set_modes(module, before)


def set_modes(module: Module, saved: Values) -> None:
    """Restore the modes that `modes` returned."""
    module.train(saved["training"])
    others = frozenset(saved["others"])
    for name, part in module.named_modules():
        if name in others:
            part.training = not saved["training"]


def copied_buffers(module: Module) -> Tensors:
    """Return name of a buffer -> a copy of it."""
    return {name: each.clone() for name, each in module.named_buffers()}


@torch.no_grad()
def restore_buffers(module: Module, copies: Tensors) -> None:
    """Restore the buffers that `copied_buffers` returned, as far as they have the same shapes."""
    for name, buffer in module.named_buffers():
        if name in copies and copies[name].shape == buffer.shape:
            buffer.copy_(copies[name])
