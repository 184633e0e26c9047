"""Which parameters of a model a hook means: by names that match, and by the optimizer of an update."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from emrun.base.errors import ArgumentError, HookError
from emrun.base.wording import few
from emrun.ranks.pieces import norms_of_all, piece

Match = str | Sequence[str] | None
"""A regular expression, or a list of them, for names of parameters (`re.search`)."""


def check_matches(argument: str, expressions: Sequence[re.Pattern[str]], module: torch.nn.Module) -> None:
    """Check that each expression matches the name of a parameter.

    Raises:
        ArgumentError: an expression matches none.
    """
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for expression in expressions:
        if not any(expression.search(name) for name in names):
            raise ArgumentError(argument, f"{expression.pattern!r} matches none of the parameters {few(names)}")


def module_of(hook: str, model: Any) -> torch.nn.Module:
    """Return the module of a model.

    Args:
        hook: the class of the hook, for the message.
        model: the model.

    Raises:
        HookError: the model is not a `TorchModel`.
    """
    module = getattr(model, "module", None)
    if not isinstance(module, torch.nn.Module):
        raise HookError(f"{hook} needs a TorchModel, not {type(model).__name__}")
    return module


def suffix_of(model: Any, optimizer: Any) -> str:
    """Return what the names of values of an optimizer end with: `_NAME` if the model has several, else nothing."""
    optimizers = getattr(model, "optimizers", None) or {}
    name = next((name for name, other in optimizers.items() if other is optimizer), "")
    return f"_{name}" if len(optimizers) > 1 and name else ""


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or the values of a sparse one, which share its memory if it is coalesced."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def norms_of(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, on its device; of 16 bits in float32. Nothing waits for the device.

    Args:
        tensors: the tensors, such as gradients; the norm of None and of an empty tensor is 0. If they are sharded, all
            ranks call this.
    """
    wholes = [torch.zeros(0) if tensor is None else dense(tensor) for tensor in tensors]
    pieces = list(map(piece, wholes))
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    all_norms = [torch.zeros((), device=tensor.device) for tensor in pieces]
    for index, tensor in enumerate(pieces):
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), indices in groups.items():
        exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        norms = torch._foreach_norm([pieces[index] for index in indices], 2, exact)
        for index, norm in zip(indices, norms, strict=True):
            all_norms[index] = norm
    return norms_of_all(all_norms, wholes)
