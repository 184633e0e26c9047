"""Hooks that count how often each class is predicted as each other class, over each stream of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.errors import StreamError
from emrun.base.sources import is_nested
from emrun.hooks._shared.columns import column, missing, names_of_classes
from emrun.hooks._shared.streams import OfStreams

_LOG = logging.getLogger(__name__)

MOST = 2000
"""The most classes: a matrix of 32 MB, which is also in checkpoints within an epoch."""
_CAPACITY = 65_536  # examples that wait on their device, so that batches need not wait for it
_BATCH = 64  # examples that take as much memory as the tensors of a batch

Counted = np.ndarray[Any, Any]


@dataclass
class _Counts:
    """The counts of a stream."""

    matrix: Tensor
    """Of shape (C, C): true class, predicted class."""
    classes: int | None
    """How many there are by their names or the logits."""
    waiting: list[list[Tensor]] = field(default_factory=list)
    size: int = 0
    is_first: bool = True


class ClassHook(OfStreams):
    """Counts true and predicted classes.

    Args:
        predicted: the variable with class numbers of the same shape as the labels, or with logits: then axis 1 has the
            classes, and the largest counts.
        labels: the variable with the true class numbers.
        mask: a variable of the shape of the labels that is 0 where nothing counts; None if everything counts.
        names: the names of the classes; None for those of the dataset, if it has any.
        streams: the streams that are counted; None for all.
        dataset: the dataset; None if there is none.
        output_dir: the run directory.
        most: the largest number of classes.

    Raises:
        ArgumentError: the names are not a list of different names, or the streams not a list.
        HookError: the names of the dataset are not.
    """

    def __init__(
        self,
        predicted: str,
        labels: str,
        mask: str | None,
        names: Sequence[str] | None,
        streams: Sequence[str] | None,
        dataset: Any,
        output_dir: str | Path | None = None,
        most: int = MOST,
    ) -> None:
        self._variables = [predicted, labels, *([] if mask is None else [mask])]
        super().__init__(streams, self._variables, dataset=dataset, output_dir=output_dir)
        names = names_of_classes("classes_names", names, dataset, labels)
        # characters that no file can hold are written as in Python, such as \udcff
        self._names = None if names is None else [name.encode(errors="backslashreplace").decode() for name in names]
        self._named = None if names is None else len(names)
        self._most = most
        self._counts: dict[str, _Counts] = {}

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the counts of the previous epoch."""
        self._counts = {}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Count the classes of a batch; those of the first batch are checked at once, others some batches later."""
        if self.looks_at(stream_name):
            with self._counting(stream_name) as counts:
                self._add(counts, batch_data)

    def matrices(self) -> Iterator[tuple[str, Counted]]:
        """Yield each stream with its counts, of shape (C, C): true class, predicted class; waits for the device.

        Raises:
            StreamError: a value is not the number of a class.
        """
        for stream in self._counts:
            with self._counting(stream) as counts:
                self._count(counts)
            yield stream, counts.matrix.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the epoch so far."""
        counts = {stream: torch.from_numpy(matrix) for stream, matrix in self.matrices()}
        return {"variables": self._variables, "names": self._names, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts of an epoch that is resumed in its middle, unless other variables are compared now."""
        self._counts = {}
        if (state["variables"], state["names"]) == (self._variables, self._names):
            for stream, matrix in state["counts"].items():
                self._counts[stream] = _Counts(matrix.reshape(len(matrix), len(matrix)), self._named)
        elif state["counts"]:
            _LOG.warning(
                "%s: the variables or names are not those of the checkpoint; this epoch has only the counts of the "
                "batches after the checkpoint",
                type(self).__name__,
            )

    @contextmanager
    def _counting(self, stream: str) -> Iterator[_Counts]:
        if stream not in self._counts:
            self._counts[stream] = _Counts(torch.zeros(0, 0, dtype=torch.int64), self._named)
        counts = self._counts[stream]
        try:
            yield counts
        except ValueError as error:
            raise StreamError(
                f"stream {stream!r}: {type(self).__name__}: {error}", first_batch=counts.is_first
            ) from None

    def _add(self, counts: _Counts, batch_data: dict[str, Any]) -> None:
        values = [_tensor(name, batch_data) for name in self._variables]
        shapes = [
            f"{name!r} of shape {tuple(value.shape)}" for name, value in zip(self._variables, values, strict=True)
        ]
        if values[2:] and values[2].shape != values[1].shape:
            raise ValueError(f"{shapes[2]} does not fit {shapes[1]}; a mask has a number for each label")
        predicted, labels, *masks = map(_without_axis_of_one, values)
        if predicted.dim() > 1 and predicted.shape[:1] + predicted.shape[2:] == labels.shape:
            classes = predicted.shape[1]
            counts.classes = counts.classes or min(classes, self._most)
            if classes != counts.classes:
                raise ValueError(
                    f"{shapes[0]} has {classes} classes, but there can be {counts.classes:,}, by "
                    "classes_names, the argument or the dataset's, or by the batches before"
                )
            predicted = (predicted.byte() if predicted.dtype is torch.bool else predicted).argmax(1)
        elif predicted.shape != labels.shape or not labels.dim():
            raise ValueError(
                f"{shapes[0]} does not fit {shapes[1]}; predictions are class numbers of the same shape as the labels, "
                "or have one more axis, axis 1, with a number for each class"
            )
        # copies, because the stream may use the memory of a batch again
        counts.waiting.append([tensor.clone().reshape(-1) for tensor in (predicted, labels, *masks)])
        counts.size += predicted.numel() + _BATCH
        if counts.is_first or counts.size > _CAPACITY:
            self._count(counts)
        counts.is_first = False

    def _count(self, counts: _Counts) -> None:
        """Count the classes that wait."""
        if not counts.waiting:
            return
        joined = [torch.cat(chunks).cpu() for chunks in zip(*counts.waiting, strict=True)]
        predicted, true, *masks = joined
        counts.waiting = []
        counts.size = 0
        for mask in masks:
            predicted = predicted[mask != 0]
            true = true[mask != 0]
        predicted = self._checked(predicted, counts.classes, 0)
        true = self._checked(true, counts.classes, 1)
        before = len(counts.matrix)
        n = counts.classes or max(before, len(torch.bincount(true)), len(torch.bincount(predicted)))
        matrix = torch.bincount(true * n + predicted, minlength=n * n).reshape(n, n)
        matrix[:before, :before] += counts.matrix
        counts.matrix = matrix

    def _checked(self, values: Tensor, classes: int | None, index: int) -> Tensor:
        """Return the class numbers of a variable as int64."""
        numbers = values.long()
        end = classes or self._most
        wrong = (numbers != values) | (numbers < 0) | (numbers >= end)
        if wrong.any():
            raise ValueError(
                f"{self._variables[index]!r} has the value {values[wrong][0].item():.15g}, which is not the number of "
                f"a class: they are whole numbers from 0 to {end - 1:,}; mask_name names a variable that is 0 where "
                "nothing counts"
            )
        return numbers


def _tensor(name: str, batch_data: dict[str, Any]) -> Tensor:
    if name not in batch_data:
        raise ValueError(missing(name, batch_data))
    value = batch_data[name]
    if isinstance(value, Tensor) and not is_nested(value):
        return value.detach()
    try:
        array = column(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name!r} has strings, or lists of different lengths; use the hook Flatten for these")
    return torch.from_numpy(np.array(array))


def _without_axis_of_one(values: Tensor) -> Tensor:
    return values[:, 0] if values.dim() > 1 and values.shape[1] == 1 else values
