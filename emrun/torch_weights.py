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
from safetensors.torch import save_file
from torch import Tensor

from emrun.errors import StateError, StorageError, listed
from emrun.files import storing

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
    """
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
        raise StorageError(errno.EIO, f"cannot read {path}: {error}") from error
    state.update({name: state[first] for name, first in tied.items() if first in state})
    expected = {name: value for name, value in module.state_dict().items() if not _is_extra(name, value)}
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if missing or extra or wrong:
        raise StateError(
            f"{path} does not fit the module: missing {listed(missing)}; not in the module {listed(extra)}; "
            f"of another shape {listed(wrong)}"
        )
    module.load_state_dict({**module.state_dict(), **state})


def extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module's state has beside tensors: what `get_extra_state` of its parts returned."""
    return {name: value for name, value in module.state_dict().items() if _is_extra(name, value)}


def _is_extra(name: str, value: Any) -> bool:
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)
