"""Parts of a batch: the rows of its sources, and the outputs of the parts joined to those of the batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.errors import StreamError
from emrun.base.sources import changed, is_nested, length

Weight = float | Tensor
"""What examples count in a mean: their number, or the sum of their weights."""

_WAITS = object()  # in place of a variable that was not read yet


class Joined:
    """Joins the outputs of the parts of a batch.

    Args:
        key: why the batch has parts, for messages: the key of the config, or the ranks.
        what: what the parts are, for messages.
    """

    def __init__(self, key: str, what: str) -> None:
        self._key = key
        self._what = what
        self.counts: list[int] = []
        """The numbers of examples of the parts, that of the current one included."""
        self._parts: list[dict[str, Any]] = []
        self._weights: list[Weight] = []

    def add(self, outputs: Mapping[str, Any], weight: Weight) -> None:
        """Add the outputs of the current part.

        Args:
            outputs: output name -> value.
            weight: what the scalars of the part count in the means.
        """
        self._parts.append(changed(outputs, detached))
        self._weights.append(weight)

    def outputs(self) -> dict[str, Any]:
        """Return the outputs of the parts that were added: one entry for each example, or the mean of scalars.

        Raises:
            StreamError: an output is neither, or a part does not have it.
        """
        return self._mappings("", self._parts, self._weights)  # type: ignore[no-any-return]

    def on_demand(self) -> OnDemand:
        """Return the outputs, each of which is joined when it is read; an error is raised then."""

        def joined(name: str) -> Any:
            parts = [{name: part[name]} if name in part else {} for part in self._parts]
            return self._mappings("", parts, self._weights)[name]

        return OnDemand(dict.fromkeys(name for part in self._parts for name in part), joined)

    def with_last(self, outputs: Mapping[str, Any], weight: Weight) -> dict[str, Any]:
        """Return the outputs of the parts that were added and of the current one, which is not added."""
        return self._mappings("", [*self._parts, changed(outputs, detached)], [*self._weights, weight])  # type: ignore[no-any-return]

    def _mappings(self, path: str, parts: Sequence[Mapping[str, Any]], weights: Sequence[Weight]) -> Any:
        for name in dict.fromkeys(name for part in parts for name in part):
            if any(name not in part for part in parts):
                raise StreamError(f"{self._key}: only some parts of the batch have the output {path + name!r}")
        return {name: self._join(f"{path}{name}", [part[name] for part in parts], weights) for name in parts[0]}

    def _join(self, name: str, values: list[Any], weights: Sequence[Weight]) -> Any:
        """Return the output of a batch.

        Raises:
            StreamError: the values are neither one entry for each example nor one number for the part.
        """
        first = values[0]
        if all(isinstance(value, Mapping) for value in values):
            return self._mappings(f"{name}.", values, weights)
        if all(value is None for value in values):
            return None
        if all(_is_number(value) for value in values):
            return mean(
                [value.item() if isinstance(value, np.generic | np.ndarray) else value for value in values], weights
            )
        if [length(value) for value in values] == self.counts:
            if all(map(is_nested, values)):
                return torch.nested.as_nested_tensor(
                    [row for value in values for row in value.unbind()], layout=first.layout
                )
            try:
                if all(isinstance(value, Tensor) for value in values):
                    return torch.cat(_padded(values))
                if all(isinstance(value, np.ndarray) for value in values):
                    return np.concatenate(_padded(values))
            except (RuntimeError, ValueError, TypeError) as error:
                raise StreamError(
                    f"{self._key}: the output {name!r} of the parts of a batch cannot be joined: {error}"
                ) from error
            if all(isinstance(value, list | tuple) for value in values):
                return [entry for value in values for entry in value]
        shape = getattr(first, "shape", None)
        what = f"a {type(first).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise StreamError(
            f"{self._key}: the output {name!r} is {what} for a part of {self.counts[0]} examples; with {self._what}, "
            "an output must be a number, or have one entry per example; leave other outputs out with model.outputs",
            first_batch=True,
        )


class OnDemand(UserDict[str, Any]):
    """The data of a batch, in which each variable is calculated when it is read for the first time.

    Args:
        names: the names of the variables.
        calculate: returns a variable.
    """

    def __init__(self, names: Iterable[str], calculate: Callable[[str], Any]) -> None:
        super().__init__()
        self.data = dict.fromkeys(names, _WAITS)
        self._calculate = calculate

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is _WAITS:
            self.data[name] = self._calculate(name)
        return self.data[name]


def _padded(values: list[Any]) -> list[Any]:
    """Return tensors or arrays that are padded with zeros to the longest of them, as a batch would be."""
    shapes = [value.shape[1:] for value in values]
    if len(set(shapes)) == 1 or len({len(shape) for shape in shapes}) > 1:
        return values
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = []
    for value in values:
        shape = (len(value), *longest)
        whole = value.new_zeros(shape) if isinstance(value, Tensor) else np.zeros(shape, value.dtype)
        whole[tuple(slice(size) for size in value.shape)] = value
        padded.append(whole)
    return padded


def split(inputs: Mapping[str, Any], examples: int, most: int) -> list[tuple[dict[str, Any], int]]:
    """Return the parts of a batch and their numbers of examples, which differ by at most one.

    Args:
        inputs: source name -> tensor, nested tensor, mapping of these, or another sequence; None stays None.
        examples: the number of examples.
        most: the largest number of examples of a part.
    """
    number = -(-examples // most)
    counts = [examples // number + (index < examples % number) for index in range(number)]
    ends = pairwise((0, *accumulate(counts)))
    parts = ({name: rows_of(values, begin, end) for name, values in inputs.items()} for begin, end in ends)
    return list(zip(parts, counts, strict=True))


def weighted(values: Any, weights: Weight) -> Any:
    """Return values times their weights; 0 where the weight is 0, for NaN too, and so are the gradients.

    Args:
        values: a number or a tensor, such as a loss, which is NaN as the mean over no examples.
        weights: a number, or a tensor whose shape fits the values.
    """
    if isinstance(weights, Tensor):
        return torch.where(weights != 0, values * weights, 0.0)
    return values * weights if weights else 0.0


def weighs_nothing(outputs: Mapping[str, Any]) -> bool:
    """Return whether the examples of a batch all have the weight 0, so that its loss is NaN; waits for the device."""
    weights = loss_weights(outputs)
    return isinstance(weights, Tensor | np.ndarray) and not weights.any()


def loss_weights(outputs: Mapping[str, Any]) -> Any:
    """Return the weights of the examples in the loss that is minimised, of shape (B,); None if they count alike."""
    return outputs.get("loss_weight", outputs.get("example_weight"))


def weight_of(outputs: Mapping[str, Any], examples: int) -> Any:
    """Return what the scalars of some examples count in means: the number of examples, or the sum of their weights."""
    weights = outputs.get("example_weight")
    return examples if weights is None else torch.as_tensor(weights).detach().sum()


def mean(values: Sequence[Any], weights: Sequence[Weight]) -> Any:
    """Return the weighted mean of numbers or one-element tensors; those of weight 0 do not count, also if NaN."""
    return sum(map(weighted, values, weights)) / sum(weights)


def rows_of(values: Any, begin: int, end: int) -> Any:
    """Return some rows of a source: of a tensor, a nested tensor, an array, a mapping of these, or another sequence."""
    if values is None:
        return None
    if isinstance(values, Mapping):
        return {name: rows_of(part, begin, end) for name, part in values.items()}
    if is_nested(values):
        return torch.nested.as_nested_tensor(list(values.unbind()[begin:end]), layout=values.layout)
    return values[begin:end]


def detached(value: Any) -> Any:
    """Return a tensor without its gradient, any other value as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not is_nested(value) and value.dim() == 0
    return isinstance(value, Real | np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
