"""What a module's state has beside its tensors: what `get_extra_state` returns, and the modes of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module's state has beside tensors: what `get_extra_state` of its parts returned."""
    return {name: value for name, value in module.state_dict().items() if is_extra(name, value)}


def load_extra_state(module: torch.nn.Module, extra: Mapping[str, Any]) -> None:
    """Give a module back what `extra_state` returned; its tensors stay."""
    module.load_state_dict({**module.state_dict(), **extra})


def is_extra(name: str, value: Any) -> bool:
    """Tell whether an entry of a module's state is what `get_extra_state` returned, and not a tensor of its own."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)


def modes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the mode of a module, and the names of its parts that have another one."""
    training = module.training
    others = [name for name, part in module.named_modules() if part.training is not training]
    return {"training": training, "others": others}


def set_modes(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Give a module and its parts back the modes that `modes` returned."""
    module.train(saved["training"])
    others = frozenset(saved["others"])
    for name, part in module.named_modules():
        if name in others:
            part.training = not saved["training"]
