"""Weights in the safetensors format, which many programs can read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from emrun.base.errors import StorageError
from emrun.storage.checkpoints.manifest import FROZEN, Contents
from emrun.storage.files import opened_regular, storing

FILE = "model.safetensors"
"""The weights that evaluations use, unless frozen tensors lie apart."""
INDEX = f"{FILE}.index.json"
"""Which file has which tensor, in the format of transformers, if frozen tensors lie apart."""
UNFROZEN = "unfrozen.safetensors"
"""The other tensors of the weights that evaluations use, if frozen tensors lie apart."""
LEAST_APART = 2**20  # bytes of frozen tensors that are worth a file

Collected = tuple[Mapping[str, Any], Mapping[str, str]]
"""The weights and the names of tied weights, as `write_weights` takes them; on several ranks, some are `Rows`."""

_TIED = "tied"  # the only key of the metadata: safetensors writes several in random order, and files would differ


def write_weights(weights: Mapping[str, Tensor], tied: Mapping[str, str], directory: Path, name: str = FILE) -> None:
    """Write weights to a file, `model.safetensors`.

    Args:
        weights: a module's parameters and buffers on the CPU.
        tied: name of a tied weight -> the name in `weights` with the same tensor.
        directory: the directory of the file.
        name: the name of the file.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / name
    metadata = {_TIED: json.dumps(tied, sort_keys=True)} if tied else None
    with suppress(OSError):  # `save_file` reports the reason
        path.touch()
    try:
        mode = path.stat().st_mode if path.exists() else None  # as the umask sets it
        save_file(dict(weights), path, metadata=metadata)  # creates a file that only its owner can read
        with suppress(OSError):  # a file system without modes, such as FAT
            if mode is not None and path.stat().st_mode != mode:
                path.chmod(mode)
    except KeyError as error:
        raise StorageError(errno.EINVAL, f"cannot write {path}: safetensors has no {error}") from error
    except SafetensorError as error:
        full = "No space left" in str(error)
        code = errno.ENOSPC if full else errno.EIO
        raise StorageError(code, f"cannot write {path}: {'the disk is full' if full else error}") from error


def write_apart(collected: Mapping[str, Collected], frozen: Collection[str], directory: Path) -> None:
    """Write weights to files, the frozen tensors to one of their own if they are large: `frozen.safetensors`.

    The file is a hard link to that of the newest checkpoint in the parent directory if this has the same bytes, and is
    written where the file system has no hard links. The bytes are compared, because a frozen tensor may be changed by
    hand, such as the average of another one.

    Args:
        collected: name of a file, `model.safetensors` first -> what it holds.
        frozen: the names of frozen tensors. Those with other values in one of the files do not lie apart.
        directory: the directory of the files.

    Raises:
        StorageError: a file cannot be written.
    """
    # the frozen tensors that are the same in all files
    (first, _), *others = collected.values()
    common = {name: first[name] for name in frozen if name in first}
    for weights, _ in others:
        common = {
            name: tensor
            for name, tensor in common.items()
            if name in weights and _has_same_bytes(weights[name], tensor)
        }
    if sum(tensor.nbytes for tensor in common.values()) < LEAST_APART:
        common = {}
    tied = {name: owner for _, names in collected.values() for name, owner in names.items() if owner in common}
    if common and not _link_frozen(common, tied, directory):
        write_weights(common, tied, directory, FROZEN)

    # the rest of each file
    for name, (weights, names) in collected.items():
        rest = {key: tensor for key, tensor in weights.items() if key not in common}
        tied_rest = {key: owner for key, owner in names.items() if owner in rest}
        file = UNFROZEN if common and name == FILE else name
        write_weights(rest, tied_rest, directory, file)
        if file == UNFROZEN:
            size = sum(tensor.nbytes for tensor in weights.values())
            places = dict.fromkeys((*common, *tied), FROZEN) | dict.fromkeys((*rest, *tied_rest), UNFROZEN)
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True)
            with storing(directory / INDEX, "write"):
                (directory / INDEX).write_text(text + "\n", encoding="utf-8")


def _link_frozen(weights: Mapping[str, Tensor], tied: Mapping[str, str], directory: Path) -> bool:
    """Link the newest file of frozen tensors of another checkpoint if it has these bytes; return whether it has."""
    with suppress(OSError):  # such as no file, another process deletes it, or no hard links here
        paths = [directory.with_name(name) / FROZEN for name in Contents.of(directory.parent).checkpoints]
        existing = [path for path in paths if path.exists()]
        path = max(existing, key=lambda file: (file.parent.stat().st_mtime_ns, file), default=directory / FROZEN)
        with opened_regular(path, depth=2):
            tensors = read_safetensors(path)
        wanted = {**weights, **{name: weights[owner] for name, owner in tied.items()}}
        if tensors.keys() == wanted.keys() and all(
            _has_same_bytes(tensors[name], tensor) for name, tensor in wanted.items()
        ):
            os.link(path, directory / FROZEN, follow_symlinks=False)
            return True
    return False


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout) or one.layout != torch.strided:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def read_weights(directory: Path, name: str = FILE) -> dict[str, Tensor]:
    """Return the weights that `write_weights` or `write_apart` wrote; a tied weight under each of its names.

    Raises:
        StorageError: a file cannot be read.
    """
    frozen = [FROZEN] if (directory / FROZEN).exists() else []
    weights: dict[str, Tensor] = {}
    for file in (*frozen, UNFROZEN if frozen and name == FILE else name):
        with opened_regular(directory / file):  # a pipe would wait for a writer
            weights |= read_safetensors(directory / file)
    return weights


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped from the file: each is read when it is used.

    A tied weight is returned under each of its names, as `write_weights` or `safetensors.torch.save_model` recorded
    them.

    Raises:
        StorageError: the file cannot be read.
    """
    with storing(path, "read", SafetensorError, ValueError, RecursionError):
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
        recorded = json.loads(metadata.get(_TIED, "{}"))
    tied = {**metadata, **(recorded if isinstance(recorded, dict) else {})}
    tied_weights = {name: weights[first] for name, first in tied.items() if isinstance(first, str) and first in weights}
    return {**tied_weights, **weights}
