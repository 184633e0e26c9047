"""The file of a checkpoint with the state of the run, besides the weights; the keys of the states of hooks in it."""

from __future__ import annotations

import errno
import io
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from emrun.base.encoding import decode, encode
from emrun.base.errors import StorageError, reason_of
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.epoch_data import declared
from emrun.hook import AbstractHook
from emrun.storage.checkpoints.manifest import SHARDS, STATE
from emrun.storage.checkpoints.shards import OF_STATE, put_back, read_tensors
from emrun.storage.files import opened_regular, refuse_timeout

FILE = STATE
_MOST = 4
_USUAL = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}


def save_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write an encoded state to `state.pt`.

    Raises:
        OSError: the file cannot be written.
    """
    with (directory / FILE).open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # raised by torch when it closes the file after a failed write
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_back(state: Any, key: str) -> Any:
    """Return a state as a resume reads it from the file; usual tensors are not written, and share their memory.

    Args:
        state: the state, not encoded yet.
        key: the name of the state in messages.

    Raises:
        StateError: the state cannot be saved.
    """
    encoded = encode(state, key)
    tensors = [leaf for leaf in tree_leaves(encoded) if isinstance(leaf, torch.Tensor)]
    if not all(tensor.layout is torch.strided and tensor.dtype in _USUAL for tensor in tensors):
        file = io.BytesIO()
        torch.save(encoded, file)
        file.seek(0)
        encoded = torch.load(file, map_location="cpu", weights_only=True)
    return decode(encoded)


def load_state(directory: Path) -> dict[str, Any]:
    """Read `state.pt`, still encoded (see `decode`); nothing in the file is imported or called.

    Tensors that lie in the files of several ranks are `Stored`. Values that are there many times, and tensors that
    repeat their values, may unfold to four times the file.

    Raises:
        StorageError: the file cannot be read.
    """
    path = directory / FILE
    try:
        with opened_regular(path) as file:
            size = path.stat().st_size
            state = None if is_compressed(file, size) else torch.load(file, map_location="cpu", weights_only=True)
        if _unfolded(state, {}) > _MOST * size:
            state = None
    except Exception as error:  # torch raises many types; some messages advise to disable `weights_only`
        refuse_timeout(error, path)
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            removed = "it is missing; `emrun prune --optimizer-states` removes it"
            raise StorageError(errno.ENOENT, f"cannot read {path}: {removed}") from error
        reason = reason_of(error) if isinstance(error, OSError) else "the file is not a saved state of a run"
        raise StorageError(errno.EIO, f"cannot read {path}: {reason}") from error
    if not isinstance(state, dict):
        raise StorageError(errno.EIO, f"cannot read {path}: the file is not a saved state of a run")
    if (directory / SHARDS).exists():
        with reading(str(path), ANOTHER_CHECKPOINT):
            state["model"] = put_back(state["model"], read_tensors(directory, OF_STATE))
    return state


def is_compressed(file: BinaryIO, size: int) -> bool:
    """Return whether an archive has more inside than its size, as none that torch writes; `file` is at its begin then.

    Raises:
        zipfile.BadZipFile: it is not an archive.
    """
    with zipfile.ZipFile(file) as archive:
        unpacked_size = sum(member.file_size for member in archive.infolist())
    file.seek(0)
    return unpacked_size > size


def _unfolded(value: Any, sizes: dict[int, int]) -> int:
    """Return how large a value would be if what is there many times were copied each time, in bytes and entries."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if not isinstance(value, Mapping | list | tuple):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = 0
        items = value.values() if isinstance(value, Mapping) else value
        sizes[id(value)] = 1 + sum(_unfolded(item, sizes) for item in items)
    return sizes[id(value)]


def keyed(hooks: Sequence[AbstractHook]) -> dict[str, AbstractHook]:
    """Return the key of the state of each hook in a checkpoint -> the hook.

    Hooks of one class are counted in their order. One that saves checkpoints is known by their name instead, so that
    it keeps what it knows of them whatever is listed before it.
    """
    by_key: dict[str, AbstractHook] = {}
    counts: Counter[str] = Counter()
    for hook in hooks:
        kind = f"{type(hook).__module__}.{type(hook).__qualname__}"
        if saves := declared(hook, "saves"):
            key = f"{kind} of {saves[0]!r}"
        else:
            counts[kind] += 1
            key = kind if counts[kind] == 1 else f"{kind} number {counts[kind]}"
        by_key[key] = hook
    return by_key


def class_of(key: str) -> str:
    """Return the class in a key of `keyed`."""
    return key.partition(" ")[0]


def short_key(key: str) -> str:
    """Return a key of `keyed` for messages, without the module: `ComputeStats number 2`, `SaveBest of 'best'`."""
    return class_of(key).rpartition(".")[2] + key.removeprefix(class_of(key))
