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


def check_packed(packed: Any, key: str) -> None:
    """Check what `_pack` returned."""
    kind: Any
    value: Any
    kind, value = packed if isinstance(packed, tuple) and len(packed) == 2 else (None, None)
    parts: Any = ()
    if kind in ("tensor", "array"):
        fits = isinstance(value, torch.Tensor)
    elif kind == "list":
        fits, parts = isinstance(value, list), value
    elif kind == "mapping":
        fits = isinstance(value, tuple) and [*map(type, value)] == [list, list]
        fits = fits and len(value[0]) == len(value[1]) and not any(map(_is_container, value[0]))
        parts = value[1] if fits else ()
    else:
        fits = kind == "plain" or (kind == "text" and isinstance(value, str | list))
    if not fits:
        raise FieldError(
            key, f"is {shown(packed)}", "a pair: a kind (tensor, array, text, plain, list, mapping), a value"
        )
    for index, each in enumerate(parts):
        check_packed(each, f"{key}[{index}]")


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


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


def unpack(packed: Any) -> Any:
    """Return a value that was packed."""
    kind, value = packed
    if kind == "array":
        return value.numpy()
    if kind == "text":
        return np.array(value)
    if kind == "list":
        return [unpack(entry) for entry in value]
    if kind == "mapping":
        return dict(zip(value[0], map(unpack, value[1]), strict=True))
    return value
