"""Lazy modules: which parts have no shapes yet, and how they get shapes; also the modes of a module's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from emrun.base.encoding import set_random_state
from emrun.base.errors import ArgumentError
from emrun.base.randomness import preserved_randomness
from emrun.base.wording import listed


def uninitialised(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of lazy modules that have not seen a batch."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]


def end_laziness(module: torch.nn.Module) -> None:
    """Turn the lazy parts of a module that have all shapes into regular modules, without a batch.

    torch does the same in their first forward. Parts with laziness of their own are left to their first forward.
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


@contextmanager
def without_traces(module: torch.nn.Module) -> Iterator[None]:
    """A block in which a module runs in evaluation mode, without gradients; its buffers and random states come back."""
    missing = uninitialised(module)
    buffers = {name: each.clone() for name, each in module.named_buffers() if name not in missing}
    try:
        with in_mode(module, train=False), preserved_randomness(), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


def give_shapes(module: torch.nn.Module, forward: Callable[[], Any], random: dict[str, Any]) -> None:
    """Give the lazy parts of a module their shapes and first values, and leave everything else unchanged.

    Args:
        module: the module. It runs in evaluation mode, without gradients; other buffers and random states are restored.
        forward: the function that runs the module.
        random: the random states from which the values are drawn.

    Raises:
        ArgumentError: forward does not use a lazy part in an evaluation.
    """
    with without_traces(module):
        set_random_state(random)
        forward()
    missing = sorted(set(uninitialised(module)))
    if missing:
        message = f"{listed(missing)}: lazy, but forward does not use it in an evaluation; set its size"
        raise ArgumentError("module", message)


def _set_sizes(part: Any) -> None:
    """Set the input sizes of one of torch's modules from its tensors, because a checkpoint does not have them."""
    tensor = part.weight if getattr(part, "weight", None) is not None else getattr(part, "running_mean", None)
    if tensor is None:
        return
    if getattr(part, "in_features", None) == 0:
        part.in_features = tensor.shape[-1]
    elif getattr(part, "num_features", None) == 0:
        part.num_features = tensor.shape[0]
    elif getattr(part, "in_channels", None) == 0:
        part.in_channels = tensor.shape[0] if part.transposed else tensor.shape[1] * part.groups


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
