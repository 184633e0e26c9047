"""The examples of a batch that a hook saves: values for each example, ids, and names of files by ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.sources import ID, POSITION, is_nested, length
from emrun.base.wording import counted, did_you_mean, listed
from emrun.hooks._shared.columns import Column, column

_LONGEST = 40  # characters of an id in the name of a file; up to 160 bytes, of the 255 that file systems take


@dataclass
class Examples:
    """The examples of a batch.

    Args:
        owner: the class of the hook, for messages.
        batch: the sources and outputs of the batch.
        count: the number of its examples.
        first: the position of its first example in the stream, from 0.
    """

    owner: str
    batch: Mapping[str, Any]
    count: int
    first: int

    def have(self, name: str) -> bool:
        """Return whether a variable of the batch has a value for each example."""
        try:
            return length(self.batch[name]) == self.count
        except StreamError:  # on several ranks, its parts cannot be joined
            return False

    def column(self, name: str, rows: Sequence[int] | None = None) -> Column:
        """Return the values of a variable on the host.

        Args:
            name: the variable.
            rows: the indices of the examples; None for all.

        Raises:
            StreamError: the batch does not have the variable, it has no value for each example, or the values are
                neither numbers nor strings.
        """
        if name not in self.batch:
            available = list(self.batch)
            raise self.error(
                f"there is no output or source {name!r}{did_you_mean(name, available)} (available: {listed(available)})"
            )
        value = self.batch[name]
        count = length(value)
        if count != self.count:
            has = "one value for the whole batch" if count < 0 else f"{count} values"
            raise self.error(f"{name!r} has {has}, but the batch has {counted(self.count, 'example')}")
        try:
            return column(value if rows is None else _taken(value, rows))
        except (TypeError, ValueError) as error:
            raise self.error(f"cannot write {name!r}: {str(error).splitlines()[0]}") from error

    def ids(self, variable: str | None, rows: Sequence[int] | None = None) -> list[str]:
        """Return what the examples are called: their ids, or their positions in the stream.

        Args:
            variable: the source with the ids; None for `id`, or else positions.
            rows: the indices of the examples; None for all.

        Raises:
            StreamError: the ids are not numbers or strings.
        """
        name, values = self.named(variable, rows)
        if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        plain = values.tolist() if isinstance(values, np.ndarray) else values
        if not all(isinstance(value, str | int | float) for value in plain):
            raise self.error(f"{name!r} has no ids: an id is a string or a number")
        return [str(value) for value in plain]

    def named(self, variable: str | None, rows: Sequence[int] | None = None) -> tuple[str, Column]:
        """Return the name and the values of the column that says which examples these are.

        Args:
            variable: the source with the ids; None for `id`, or else positions in the stream.
            rows: the indices of the examples; None for all.
        """
        if variable is None and ID not in self.batch:
            numbers = self.numbers()
            numbers = self.first + np.arange(self.count) if numbers is None else numbers
            return POSITION, numbers if rows is None else numbers[list(rows)]
        name = ID if variable is None else variable
        return name, self.column(name, rows)

    def numbers(self) -> np.ndarray[Any, Any] | None:
        """Return the numbers of the examples in the data, where some may be left out; None if the stream has none."""
        numbers = self.column(POSITION) if POSITION in self.batch and self.have(POSITION) else None
        is_array = isinstance(numbers, np.ndarray) and numbers.ndim == 1 and numbers.dtype.kind in "iu"
        return numbers if is_array else None  # type: ignore[return-value]

    def error(self, message: str) -> StreamError:
        """Return the error for a batch that the hook cannot use."""
        return StreamError(f"{self.owner}: {message}", first_batch=not self.first)


def _taken(value: Any, rows: Sequence[int]) -> Any:
    """Return the values of some examples; those of a tensor on a device are taken there."""
    if isinstance(value, Tensor) and not is_nested(value):
        return value.detach()[list(rows)]
    if isinstance(value, np.ndarray):
        return value[list(rows)]
    every = value.unbind() if isinstance(value, Tensor) else value
    return [every[row] for row in rows]


def file_stem(name: str) -> str:
    """Return the name of a file for an id, which may be anything: without slashes, not hidden, not too long.

    An id that is changed ends in a part of its SHA-256, so that different ids have different names.
    """
    try:
        if len(name) <= _LONGEST and safe_component("id", name) == name:
            return name
    except ArgumentError:
        pass
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return safe_component("id", f"{name[:_LONGEST]}-{digest}".lstrip("."))
