"""The weights of a module in a file that anything can read: safetensors."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parameter import is_lazy

from emrun.errors import StateError, StorageError, reason_of
from emrun.models.laziness import uninitialised
from emrun.models.module_state import is_extra
from emrun.storage.files import refuse_timeout, storing
from emrun.wording import listed

FILE = "model.safetensors"
_TIED = "tied"  # one key of metadata only: safetensors writes several in random order, and equal weights would differ


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
        if is_extra(name, tensor):
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
    expected = {name: value for name, value in module.state_dict().items() if not is_extra(name, value)}
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
