"""Copies batches that are read ahead, so that a stream may fill its arrays and containers again."""

from __future__ import annotations

import array
import copy
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from emrun.stream_context import WithLeftOut
from emrun.streams.stream_pass import WithState, closable

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_FILLED_AGAIN = (list, deque, bytearray, array.array, set)


def copied(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield copies of the batches of a `StreamPass`: of mappings and lists at all levels, of arrays and tensors.

    Other objects are not copied.
    """
    for item in closable(batches):
        yield item._replace(batch=_copy(item.batch)) if isinstance(item, WithState | WithLeftOut) else _copy(item)
        del item  # not kept while the stream makes the next one


def _copy(value: Any) -> Any:
    kind = value.__class__
    if kind is dict:
        return {key: _copy(part) for key, part in value.items()}
    if kind is list:
        return value.copy() if _PLAIN.issuperset(map(type, value)) else [_copy(part) for part in value]
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return value.copy("K")
    if isinstance(value, torch.Tensor):
        return _copy_of_tensor(value)
    if isinstance(value, Mapping):
        return _of_its_kind(value, {key: _copy(part) for key, part in value.items()})
    if kind is tuple or kind is deque:
        return kind(map(_copy, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_copy, value))
    if isinstance(value, memoryview):
        return np.array(value).data
    return copy.copy(value) if isinstance(value, _FILLED_AGAIN) else value


def _copy_of_tensor(value: torch.Tensor) -> torch.Tensor:
    tensor = value.detach()
    try:  # NumPy copies in this thread; `clone` shares the threads with the model that runs meanwhile
        tensor = torch.from_numpy(tensor.numpy().copy("K")) if value.__class__ is torch.Tensor else tensor.clone()
    except (TypeError, RuntimeError):  # NumPy has no such dtype or layout, or the tensor is on a device
        tensor = tensor.clone()
    return tensor.requires_grad_(value.requires_grad)


def _of_its_kind(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with these parts; a dict if the mapping cannot be copied."""
    try:
        container = copy.copy(value)
    except Exception:  # for example a view of a mapping
        return parts
    if isinstance(container, MutableMapping):
        for key, part in parts.items():
            if container.get(key) is not part:
                container[key] = part
    return container
