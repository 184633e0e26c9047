"""The state of a training in plain types and tensors: what a checkpoint keeps beside the weights."""

from __future__ import annotations

import errno
import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emrun.errors import StateError, StorageError

FILE = "state.pt"
_PLAIN = (type(None), bool, int, float, str, bytes)


def encode(value: Any, key: str) -> Any:
    """Return a value in types that `torch.load(weights_only=True)` takes, tensors on the CPU.

    Args:
        value: plain types, tensors, NumPy numbers, and mappings, lists and tuples of these.
        key: what it is called in messages.

    Raises:
        StateError: it is of another type; the message names its key.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        for name in value:
            if type(name) not in (str, int, float, bool, type(None)):
                raise StateError(f"{key}: key {name!r} is {type(name).__name__}, which cannot be saved; use texts")
        return {name: encode(entry, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(encode(entry, f"{key}[{index}]") for index, entry in enumerate(value))
    if isinstance(value, list):
        return [encode(entry, f"{key}[{index}]") for index, entry in enumerate(value)]
    hint = "torch.from_numpy makes a tensor of it" if isinstance(value, np.ndarray) else "keep plain types and tensors"
    raise StateError(f"{key} is {type(value).__name__}, which cannot be saved; {hint}")


def save_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write an encoded state to `state.pt`.

    Raises:
        StorageError: it cannot be written.
    """
    content = io.BytesIO()  # torch reports a full disk as something else
    torch.save(dict(state), content)
    (directory / FILE).write_bytes(content.getbuffer())


def load_state(directory: Path) -> dict[str, Any]:
    """Read `state.pt`; nothing in it is imported or called.

    Raises:
        StorageError: it cannot be read.
    """
    path = directory / FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, some of which advise to switch the safety off
        raise StorageError(errno.EIO, f"cannot read {path}: it is no state of a training") from error
    if not isinstance(state, dict):
        raise StorageError(errno.EIO, f"cannot read {path}: it is no state of a training")
    return state


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch (all CUDA devices)."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    version, numbers, gauss = random.getstate()
    return {
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": numpy,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back into a state that `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = dict(state["numpy"])
    numpy["state"] = {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def digest(batch: Mapping[str, Any]) -> str:
    """Return a checksum of a batch: names, types, shapes and values of its sources."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(batch):
        found.update(name.encode())
        _add(found, batch[name])
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        found.update(f"list{len(value)}".encode())
        for entry in value:
            _add(found, entry)
    else:
        found.update(repr(value).encode())
