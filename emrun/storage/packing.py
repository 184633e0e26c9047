"""Batches in types that can be saved: each value with what it takes to make it again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from emrun.encoding import encode
from emrun.errors import StateError
from emrun.fields import FieldError, shown
from emrun.types import Batch


def pack_all(batch: Batch) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sources in types that can be saved, and why others are left out."""
    packed: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, values in batch.items():
        try:
            packed[str(name)] = _pack(values, f"source {name!r}")
        except Exception as error:
            left_out[str(name)] = str(error)
    return packed, left_out


def _pack(value: Any, key: str) -> tuple[str, Any]:
    """Return what it takes to make a value again: what it is, and its content in types that can be saved."""
    if isinstance(value, torch.Tensor):
        return "tensor", encode(value, key)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "U":
            return "text", encode(value.tolist(), key)
        if value.dtype.kind not in "biufc":
            raise StateError(f"{key} is an array of {value.dtype}, which cannot be saved safely")
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return "array", torch.from_numpy(native)
    with suppress(StateError):
        return "plain", encode(value, key)
    if isinstance(value, list | tuple):
        return "list", [_pack(entry, f"{key}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        names = encode(list(value), key)
        return "mapping", (names, [_pack(entry, f"{key}.{name}") for name, entry in value.items()])
    raise StateError(f"{key} is {type(value).__name__}, which cannot be saved safely")


def unpack(packed: Any, key: str) -> Any:
    """Return a value that was packed.

    Raises:
        FieldError: it is nothing that `pack_all` returns.
    """
    kind: Any
    value: Any
    kind, value = packed if isinstance(packed, tuple) and len(packed) == 2 else (None, None)
    if kind in ("tensor", "array") and isinstance(value, torch.Tensor):
        return value if kind == "tensor" else value.numpy()
    if kind == "list" and isinstance(value, list):
        return _unpack_all(value, key)
    if kind == "mapping" and _are_names_and_values(value):
        return dict(zip(value[0], _unpack_all(value[1], key), strict=True))
    if kind == "text" and isinstance(value, str | list):
        return np.array(value)
    if kind == "plain":
        return value
    raise FieldError(key, f"is {shown(packed)}", "a pair: a kind (tensor, array, text, plain, list, mapping), a value")


def _unpack_all(values: list[Any], key: str) -> list[Any]:
    return [unpack(each, f"{key}[{index}]") for index, each in enumerate(values)]


def _are_names_and_values(value: Any) -> bool:
    fits = isinstance(value, tuple) and [*map(type, value)] == [list, list] and len(value[0]) == len(value[1])
    return fits and not any(isinstance(name, list | dict | set) for name in value[0])
