"""Weights in a file that anything can read: safetensors."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from emrun.errors import StorageError, reason_of
from emrun.storage.files import refuse_timeout, storing

FILE = "model.safetensors"
_TIED = "tied"  # one key of metadata only: safetensors writes several in random order, and equal weights would differ


def write_weights(weights: Mapping[str, Tensor], tied: Mapping[str, str], directory: Path) -> None:
    """Write weights to `model.safetensors`.

    Args:
        weights: a module's parameters and buffers on the CPU.
        tied: names of tied ones -> the name under which they are.
        directory: where the file is written.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / FILE
    metadata = {_TIED: json.dumps(tied, sort_keys=True)} if tied else None
    with suppress(OSError):  # `save_file` says why
        path.touch()
    try:
        mode = path.stat().st_mode if path.exists() else None  # what the umask gives
        save_file(dict(weights), path, metadata=metadata)  # makes a file that only its owner reads
        with storing(path, "write"):
            if mode is not None and path.stat().st_mode != mode:
                path.chmod(mode)
    except KeyError as error:
        raise StorageError(errno.EINVAL, f"cannot write {path}: safetensors has no {error}") from error
    except SafetensorError as error:
        full = "No space left" in str(error)
        code = errno.ENOSPC if full else errno.EIO
        raise StorageError(code, f"cannot write {path}: {'the disk is full' if full else error}") from error


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights that `write_weights` wrote, tied ones under each of their names.

    Raises:
        StorageError: the file cannot be read.
    """
    path = directory / FILE
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        refuse_timeout(error, path)
        raise StorageError(errno.EIO, f"cannot read {path}: {reason_of(error)}") from error
    return {**weights, **{name: weights[first] for name, first in tied.items() if first in weights}}
