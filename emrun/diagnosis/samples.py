"""Whether the first batches of a stream are a fair sample of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from emrun.diagnosis.values import scalars

_FEWEST = 10  # values; fewer may be sorted by chance


def sorted_sources(batches: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the sources with one whole number for each example, such as labels, that are in ascending order.

    A source in which every value is another one, such as the number of the example, is left out.
    """
    parts: dict[str, list[Any]] = {}
    for batch in batches:
        for name, values in batch.items():
            parts.setdefault(name, []).append(_whole_numbers(values))
    found = []
    for name, arrays in parts.items():
        if all(array is not None for array in arrays):
            values = np.concatenate(arrays)
            steps = values[1:] >= values[:-1]
            if len(values) >= _FEWEST and steps.all() and len(np.unique(values)) < len(values):
                found.append(name)
    return found


def _whole_numbers(values: Any) -> Any:
    """Return an array of shape (examples,), or None for other values."""
    array = np.asarray(scalars(values) or ())
    return array if array.dtype.kind in "iu" else None
