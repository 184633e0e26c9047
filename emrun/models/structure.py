"""Which parameters and buffers a module has, of which kinds, and what its state has beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch.nn.parameter import is_lazy

from emrun.models.module_state import is_extra

Structure = Mapping[str, tuple[tuple[int, ...] | None, torch.dtype]]
"""Name of a parameter or buffer -> its shape, None as long as a lazy module has not seen a batch, and its dtype."""


def structure(module: torch.nn.Module) -> Structure:
    """Return names, shapes and dtypes of what `collect_weights` collects."""
    state = {name: value for name, value in module.state_dict().items() if not is_extra(name, value)}
    return {name: (None if is_lazy(each) else tuple(each.shape), each.dtype) for name, each in state.items()}


def differences(before: Structure, now: Structure, *, of_dtypes: bool = True) -> list[str]:
    """Return what is new, gone or of another kind, in words; a shape that was not known may be any.

    Args:
        before: what a checkpoint is loaded into.
        now: what is saved in the checkpoint.
        of_dtypes: dtypes are compared too.
    """
    found = [f"{name!r} is new" for name in now if name not in before]
    found += [f"{name!r} is missing" for name in before if name not in now]
    for name, (shape, dtype) in now.items():
        old_shape, old_dtype = before.get(name, (shape, dtype))
        if old_shape not in (None, shape):
            found.append(f"{name!r} had shape {old_shape}, has {shape}")
        elif of_dtypes and old_dtype != dtype:
            found.append(f"{name!r} was {_shown(old_dtype)}, is {_shown(dtype)}")
    return found


def what_cannot_be_held(module: torch.nn.Module) -> list[str]:
    """Return the parameters and buffers that no file of safetensors can hold, and why, in words."""
    held: dict[torch.dtype, bool] = {}
    found = []
    for name, tensor in module.state_dict().items():
        if is_extra(name, tensor) or is_lazy(tensor):
            continue
        if tensor.is_quantized:
            found.append(f"{name!r} is quantised ({_shown(tensor.dtype)})")
        elif tensor.layout is not torch.strided or tensor.is_nested:
            found.append(f"{name!r} is {'nested' if tensor.is_nested else _shown(tensor.layout)}")
        elif tensor.is_meta:
            found.append(f"{name!r} is on the device meta, without values")
        elif not held.setdefault(tensor.dtype, _is_held(tensor.dtype)):
            found.append(f"{name!r} is {_shown(tensor.dtype)}")
    return found


def _is_held(dtype: torch.dtype) -> bool:
    """Tell whether safetensors has a dtype."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _shown(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
