"""Statistics of a variable over many batches, in constant memory and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.epoch_data import RUNNING
from emrun.ranks.parts import weighted

_CAPACITY = 8192  # values per reduction, which costs about ten small operations
_MOST = 1024  # batches per reduction; a tensor takes more memory than the scalar in it
_DEVICE = attrgetter("device")
_EXACT = (torch.float32, torch.float64)  # copied in their own dtype; the reduction converts them to double precision
_TOTALS: dict[str, Callable[[Tensor, Any, Any, dict[str, Tensor]], Tensor]] = {
    "sum": lambda values, repeats, weights, new: (values * repeats).sum(),
    "nancount": lambda values, repeats, weights, new: (values.isnan().to(values.dtype) * repeats).sum(),
    "min": lambda values, repeats, weights, new: values.min(),
    "max": lambda values, repeats, weights, new: values.max(),
    "squares": lambda values, repeats, weights, new: weighted(
        (values - new["weighted"] / _at_least_tiny(new["weight"])).square(), weights
    ).sum(),
}
"""Total -> its value for many values, each of which is there `repeats` times, by their `weight` and `weighted` sum."""
_COMBINED = {"min": torch.minimum, "max": torch.maximum}  # other totals of two parts are added
_RESULTS: dict[str, tuple[str, Callable[[dict[str, Tensor], int], float]]] = {
    "mean": ("weighted", lambda totals, count: float(totals["weighted"] / totals["weight"])),
    "var": ("squares", lambda totals, count: float(totals["squares"] / totals["weight"])),
    "std": ("squares", lambda totals, count: float(totals["squares"] / totals["weight"]) ** 0.5),
    "nancount": ("nancount", lambda totals, count: int(totals["nancount"])),
    "nanfraction": ("nancount", lambda totals, count: float(totals["nancount"]) / count),
    "sum": ("sum", lambda totals, count: float(totals["sum"])),
    "min": ("min", lambda totals, count: float(totals["min"])),
    "max": ("max", lambda totals, count: float(totals["max"])),
}
"""Aggregation -> the total that it needs, and its value for totals over a number of values."""


class RunningStats:
    """Collects the values of a variable batch by batch and returns their statistics.

    Each batch costs one copy, on the device of the values. Many values are reduced together, in double precision
    (single precision on a device without doubles). Nothing waits for the device before `result`, except for scalars
    with weights, once in 1,024 batches. The variance is combined from those of the parts by the method of Chan, Golub
    and LeVeque (1983).

    Args:
        aggregations: names from `RUNNING`, or names of NumPy functions, which are called with all values at once.
    """

    def __init__(self, aggregations: Sequence[str]) -> None:
        self._aggregations = tuple(aggregations)
        needed = {_RESULTS[name][0] for name in aggregations if name in _RESULTS}
        self._needed = [(name, total) for name, total in _TOTALS.items() if name in needed]
        self._collects = any(name not in RUNNING for name in aggregations)
        self._shape: torch.Size | None = None  # of the previous values
        self._length = 0  # of the previous batch
        self._is_scalar = False
        self._is_weighted = False
        self._device = torch.device("cpu")
        self._precision = torch.double
        self._values: list[Any] = []  # not reduced yet: tensors of one dimension, or scalars, on the CPU as floats
        self._as_floats = False
        self.source: Any = None
        """The values that were added last, as they were given."""
        self._fill = 0  # number of values that are not reduced yet
        self._lengths: list[int] = []  # of the batches that are not reduced yet
        self._weights: list[Tensor] = []
        self._count = 0  # of the values that are reduced
        self._totals: dict[str, Tensor] = {}
        self._collected: list[Tensor] = []
        self._followers: list[RunningStats] = []
        self._other: RunningStats | None = None  # that this one follows
        self._seen = 0  # how many batches of the other one, since its last reduction, were taken

    def add(self, value: Any, length: int, weights: Any = None) -> None:
        """Add the values of a batch.

        Args:
            value: of shape (B, ...), or a scalar, which counts B times.
            length: B, the number of examples in the batch.
            weights: of shape (B,), or None.

        Raises:
            ValueError: the first axis of the value or of the weights is not the batch, or only some batches have
                scalars or weights.
            TypeError: the value is not a real number.
        """
        given = value
        self.source = None
        if value.__class__ is not Tensor or value.requires_grad:
            value = _tensor(value)
        shape = value.shape
        if shape != self._shape or length != self._length or weights is not None or self._is_weighted:
            weights = self._check(value, length, weights)
        if self._as_floats:
            self._hold(float(value), 1, length, weights)
        else:
            flat = value if len(shape) < 2 else value.flatten()
            copy = flat.clone() if flat.dtype in _EXACT else flat.to(self._precision, copy=True)
            self._hold(copy, flat.numel(), length, weights)
        self.source = given

    def _hold(self, values: Tensor | float, n: int, length: int, weights: Tensor | None) -> None:
        """Keep the copied values of a batch, of which there are n, until they are reduced."""
        if len(self._lengths) == _MOST or self._fill + n > _CAPACITY:
            self._reduce()
        self._values.append(values)
        self._lengths.append(length)
        self._fill += n
        if weights is not None:
            self._weights.append(weights)

    def follow(self, other: RunningStats) -> None:
        """Take the values that were added to another object last, and all that follow, without copying them again."""
        self._other = other
        self._seen = len(other._lengths) - 1
        other._followers.append(self)

    def begin_anew(self) -> bool:
        """Drop what was added before the last result; return whether this follows another object."""
        self._totals = {}
        self._count = 0
        self._collected = []
        return self._other is not None

    def _pull(self) -> None:
        """Take what was added to the object that this one follows."""
        other = self._other
        new = 0 if other is None else len(other._lengths) - self._seen
        if other is None or not new:
            return
        if self._shape is None:
            self._begin(other._device, other._is_scalar)
        self._seen += new
        self._is_weighted = other._is_weighted
        values = other._values[-new:]
        lengths = other._lengths[-new:]
        weights = other._weights[-new:]
        counts = [1] * new if self._is_scalar else list(map(Tensor.numel, values))
        n = sum(counts)
        if len(self._lengths) + new > _MOST or self._fill + n > _CAPACITY:  # with reductions as if added one by one
            for batch in zip(values, counts, lengths, weights or repeat(None), strict=False):
                self._hold(*batch)
            return
        self._values += values
        self._lengths += lengths
        self._weights += weights
        self._fill += n

    def _check(self, value: Tensor, length: int, weights: Any) -> Tensor | None:
        """Check values of another form than the previous ones and remember the form; return a weight per value."""
        is_scalar = value.dim() == 0
        if value.is_complex():
            raise TypeError("is complex, not a real number")
        if self._shape is None:
            self._begin(value.device, is_scalar)
        if is_scalar is not self._is_scalar:
            raise ValueError("is a scalar in some batches and has one entry per example in others")
        if not is_scalar and value.shape[0] != length:
            raise ValueError(f"has {value.shape[0]} entries, but the batch has {length} examples")
        weight = None if weights is None else _tensor(weights)
        if weight is not None and weight.shape != (length,):
            raise ValueError(f"has weights of shape {tuple(weight.shape)}, but the batch has {length} examples")
        if (self._count or self._lengths) and (weight is not None) is not self._is_weighted:
            raise ValueError("has weights in some batches, but not in others")
        self._is_weighted = weight is not None
        self._shape = value.shape
        self._length = length
        if weight is None:
            return None
        weight = weight.to(self._device, self._precision)
        return weight.sum()[None] if is_scalar else weight.repeat_interleave(value.numel() // length)

    @property
    def count(self) -> int:
        """The number of values."""
        self._pull()
        return self._count + (sum(self._lengths) if self._is_scalar else self._fill)

    def result(self) -> dict[str, float]:
        """Return aggregation -> number; this waits for the device."""
        self._pull()
        self._reduce()
        collected = torch.cat(self._collected).cpu().numpy() if self._collected else np.empty(0)
        return {name: self._aggregate(name, collected) for name in self._aggregations}

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far, without a reduction, which would change the last bits of the result."""
        self._pull()
        return {
            "device": str(self._device) if self._shape is not None else None,
            "values": self._joined() if self._lengths else None,
            "is_scalar": self._is_scalar,
            "is_weighted": self._is_weighted,
            "lengths": list(self._lengths),
            "weights": list(self._weights),
            "count": self._count,
            "totals": dict(self._totals),
            "collected": list(self._collected),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on the same device."""
        if state["device"] is None:
            return
        self._begin(torch.device(state["device"]), state["is_scalar"])
        self._is_weighted = state["is_weighted"]
        values = state["values"]
        if values is not None:
            self._fill = values.numel()
            values = values.to(self._device)
            if self._as_floats:
                self._values = values.tolist()
            else:
                self._values = list(values) if self._is_scalar else [values]
        self._lengths = list(state["lengths"])
        self._count = state["count"]
        self._weights = [weights.to(self._device) for weights in state["weights"]]
        self._totals = {name: total.to(self._device) for name, total in state["totals"].items()}
        self._collected = [part.to(self._device) for part in state["collected"]]

    def merge(self, state: dict[str, Any]) -> None:
        """Add the values of another object with the same aggregations, from its state."""
        other = RunningStats(self._aggregations)
        other.load_state_dict(state)
        if not other.count:
            return
        if self._shape is None:
            self._begin(other._device, other._is_scalar)
            self._is_weighted = other._is_weighted
        self._reduce()
        other._reduce()
        self._totals = _combine(self._totals, {name: total.to(self._device) for name, total in other._totals.items()})
        self._count += other._count
        self._collected += [values.to(self._device) for values in other._collected]

    def _begin(self, device: torch.device, is_scalar: bool) -> None:
        self._device = device
        self._is_scalar = is_scalar
        self._precision = torch.float if device.type == "mps" else torch.double
        self._as_floats = is_scalar and device.type == "cpu"
        self._shape = torch.Size([-1])  # different from every shape

    def _joined(self) -> Tensor:
        """Return a copy of the values that are not reduced yet, of shape (values,)."""
        values = self._values
        device = self._device
        if self._as_floats:
            return torch.tensor(values, dtype=self._precision)
        if {*map(_DEVICE, values)} != {device}:
            values = [value.to(device) for value in values]
        return (torch.stack if self._is_scalar else torch.cat)(values).to(self._precision)

    def _reduce(self) -> None:
        """Add the collected values to the totals and drop them."""
        for follower in self._followers:
            follower._pull()
            follower._seen = 0
        values = self._joined() if self._fill else None
        lengths = self._lengths
        weights = self._weights
        self._count += sum(lengths) if self._is_scalar else self._fill
        self._values = []
        self._lengths = []
        self._weights = []
        self._fill = 0
        if values is None:
            return
        repeats: Any = values.new_tensor(np.array(lengths)) if self._is_scalar else 1.0
        weight_of = torch.cat(weights) if weights else repeats
        if weights and self._is_scalar:  # those of batches without weight are means over nothing
            has_weight = weight_of != 0
            values = values[has_weight]
            repeats = repeats[has_weight]
            weight_of = weight_of[has_weight]
        if not len(values):
            return
        if self._collects:
            self._collected.append(values.repeat_interleave(repeats.long()) if self._is_scalar else values)
        weight = weight_of.sum() if isinstance(weight_of, Tensor) else values.new_tensor(float(len(values)))
        new = {"weight": weight, "weighted": weighted(values, weight_of).sum()}
        for name, total in self._needed:
            new[name] = total(values, repeats, weight_of, new)
        self._totals = _combine(self._totals, new)

    def _aggregate(self, name: str, collected: Any) -> float:
        if name == "count":
            return self._count
        if not self._totals:
            return 0 if name in ("sum", "nancount") else float("nan")
        if name not in RUNNING:
            return float(getattr(np, name)(collected))
        return _RESULTS[name][1](self._totals, self._count)


def _combine(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the totals of all values from those of two parts, either of which may be empty."""
    if not old or not new:
        return old or new
    combined = {name: _COMBINED.get(name, torch.add)(old[name], value) for name, value in new.items()}
    if "squares" in new:
        share = new["weight"] / _at_least_tiny(combined["weight"])
        difference = new["weighted"] / _at_least_tiny(new["weight"]) - old["weighted"] / _at_least_tiny(old["weight"])
        combined["squares"] = combined["squares"] + difference.square() * old["weight"] * share
    return combined


def _at_least_tiny(weight: Tensor) -> Tensor:
    """Return a divisor that is not 0, as all weights may be 0."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny)


def _tensor(value: Any) -> Tensor:
    """Return a value as a tensor, without a copy if possible."""
    if value.__class__ is Tensor:
        return value.detach() if value.requires_grad else value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        shareable = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return torch.from_numpy(value if shareable else value.copy())
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"is {type(value).__name__} of dtype {array.dtype}, not a number")
    return torch.as_tensor(array.astype(np.float64))
