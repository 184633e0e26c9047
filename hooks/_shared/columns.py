"""The values of a batch as columns on the host: arrays, or lists of values whose shapes differ."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError
from emrun.base.sources import is_nested
from emrun.base.wording import did_you_mean, listed
from emrun.dataset import classes_of

Column = np.ndarray[Any, Any] | list[Any]
"""The values of a batch: an array of shape (B, ...), or a list of B strings, lists or arrays of different shapes."""


def column(value: Any) -> Column:
    """Return the values of a source or an output as a column, on the host; bfloat16 becomes float32.

    Raises:
        TypeError: the values are neither numbers nor strings.
        ValueError: a string cannot be encoded in UTF-8.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        if is_nested(value):
            return [column(example) for example in value.unbind()]
        value = value.cpu()
        return np.asarray((value.float() if value.dtype is torch.bfloat16 else value).numpy())
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            return value
        return [_entry(entry) for entry in value.tolist()]
    entries = [_entry(entry) for entry in value]
    shapes = {entry.shape if isinstance(entry, np.ndarray) else None for entry in entries}
    if len(shapes) == 1 and None not in shapes:
        return np.stack(entries)
    return entries


def _entry(value: Any) -> Any:
    """Return the value of an example: a string, an array of numbers, or a list of those."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value!r} has a lone surrogate, which cannot be written to a file") from None
        return str(value)
    if isinstance(value, list | tuple):
        if value and any(isinstance(item, str | list | tuple) for item in value):
            return [_entry(item) for item in value]
        value = np.asarray(value, dtype=None if len(value) else np.float64)
    array = column(value) if isinstance(value, Tensor) else np.asarray(value)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        raise TypeError(f"it has values of the type {type(value).__name__}, which are neither numbers nor strings")
    return array


def missing(name: str, batch: Mapping[str, Any]) -> str:
    """Return the text of the error that a batch does not have a variable."""
    return f"a batch has no variable {name!r}{did_you_mean(name, list(batch))} (it has {listed(list(batch))})"


def csv_of(rows: Iterable[Iterable[Any]], **how: Any) -> bytes:
    """Return rows as CSV, written as the arguments of `csv.writer` say; half a character is written as `\\udcff`."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", **how).writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


def names_of_classes(argument: str, given: Sequence[str] | None, dataset: Any, variable: str) -> Sequence[str] | None:
    """Return the names of the classes: those that are given, or those of the dataset; None if there are none.

    Raises:
        ArgumentError: those that are given are not a list of different names.
    """
    if given is None:
        return None if dataset is None else classes_of(dataset, variable)
    check_names(argument, given)
    twice = next((name for index, name in enumerate(given) if name in given[:index]), None)
    if not given or "" in given or twice is not None:
        raise ArgumentError(
            argument, f"the list {'needs a name for each class' if twice is None else f'has {twice!r} twice'}"
        )
    return given


def plain(values: Column) -> list[Any]:
    """Return a column as a list with plain Python values."""
    if isinstance(values, np.ndarray):
        return values.tolist()  # type: ignore[no-any-return]
    return [entry if isinstance(entry, str) else plain(entry) for entry in values]
