"""Statistics of a variable over many batches, in constant memory and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

RUNNING = ("mean", "sum", "min", "max", "std", "var", "count", "nancount", "nanfraction")
"""The aggregations that need no more than a few numbers."""

_CAPACITY = 8192  # values; reducing a full buffer costs about ten small operations, copying a batch into it two


class RunningStats:
    """Takes values batch by batch and tells their statistics.

    Values are copied into a buffer on their own device, in double precision (single where the device has no double),
    and reduced when it is full; nothing waits for the device before `result`. The variance is combined from the
    buffers' by the method of Chan, Golub and LeVeque (1983).

    Args:
        aggregations: names out of `RUNNING`, or functions of NumPy, which get all values.
    """

    def __init__(self, aggregations: Sequence[str]) -> None:
        self._aggregations = tuple(aggregations)
        self._spread = any(name in ("std", "var") for name in aggregations)
        self._collects = any(name not in RUNNING for name in aggregations)
        self._is_scalar = False
        self._is_weighted = False
        self._buffer: Tensor | None = None
        self._fill = 0
        self._lengths: list[float] = []  # of the batches that the scalars in the buffer stand for
        self._weights: list[Tensor] = []
        self._count = 0
        self._totals: dict[str, Tensor] = {}
        self._collected: list[Tensor] = []

    def add(self, value: Any, length: int, weights: Any = None) -> None:
        """Take the values of a batch.

        Args:
            value: of shape (B, ...), or a scalar that stands for the whole batch.
            length: B.
            weights: of shape (B,), or None.

        Raises:
            ValueError: the value's or the weights' first axis is not the batch, or there are scalars or weights in
                some batches and not in others.
            TypeError: the value is no real number.
        """
        value = _tensor(value)
        is_scalar = value.dim() == 0
        if self._buffer is None:
            self._begin(value)
        if is_scalar is not self._is_scalar:
            raise ValueError("is a scalar in some batches and has an entry an example in others")
        if not is_scalar and value.shape[0] != length:
            raise ValueError(f"has {value.shape[0]} entries, but the batch has {length} examples")
        weight = None if weights is None else _tensor(weights)
        if weight is not None and weight.shape != (length,):
            raise ValueError(f"has weights of shape {tuple(weight.shape)}, but the batch has {length} examples")
        if self._count and (weight is not None) is not self._is_weighted:
            raise ValueError("has weights in some batches and none in others")
        self._is_weighted = weight is not None
        n = value.numel()
        buffer = self._room_for(n)
        buffer[self._fill : self._fill + n] = value if value.dim() == 1 else value.reshape(-1)
        self._fill += n
        self._count += length if is_scalar else n
        if is_scalar:
            self._lengths.append(length)
        if weight is not None:
            weight = weight.to(buffer)
            self._weights.append(weight.sum()[None] if is_scalar else weight.repeat_interleave(n // length))

    def result(self) -> dict[str, float]:
        """Return aggregation -> number; waits for the device."""
        self._reduce()
        collected = torch.cat(self._collected).cpu().numpy() if self._collected else np.empty(0)
        return {name: self._aggregate(name, collected) for name in self._aggregations}

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken so far; the buffer is not reduced, which would change the last bits of the result."""
        return {
            "device": str(self._buffer.device) if self._buffer is not None else None,
            "capacity": len(self._buffer) if self._buffer is not None else 0,
            "values": self._buffer[: self._fill].clone() if self._buffer is not None else None,
            "is_scalar": self._is_scalar,
            "is_weighted": self._is_weighted,
            "lengths": list(self._lengths),
            "weights": list(self._weights),
            "count": self._count,
            "totals": dict(self._totals),
            "collected": list(self._collected),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, to the device where it was."""
        if state["device"] is None:
            return
        values = state["values"].to(state["device"])
        self._fill = len(values)
        self._buffer = values.new_empty(state["capacity"])
        self._buffer[: self._fill] = values
        self._is_scalar, self._is_weighted = state["is_scalar"], state["is_weighted"]
        self._lengths, self._count = list(state["lengths"]), state["count"]
        self._weights = [each.to(values.device) for each in state["weights"]]
        self._totals = {name: each.to(values.device) for name, each in state["totals"].items()}
        self._collected = [each.to(values.device) for each in state["collected"]]

    def _begin(self, value: Tensor) -> None:
        if value.is_complex():
            raise TypeError("complex numbers have no statistics")
        dtype = torch.float32 if value.device.type == "mps" else torch.float64
        self._buffer = torch.empty(_CAPACITY, dtype=dtype, device=value.device)
        self._is_scalar = value.dim() == 0

    def _room_for(self, n: int) -> Tensor:
        """Return the buffer with room for `n` more values."""
        assert self._buffer is not None  # `add` began it
        if self._fill + n > len(self._buffer):
            self._reduce()
            if n > len(self._buffer):
                self._buffer = self._buffer.new_empty(n)
        return self._buffer

    def _reduce(self) -> None:
        """Add what is in the buffer to the totals, and empty it."""
        if not self._fill or self._buffer is None:
            return
        values = self._buffer[: self._fill]
        if self._collects:
            self._collected.append(values.clone())
        repeats = values.new_tensor(self._lengths) if self._is_scalar else torch.ones_like(values)
        weights = torch.cat(self._weights) if self._weights else repeats
        weight, weighted = weights.sum(), (weights * values).sum()
        mean = weighted / _at_least_tiny(weight)
        new = {
            "sum": (values * repeats).sum(),
            "nancount": (values.isnan() * repeats).sum(),
            "min": values.min(),
            "max": values.max(),
            "weight": weight,
            "weighted": weighted,
            "squares": (weights * (values - mean).square()).sum() if self._spread else weight,
        }
        self._totals = _combine(self._totals, new) if self._totals else new
        self._fill = 0
        self._lengths, self._weights = [], []

    def _aggregate(self, name: str, collected: Any) -> float:
        if name == "count":
            return self._count
        if name not in RUNNING:
            return float(getattr(np, name)(collected))
        totals = self._totals
        if not totals:
            return 0 if name in ("sum", "nancount") else float("nan")
        if name == "mean":
            return float(totals["weighted"] / totals["weight"])
        if name in ("std", "var"):
            variance = float(totals["squares"] / totals["weight"])
            return variance if name == "var" else variance**0.5
        if name == "nancount":
            return int(totals["nancount"])
        return float(totals["nancount"]) / self._count if name == "nanfraction" else float(totals[name])


def _combine(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = old["weight"] + new["weight"]
    share = new["weight"] / _at_least_tiny(weight)
    difference = new["weighted"] / _at_least_tiny(new["weight"]) - old["weighted"] / _at_least_tiny(old["weight"])
    return {
        "sum": old["sum"] + new["sum"],
        "nancount": old["nancount"] + new["nancount"],
        "min": torch.minimum(old["min"], new["min"]),
        "max": torch.maximum(old["max"], new["max"]),
        "weight": weight,
        "weighted": old["weighted"] + new["weighted"],
        "squares": old["squares"] + new["squares"] + difference.square() * old["weight"] * share,
    }


def _at_least_tiny(weight: Tensor) -> Tensor:
    """Return what to divide by: examples may weigh nothing."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny)


def _tensor(value: Any) -> Tensor:
    """Return a value as a tensor, without a copy where that is possible."""
    if value.__class__ is Tensor:
        return value.detach() if value.requires_grad else value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        shareable = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return torch.from_numpy(value if shareable else value.copy())
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"is no number, but {type(value).__name__} of {array.dtype}")
    return torch.as_tensor(array.astype(np.float64))
