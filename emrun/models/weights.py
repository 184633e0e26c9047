"""The weights of a module in a file that anything can read: safetensors."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from emrun.errors import StateError, StorageError, reason_of
from emrun.storage.files import refuse_timeout, storing
from emrun.wording import listed

FILE = "model.safetensors"
_TIED = "tied"  # one key of metadata only: safetensors writes several in random order, and equal weights would differ


Structure = Mapping[str, tuple[tuple[int, ...] | None, torch.dtype]]
"""Name of a parameter or buffer -> its shape, None as long as a lazy module has not seen a batch, and its dtype."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A module's parameters and buffers on the CPU; names of tied ones -> the name under which they are."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]


def collect_weights(module: torch.nn.Module, *, copied: bool = False) -> Weights:
    """Return a module's parameters and buffers, tied ones once.

    Args:
        module: the module.
        copied: as they are now, whatever happens to the module's.

    Raises:
        StateError: a lazy module has not seen a batch.
    """
    without_shape = uninitialised(module)
    if without_shape:
        raise StateError(f"{listed(without_shape)}: a lazy module has no weights to save before its first batch")
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_at: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in module.state_dict().items():
        if _is_extra(name, tensor):
            continue  # what `get_extra_state` returned; see `extra_state`
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and place in first_at:
            tied[name] = first_at[place]
            continue
        first_at[place] = name
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        is_shared = storage in storages or (copied and storage == place[0])
        weights[name] = own.clone() if is_shared else own  # safetensors refuses tensors that share memory
        storages.add(storage)
    return Weights(weights, tied)


def write_weights(weights: Weights, directory: Path) -> None:
    """Write weights to `model.safetensors`.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / FILE
    metadata = {_TIED: json.dumps(weights.tied, sort_keys=True)} if weights.tied else None
    with suppress(OSError):  # `save_file` says why
        path.touch()
    try:
        mode = path.stat().st_mode if path.exists() else None  # what the umask gives
        save_file(dict(weights.tensors), path, metadata=metadata)  # makes a file that only its owner reads
        with storing(path, "write"):
            if mode is not None and path.stat().st_mode != mode:
                path.chmod(mode)
    except KeyError as error:
        raise StorageError(errno.EINVAL, f"cannot write {path}: safetensors has no {error}") from error
    except SafetensorError as error:
        full = "No space left" in str(error)
        code = errno.ENOSPC if full else errno.EIO
        raise StorageError(code, f"cannot write {path}: {'the disk is full' if full else error}") from error


def load_weights(module: torch.nn.Module, directory: Path) -> None:
    """Read the weights that `write_weights` wrote into a module of the same structure.

    Raises:
        StorageError: the file cannot be read.
        StateError: its names or shapes are not those of the module.
    """
    path = directory / FILE
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        refuse_timeout(error, path)
        raise StorageError(errno.EIO, f"cannot read {path}: {reason_of(error)}") from error
    state.update({name: state[first] for name, first in tied.items() if first in state})
    expected = {name: value for name, value in module.state_dict().items() if not _is_extra(name, value)}
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and not is_lazy(tensor) and state[name].shape != tensor.shape
    ]
    if missing or extra or wrong:
        raise StateError(
            f"{path} does not fit the module: missing {listed(missing)}; not in the module {listed(extra)}; "
            f"of another shape {listed(wrong)}"
        )
    own_memory(module)
    module.load_state_dict({**module.state_dict(), **state})


def own_memory(module: torch.nn.Module) -> None:
    """Give each value of expanded parameters and buffers its own memory: torch writes into no other ones.

    Buffers with `persistent=False` stay as they are: they are not loaded.
    """
    for part in module.modules():
        tensors = {**part._parameters, **part._buffers}
        for name, tensor in tensors.items():
            if tensor is None or name in part._non_persistent_buffers_set or is_lazy(tensor):
                continue
            if tensor.layout is torch.strided and 0 in _strides(tensor):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the axes that have more than one entry."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


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


def structure(module: torch.nn.Module) -> Structure:
    """Return names, shapes and dtypes of what `collect_weights` collects."""
    state = {name: value for name, value in module.state_dict().items() if not _is_extra(name, value)}
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
        if _is_extra(name, tensor) or is_lazy(tensor):
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


def extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module's state has beside tensors: what `get_extra_state` of its parts returned."""
    return {name: value for name, value in module.state_dict().items() if _is_extra(name, value)}


def _is_extra(name: str, value: Any) -> bool:
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)
