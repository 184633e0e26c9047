"""The values of a source, example by example, and whether the first batches of a stream are a fair sample of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from emrun.base.sources import is_nested

_FEWEST = 10  # values; fewer may be sorted by chance


def array_of(values: Any) -> Any:
    """Return values as an array of numbers; None if they are not numbers, or not of one shape."""
    if is_nested(values):
        return None
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().to_dense().resolve_conj().resolve_neg()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    return None


def not_finite(values: Any) -> Sequence[int]:
    """Return the indices of examples with NaN or infinity."""
    array = array_of(values)
    if array is not None:
        if array.dtype.kind not in "fc" or np.isfinite(array).all():
            return ()
        return [int(index) for index in np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))]
    entries = values.unbind() if is_nested(values) else values
    return [index for index, entry in enumerate(entries) if _has_gap(entry)]


def _has_gap(value: Any) -> bool:
    if isinstance(value, float | complex | np.inexact):
        return not np.isfinite(value)
    if isinstance(value, list | tuple):
        return any(map(_has_gap, value))
    array = array_of(value)
    return array is not None and array.dtype.kind in "fc" and not np.isfinite(array).all()


def scalars(values: Any) -> list[Any] | None:
    """Return a whole number, a truth value or a text for each example; None for other values."""
    array = array_of(values)
    if array is not None:
        return array.tolist() if array.ndim == 1 and array.dtype.kind in "biuUS" else None
    known = str, int, np.integer
    if isinstance(values, np.ndarray | list | tuple) and all(isinstance(value, known) for value in values):
        return [value.item() if isinstance(value, np.generic) else value for value in values]
    return None


def sorted_sources(batches: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the sources with one whole number for each example, such as labels, that are in ascending order.

    A source in which every value is another one, such as the number of the example, is left out.
    """
    by_source: dict[str, list[Any]] = {}
    for batch in batches:
        for name, values in batch.items():
            by_source.setdefault(name, []).append(_whole_numbers(values))
    names = []
    for name, arrays in by_source.items():
        if all(array is not None for array in arrays):
            values = np.concatenate(arrays)
            steps = values[1:] >= values[:-1]
            if len(values) >= _FEWEST and steps.all() and len(np.unique(values)) < len(values):
                names.append(name)
    return names


def _whole_numbers(values: Any) -> Any:
    """Return an array of shape (examples,), or None for other values."""
    array = np.asarray(scalars(values) or ())
    return array if array.dtype.kind in "iu" else None
