"""The device of a model, and the module on it."""

from __future__ import annotations

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from emrun.base.errors import ArgumentError
from emrun.models.weights.saving import own_memory


def find_device(name: str) -> torch.device:
    """Return a device by its name; `auto` means CUDA or MPS if available, else the CPU.

    Raises:
        ArgumentError: there is no such device, or it cannot be used here.
    """
    if name == "auto":
        name = "cpu"
        if torch.backends.mps.is_available():
            name = "mps"
        if torch.cuda.is_available():
            name = "cuda"
        return torch.device(name)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):
            reason = "it is not a device; write auto, cpu, mps, or cuda, cuda:1 and so on"
        raise ArgumentError("device", f"{name!r} cannot be used here: {reason}") from error
    return device


def refuse_lazy(module: Module) -> None:
    """Refuse a module of which a part has no shapes before its first batch.

    Raises:
        ArgumentError: it has such a part.
    """
    for name, part in module.named_modules():
        if any(map(is_lazy, (*part.parameters(recurse=False), *part.buffers(recurse=False)))):
            kind = type(part).__name__
            raise ArgumentError(
                "module",
                f"{name or 'the module'} is a {kind}, which has no shapes before its first batch; in __init__, write "
                f"{kind.removeprefix('Lazy')} with its sizes, or run the module once on zeros of the shape of a batch",
            )


def put(module: object, device: torch.device) -> None:
    """Put a module on a device, with memory of its own for each tensor.

    Raises:
        ArgumentError: it is not a module, or has no shapes as yet.
    """
    if not isinstance(module, Module):
        raise ArgumentError("module", f"{type(module).__name__} is not a torch.nn.Module; write module: {{class: ...}}")
    refuse_lazy(module)
    module.to(device)
    own_memory(module)
