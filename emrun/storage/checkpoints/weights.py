"""Weights in the safetensors format, which many programs can read."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from emrun.base.errors import StorageError, reason_of
from emrun.storage.files import opened_regular, refuse_timeout, storing

FILE = "model.safetensors"
"""The weights that evaluations use."""

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
        with storing(path, "write"):
            if mode is not None and path.stat().st_mode != mode:
                path.chmod(mode)
    except KeyError as error:
        raise StorageError(errno.EINVAL, f"cannot write {path}: safetensors has no {error}") from error
    except SafetensorError as error:
        full = "No space left" in str(error)
        code = errno.ENOSPC if full else errno.EIO
        raise StorageError(code, f"cannot write {path}: {'the disk is full' if full else error}") from error


def read_weights(directory: Path, name: str = FILE) -> dict[str, Tensor]:
    """Return the weights that `write_weights` wrote; a tied weight is returned under each of its names.

    Raises:
        StorageError: the file cannot be read.
    """
    with opened_regular(directory / name):  # a pipe would wait for a writer
        return read_safetensors(directory / name)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped from the file: each is read when it is used.

    A tied weight is returned under each of its names, as `write_weights` or `safetensors.torch.save_model` recorded
    them.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
        own = json.loads(metadata.get(_TIED, "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, path)
        raise StorageError(errno.EIO, f"cannot read {path}: {reason_of(error)}") from error
    tied = {**metadata, **(own if isinstance(own, dict) else {})}
    again = {name: weights[first] for name, first in tied.items() if isinstance(first, str) and first in weights}
    return {**again, **weights}
