"""Flatten variables: all numbers of a batch in one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.errors import ArgumentError, StreamError
from emrun.base.sources import is_nested
from emrun.hooks._parts.columns import missing
from emrun.hooks._parts.streams import OfStreams


class Flatten(OfStreams):
    """Adds the entries of a variable in one sequence to each batch, for the hooks that follow.

        hooks:
          - Flatten: {variables: {label: label_flat}}
          - AccumulateVariables: {variables: [label_flat]}

    For example, the lists of different lengths `[[1, 2], [], [3]]` become `[1, 2, 3]`. Tensors and arrays of any shape
    get one axis, and so do nested tensors of torch; lists of numbers become an array, and lists with strings remain
    lists. The order of the entries is kept. A hook that needs one value for each example, such as `ComputeStats`,
    cannot read the sequence.

    Args:
        variables: source or output -> the name for its entries.
        streams: the streams whose batches are changed; by default all.

    Raises:
        ArgumentError: an argument has another form, or two variables would get the same name.
        HookError: the dataset does not have one of `streams`.
        StreamError: a batch does not have a variable, has something under the new name, or the variable is a mapping.
    """

    every_rank = True

    def __init__(self, variables: Mapping[str, str], streams: Sequence[str] | None = None) -> None:
        is_mapping = isinstance(variables, Mapping) and bool(variables)
        if not is_mapping or not all(isinstance(each, str) and each for pair in variables.items() for each in pair):
            raise ArgumentError("variables", f"{variables!r} is not a mapping of names such as {{label: label_flat}}")
        names = list(variables.values())
        for name in names:
            if names.count(name) > 1 or name in variables:
                what = "two variables would get this name" if names.count(name) > 1 else "it is flattened itself"
                raise ArgumentError("variables", f"{name!r}: {what}; choose another name")
        super().__init__(streams, tuple(variables))
        self._variables = dict(variables)
        self.adds = tuple(names)

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the entries of the variables to a batch."""
        if not self.looks_at(stream_name):
            return
        for name, new in self._variables.items():
            if name not in batch_data:
                message = missing(name, batch_data)
            elif new in batch_data:
                message = f"a batch has a variable {new!r} already; choose another name"
            elif isinstance(batch_data[name], Mapping):
                message = f"{name!r} is a mapping, which has no order"
            else:
                batch_data[new] = _flat(batch_data[name])
                continue
            raise StreamError(f"stream {stream_name!r}: Flatten: {message}", first_batch=True)


def _flat(value: Any) -> Any:
    """Return the entries of a value: a tensor or an array with one axis, or a list with strings."""
    found = _entries(value)
    if isinstance(found, list):
        array = np.asarray(found) if not any(isinstance(each, str | bytes) for each in found) else None
        return array if array is not None and array.dtype.kind in "biufc" else found
    return found


def _entries(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([each.reshape(-1) for each in value.unbind()]) if is_nested(value) else value.reshape(-1)
    if isinstance(value, np.ndarray):
        return value.reshape(-1)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return [value]
    parts = [_entries(each) for each in value]
    if parts and all(isinstance(each, Tensor) for each in parts):
        return torch.cat(parts)
    return [entry for part in parts for entry in (part.tolist() if isinstance(part, Tensor) else part)]
