"""Flatten variables: all numbers of a batch in one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from emrun.base.errors import ArgumentError, StreamError
from emrun.base.sources import is_nested
from emrun.hooks._shared.columns import missing
from emrun.hooks._shared.streams import OfStreams


class Flatten(OfStreams):
    """Adds the entries of a variable in one sequence to each batch, for the hooks that follow.

        hooks:
          - Flatten: {variables: {label: label_flat}}
          - AccumulateVariables: {variables: [label_flat]}

    For example, the lists of different lengths `[[1, 2], [], [3]]` become an array of `[1, 2, 3]`, and a tensor or an
    array of any shape gets one axis. The order of the entries is kept. A hook that needs one value for each example,
    such as `ComputeStats`, cannot read the sequence.

    Args:
        variables: source or output -> the name for its entries.
        streams: the streams whose batches are changed; by default all.

    Raises:
        ArgumentError: an argument has another form, or two variables would get the same name.
        HookError: the dataset does not have one of `streams`.
        StreamError: a batch does not have a variable, has something under the new name, or the variable is a mapping or
            a nested tensor.
    """

    every_rank = True

    def __init__(self, variables: Mapping[str, str], streams: Sequence[str] | None = None) -> None:
        is_mapping = isinstance(variables, Mapping) and bool(variables)
        if not is_mapping or not all(isinstance(name, str) and name for pair in variables.items() for name in pair):
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
            elif is_nested(batch_data[name]):
                message = f"{name!r} is a nested tensor; return its values() or unbind()"
            else:
                batch_data[new] = _flat(batch_data[name])
                continue
            raise StreamError(f"stream {stream_name!r}: Flatten: {message}", first_batch=True)


def _flat(value: Any) -> Any:
    """Return the entries of a tensor, an array or lists of these: a tensor or an array with one axis."""
    parts = tree_leaves(value) or [np.zeros(0)]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part.reshape(-1) for part in parts])
    return np.concatenate([np.ravel(part) for part in parts])
