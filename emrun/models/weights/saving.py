"""The weights of a module: how they are saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import StateError
from emrun.base.types import Values
from emrun.base.wording import few
from emrun.models.modes import Tensors
from emrun.ranks.pieces import in_pieces_like, is_in_pieces, piece, rows_of
from emrun.storage.checkpoints.shards import read_tensors, whole_of
from emrun.storage.checkpoints.weights import FILE, Collected


def tensors_of(module: Module) -> Tensors:
    """Return the parameters and buffers of a module by their names, those that are not saved too."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def own_tensors(module: Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are saved: its state dict without `extra_state`."""
    return {name: value for name, value in module.state_dict().items() if not _is_extra(name, value)}


def extra_state(module: Module) -> Values:
    """Return the extra state in a module's state dict: what `get_extra_state` of its parts returned."""
    return {name: value for name, value in module.state_dict().items() if _is_extra(name, value)}


def _is_extra(name: str, value: Any) -> bool:
    """Return whether an entry of a state dict is what `get_extra_state` returned, and not a tensor of the module."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)


def collect_weights(module: Module, *, copied: bool = False, replaced: Mapping[int, Tensor] | None = None) -> Collected:
    """Return a module's parameters and buffers, tied tensors once, and the names of the others; see `write_weights`.

    Of a tensor that lies on several ranks, they are the `Rows` of this one.

    Args:
        module: the module.
        copied: copy the tensors, so that later changes of the module do not change them.
        replaced: id of a parameter or buffer -> the tensor to collect instead.
    """
    tensors = own_tensors(module)
    if replaced:
        for name, tensor in chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        ):
            if name in tensors:
                tensors[name] = replaced.get(id(tensor), tensors[name])
    weights: dict[str, Any] = {}
    tied: dict[str, str] = {}
    storages: set[int] = set()
    for name, *tied_names in same_tensors(module, tensors):
        tied |= dict.fromkeys(tied_names, name)
        tensor = tensors[name]
        rows = piece(tensor)
        values = rows.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory
        storage = values.untyped_storage().data_ptr()
        if storage in storages or (copied and storage == rows.untyped_storage().data_ptr()):
            values = values.clone()
        weights[name] = replace(rows_of(tensor), values=values) if is_in_pieces(tensor) else values
        storages.add(storage)
    return weights, tied


def same_tensors(module: Module, tensors: Tensors) -> list[list[str]]:
    """Return the names of the tensors of a module, or of those that replace them, the names of one tensor together."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names: dict[object, list[str]] = {}  # by what tensors that are one have in common
    for name, tensor in tensors.items():
        place: object = name
        if is_in_pieces(tensor):
            place = id(parameters[name])  # this rank may have none of its rows
        elif tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta:
            place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        names.setdefault(place, []).append(name)
    return list(names.values())


def as_held(module: Module, tensors: Values) -> Tensors:
    """Return tensors, which may be `Stored`, as a module holds those of the same names: in pieces, if it is sharded."""
    held = own_tensors(module)
    return {
        name: in_pieces_like(tensor, held[name]) if is_in_pieces(held.get(name)) else whole_of(tensor)
        for name, tensor in tensors.items()
    }


def load_weights(module: Module, directory: Path, name: str = FILE) -> None:
    """Read the weights of a checkpoint into a module of the same structure: of a sharded one, the rows of this rank.

    Raises:
        StorageError: the file cannot be read.
        StateError: the names or shapes in the file are not those of the module.
    """
    saved = read_tensors(directory, name)
    tensors = own_tensors(module)
    shapes = [
        f"{each} is {tuple(saved[each].shape)} in the checkpoint, {tuple(tensor.shape)} in the module"
        for each, tensor in tensors.items()
        if each in saved and saved[each].shape != tensor.shape
    ]
    lists = {
        "": shapes,
        "only in the module: ": sorted(tensors.keys() - saved.keys()),
        "only in the checkpoint: ": sorted(saved.keys() - tensors.keys()),
    }
    differences = [f"{head}{few(names, 200)}" for head, names in lists.items() if names]
    if differences:
        raise StateError(
            f"{directory / name} does not fit the module: {'; '.join(differences)}. Weights can only be loaded into "
            "the architecture that they were saved from"
        )
    put(as_held(module, saved), module)


def put(values: Values, module: Module) -> None:
    """Give a module saved tensors or extra state, and leave the rest as it is."""
    own_memory(module)
    module.load_state_dict({**module.state_dict(), **values})


def own_memory(module: Module) -> None:
    """Give each value of expanded parameters and buffers its own memory, because torch cannot load into shared memory.

    Buffers with `persistent=False` are not changed, because they are not loaded.
    """
    unsaved = unsaved_buffers(module)
    for name, tensor in tensors_of(module).items():
        if name in unsaved or tensor.layout is not torch.strided:
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def unsaved_buffers(module: Module) -> set[str]:
    """Return the names of the buffers of a module with `persistent=False`, which are not saved."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
