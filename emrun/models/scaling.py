"""Sources that are scaled on the device, such as the bytes of images: divided, shifted, and divided once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.types import Values

KEYS = ("scale", "mean", "std")
"""The keys of an input, in the order in which they apply."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a source becomes floating-point values: (x / scale - mean) / std, in float32, then in the dtype.

    Args:
        steps: (a key, one value for all channels or one for each).
        dtype: the dtype of the result; None for that of the module.
    """

    steps: tuple[tuple[str, tuple[float, ...]], ...]
    dtype: torch.dtype | None = None

    @classmethod
    def read(cls, parameter: str, entry: Values, dtype: Any) -> Scaling | None:
        """Return the scaling of an entry of `inputs`; None if it has none.

        Raises:
            ArgumentError: a value is not a number, or is a divisor of 0; or the dtype has no fractions.
        """
        steps = tuple((key, _numbers(parameter, key, entry[key])) for key in KEYS if key in entry)
        if not steps:
            return None
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ArgumentError(
                "inputs",
                f"{parameter}: {steps[0][0]} gives floating-point numbers; leave out dtype, or write for example"
                " float16",
            )
        return cls(steps, dtype)

    def of(self, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a scaled copy of a source whose second axis is that of the channels, in a dtype unless it has its own.

        Raises:
            StreamError: the source has another number of channels.
        """
        found = source.to(torch.float32, copy=True)
        for key, values in self.steps:
            by: Tensor | float = values[0]
            if len(values) > 1:
                if found.dim() < 2 or found.shape[1] != len(values):
                    raise StreamError(
                        f"model.inputs: {key} has {len(values)} values, but {name!r} is "
                        f"a source of shape {tuple(found.shape)}, whose second axis is that of the channels"
                    )
                by = _along_channels(values, found.device, found.dim())
            found = found.sub_(by) if key == "mean" else found.div_(by)
        return found.to(self.dtype or dtype)


@lru_cache(maxsize=16)
def _along_channels(values: tuple[float, ...], device: torch.device, dimensions: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, *[1] * (dimensions - 2))


def _numbers(parameter: str, key: str, value: Any) -> tuple[float, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    values = tuple(value) if is_list else (value,)
    for each in values or (None,):
        check_number(f"inputs.{parameter}.{key}", each, "a number; write a number, or a list with one for each channel")
        if key != "mean" and not each:
            raise ArgumentError(f"inputs.{parameter}.{key}", f"{value!r} would divide by 0")
    return tuple(map(float, values))
