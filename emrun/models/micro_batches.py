"""Micro batches: a train batch is run in several parts, whose gradients add up to those of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from emrun.errors import ArgumentError, StreamError
from emrun.models.optimization import Optimization
from emrun.models.size_search import find_size
from emrun.sources import is_nested, length
from emrun.wording import did_you_mean

_LOG = logging.getLogger(__name__)


Step = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Runs the module forward and backward and makes an update; returns the outputs."""


class Trained(Protocol):
    """The model whose batches are split."""

    module: torch.nn.Module
    _optimization: Optimization
    _minimised: Tensor | None


class MicroBatches:
    """Runs the train step of a model once for each part of a batch.

    Args:
        model: the model.
        size: the largest number of examples of a part; `auto` to find it with the first batch.

    Raises:
        ArgumentError: the size is neither a positive number nor `auto`.
    """

    def __init__(self, model: Trained, size: int | Literal["auto"]) -> None:
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            message = f"{size!r} is neither a whole number of at least 1 nor auto{did_you_mean(str(size), ['auto'])}"
            raise ArgumentError("micro_batch_size", message)
        self._model = model
        self.size: int | None = None if size == "auto" else size
        """The largest number of examples of a part; None as long as it is not known."""
        self._joined: Joined | None = None  # the outputs of the parts of the current batch that were run
        self._has_warned = False

    def prepare(self, inputs: Mapping[str, Any], examples: int) -> int | None:
        """Find the size with the first batch, if it is `auto`; return it if it was found now.

        Raises:
            ArgumentError: not even one example fits into the memory, or the model cannot be copied.
        """
        if self.size is not None:
            return None
        self.size = find_size(self._model, inputs, examples)
        return self.size

    def run(self, step: Step, inputs: Mapping[str, Any], examples: int) -> Mapping[str, Any]:
        """Run the train step on the parts of a batch.

        Args:
            step: the train step.
            inputs: source name -> tensor on the model's device, or a mapping of tensors.
            examples: the number of examples of the batch.

        Returns:
            The outputs of the batch; if it has several parts, they are detached. The minimised loss of the model is
            that of the batch.

        Raises:
            StreamError: the outputs of the parts cannot be joined.
        """
        model, optimization = self._model, self._model._optimization
        size = self.size or examples
        if examples <= size:
            optimization.begin_part(examples)
            outputs = step(inputs)
            optimization.end_part()
            return outputs
        if not self._has_warned:
            self._has_warned = True
            _warn_of_batch_norm(model.module)
        _taken(model)
        joined = self._joined = Joined()
        minimised: list[tuple[Tensor, float | Tensor]] = []
        try:
            for part, count in split(inputs, examples, size):
                joined.counts.append(count)
                optimization.begin_part(count, is_last=sum(joined.counts) == examples)
                outputs = step(part)
                optimization.end_part()
                joined.add(outputs, optimization.weight)
                minimised += [(loss.detach(), optimization.weight) for loss in _taken(model)]
                del outputs  # frees the graph, whose memory the next part needs
        finally:
            self._joined = None
        model._minimised = mean(*zip(*minimised, strict=True)) if minimised else None
        return joined.outputs()

    def seen(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what hooks see at an update: the outputs of all parts of the batch, detached.

        Args:
            outputs: those of the current part, which are returned if the window does not end with it.
        """
        if self._joined is None or not self._model._optimization.is_ending:
            return outputs
        return self._joined.with_last(outputs, self._model._optimization.weight)


class Joined:
    """Joins the outputs of the parts of a batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        """The numbers of examples of the parts, that of the current one included."""
        self._parts: list[dict[str, Any]] = []
        self._weights: list[float | Tensor] = []

    def add(self, outputs: Mapping[str, Any], weight: float | Tensor) -> None:
        """Add the outputs of the current part.

        Args:
            outputs: output name -> value.
            weight: what the scalars of the part count in the means.
        """
        self._parts.append(_detached(outputs))
        self._weights.append(weight)

    def outputs(self) -> dict[str, Any]:
        """Return the outputs of the parts that were added: one entry for each example, or the mean of scalars.

        Raises:
            StreamError: an output is neither, or a part does not have it.
        """
        return _join_mappings("", self._parts, self.counts, self._weights)

    def with_last(self, outputs: Mapping[str, Any], weight: float | Tensor) -> dict[str, Any]:
        """Return the outputs of the parts that were added and of the current one, which is not added."""
        return _join_mappings("", [*self._parts, _detached(outputs)], self.counts, [*self._weights, weight])


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
    found = ({name: _rows(values, begin, end) for name, values in inputs.items()} for begin, end in ends)
    return list(zip(found, counts, strict=True))


def _taken(model: Trained) -> list[Tensor]:
    """Return the minimised loss of the last part, if there is one, and forget it."""
    loss, model._minimised = model._minimised, None
    return [] if loss is None else [loss]


def mean(values: Sequence[Any], weights: Sequence[float | Tensor]) -> Any:
    """Return the weighted mean of numbers or one-element tensors."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _rows(values: Any, begin: int, end: int) -> Any:
    if values is None:
        return None
    if isinstance(values, Mapping):
        return {name: _rows(each, begin, end) for name, each in values.items()}
    if is_nested(values):
        return torch.nested.as_nested_tensor(list(values.unbind()[begin:end]), layout=values.layout)
    return values[begin:end]


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _detached(each) for name, each in value.items()}
    return value.detach() if isinstance(value, Tensor) else value


def _join_mappings(
    path: str, parts: Sequence[Mapping[str, Any]], counts: Sequence[int], weights: Sequence[float | Tensor]
) -> dict[str, Any]:
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(name not in part for part in parts):
            raise StreamError(f"micro_batch_size: only some parts of the batch have the output {path + name!r}")
    return {name: _join(f"{path}{name}", [part[name] for part in parts], counts, weights) for name in parts[0]}


def _join(name: str, values: list[Any], counts: Sequence[int], weights: Sequence[float | Tensor]) -> Any:
    """Return the output of a batch.

    Raises:
        StreamError: the values are neither one entry for each example nor one number for the part.
    """
    first = values[0]
    if all(isinstance(each, Mapping) for each in values):
        return _join_mappings(f"{name}.", values, counts, weights)
    if all(each is None for each in values):
        return None
    if all(_is_number(each) for each in values):
        return mean([each.item() if isinstance(each, np.generic | np.ndarray) else each for each in values], weights)
    if [length(each) for each in values] == list(counts):
        if all(map(is_nested, values)):
            rows = [row for each in values for row in each.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=first.layout)
        try:
            if all(isinstance(each, Tensor) for each in values):
                return torch.cat(values)
            if all(isinstance(each, np.ndarray) for each in values):
                return np.concatenate(values)
        except (RuntimeError, ValueError, TypeError) as error:
            message = f"micro_batch_size: the output {name!r} of the parts of a batch cannot be joined: {error}"
            raise StreamError(message) from error
        if all(isinstance(each, list | tuple) for each in values):
            return [entry for each in values for entry in each]
    shape = getattr(first, "shape", None)
    what = f"a {type(first).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise StreamError(
        f"micro_batch_size: the output {name!r} is {what} for a part of {counts[0]} examples; with parts of batches, "
        "an output must be a number, or have one entry per example; leave other outputs out with model.outputs",
        first_batch=True,
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not is_nested(value) and value.dim() == 0
    return isinstance(value, Real | np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)


def _warn_of_batch_norm(module: torch.nn.Module) -> None:
    name = next((name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training), None)
    if name is not None:
        _LOG.warning(
            "model.micro_batch_size: %s normalises each part of a batch by itself, so the gradients are not those of "
            "the whole batch; with GroupNorm or LayerNorm they are",
            f"{name or 'the module'} (BatchNorm)",
        )
