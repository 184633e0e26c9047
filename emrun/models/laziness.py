"""Lazy modules: which parts have no shapes yet, and the end of that."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy


def uninitialised(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of lazy modules that have not seen a batch."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]


def end_laziness(module: torch.nn.Module) -> None:
    """Let the lazy parts of a module that have all shapes become what they are in a training, without a batch.

    That is what torch does in their first forward. Parts that are lazy in a way of their own do it there.
    """
    for part in module.modules():
        if not isinstance(part, LazyModuleMixin) or not hasattr(part, "_initialize_hook"):
            continue
        if part.has_uninitialized_params() or not part.initialize_parameters.__module__.startswith("torch."):
            continue
        _set_sizes(part)
        for name in ("_initialize_hook", "_load_hook"):
            getattr(part, name).remove()
            delattr(part, name)
        if part.cls_to_become is not None:
            part.__class__ = part.cls_to_become


def _set_sizes(part: Any) -> None:
    """Give a part of torch's the sizes of its input, which a checkpoint does not have: those of its tensors."""
    tensor = part.weight if getattr(part, "weight", None) is not None else getattr(part, "running_mean", None)
    if tensor is None:
        return
    if getattr(part, "in_features", None) == 0:
        part.in_features = tensor.shape[-1]
    elif getattr(part, "num_features", None) == 0:
        part.num_features = tensor.shape[0]
    elif getattr(part, "in_channels", None) == 0:
        part.in_channels = tensor.shape[0] if part.transposed else tensor.shape[1] * part.groups
