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
from emrun.hooks._parts.columns import column, missing, names_of_classes
from emrun.hooks._parts.streams import OfStreams

_LOG = logging.getLogger(__name__)

MOST = 2000
"""The most classes: a matrix of 32 MB, which is also in checkpoints within an epoch."""
_CAPACITY = 65_536  # examples that wait on their device, so that batches need not wait for it
_BATCH = 64  # examples that take as much memory as the tensors of a batch

Counted = np.ndarray[Any, Any]


@dataclass
class _Counts:
    """The counts of a stream."""

    matrix: Counted
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
        self._source = "classes_names" + (f" of dataset {type(dataset).__name__}" if names is None else "")
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
            yield stream, counts.matrix

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the epoch so far."""
        counts = {stream: torch.from_numpy(matrix.copy()) for stream, matrix in self.matrices()}
        return {"variables": self._variables, "names": self._names, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts of an epoch that is resumed in its middle, unless other variables are compared now."""
        self._counts = {}
        if (state["variables"], state["names"]) == (self._variables, self._names):
            for stream, matrix in state["counts"].items():
                self._counts[stream] = _Counts(matrix.reshape(len(matrix), len(matrix)).numpy().copy(), self._named)
        elif state["counts"]:
            _LOG.warning(
                "%s: the variables or names are not those of the checkpoint; this epoch has only the counts of the "
                "batches after the checkpoint",
                type(self).__name__,
            )

    @contextmanager
    def _counting(self, stream: str) -> Iterator[_Counts]:
        if stream not in self._counts:
            self._counts[stream] = _Counts(np.zeros((0, 0), np.int64), self._named)
        counts = self._counts[stream]
        try:
            yield counts
        except ValueError as error:
            message = f"stream {stream!r}: {type(self).__name__}: {error}"
            raise StreamError(message, first_batch=counts.is_first) from None

    def _add(self, counts: _Counts, batch_data: dict[str, Any]) -> None:
        predicted, labels, *masks = (_tensor(name, batch_data) for name in self._variables)
        name, *others = (
            f"{name!r} of shape {tuple(each.shape)}"
            for name, each in zip(self._variables, (predicted, labels, *masks), strict=True)
        )
        if masks and masks[0].shape != labels.shape:
            raise ValueError(f"{others[1]} does not fit {others[0]}; a mask has a number for each label")
        found = _paired(predicted, labels)
        if found is None:
            raise ValueError(
                f"{name} does not fit {others[0]}; predictions are class numbers of the same shape as the labels, or "
                "have one more axis, axis 1, with a number for each class"
            )
        guessed, classes = found
        if classes is not None and classes != counts.classes:
            if counts.classes is not None or classes > self._most:
                more = f"{self._most:,} at most" if counts.classes is None else f"{counts.classes} before"
                if self._names is not None:
                    more = f"{self._source} has {len(self._names)} names; list the names in classes_names"
                raise ValueError(f"{name} has {classes} classes, but {more}")
            counts.classes = classes
        # copies, because the stream may use the memory of a batch again
        counts.waiting.append([each.clone().reshape(-1) for each in (guessed, labels, *masks)])
        counts.size += guessed.numel() + _BATCH
        if counts.is_first or counts.size > _CAPACITY:
            self._count(counts)
        counts.is_first = False

    def _count(self, counts: _Counts) -> None:
        """Count the classes that wait."""
        if not counts.waiting:
            return
        predicted, labels, *masks = (torch.cat(each).cpu() for each in zip(*counts.waiting, strict=True))
        counts.waiting, counts.size = [], 0
        if masks:
            predicted, labels = predicted[masks[0] != 0], labels[masks[0] != 0]
        guessed, true = (self._checked(index, each, counts.classes) for index, each in enumerate((predicted, labels)))
        before = len(counts.matrix)
        n = counts.classes or max(before, *(int(each.max(initial=-1)) + 1 for each in (guessed, true)))
        found = np.bincount(true * n + guessed, minlength=n * n).reshape(n, n)
        found[:before, :before] += counts.matrix
        counts.matrix = found

    def _checked(self, index: int, values: Tensor, classes: int | None) -> Counted:
        """Return the class numbers of a variable, int64 of shape (examples,)."""
        array = (values.double() if values.is_floating_point() else values).numpy()
        with np.errstate(invalid="ignore"):
            found: Counted = array.astype(np.int64)
        wrong = (found != array) | (found < 0) | (found >= (classes or self._most))
        if not wrong.any():
            return found
        known = "there can be" if classes is None else f"{self._source} has" if self._names is not None else "there are"
        raise ValueError(
            f"{self._variables[index]!r} has the value {array[wrong][0].item():.15g}, which is not the number of a "
            f"class: they are whole numbers from 0, and {known} {classes or self._most:,}; "
            + ("mask_name names a variable that is 0 where nothing counts" if index else "a model can return the class")
        )


def _tensor(name: str, batch_data: dict[str, Any]) -> Tensor:
    if name not in batch_data:
        raise ValueError(missing(name, batch_data))
    value = batch_data[name]
    if isinstance(value, Tensor) and not is_nested(value) and not value.is_complex():
        return value.detach()
    try:
        array = column(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from None
    if not isinstance(array, np.ndarray):
        if array and isinstance(array[0], str):
            raise ValueError(f"{name!r} has strings, not class numbers")
        raise ValueError(f"{name!r} has lists of different lengths; use the hook Flatten, and its variable here")
    if array.dtype.kind == "c":
        raise ValueError(f"{name!r} has complex numbers, not class numbers")
    return torch.from_numpy(np.array(array))


def _paired(predicted: Tensor, labels: Tensor) -> tuple[Tensor, int | None] | None:
    """Return the predicted classes, and the number of classes of logits; None if the shapes do not fit."""
    if predicted.shape == labels.shape and labels.dim():
        return predicted, None
    column_of_labels = labels.dim() == 2 and labels.shape[1] == 1
    target = labels.shape[:1] if column_of_labels else labels.shape
    if predicted.dim() < 2 or predicted.shape[:1] + predicted.shape[2:] != target:
        return (predicted, None) if predicted.shape == target and target else None
    if predicted.shape[1] == 1:
        return predicted, None
    return (predicted.byte() if predicted.dtype is torch.bool else predicted).argmax(1), predicted.shape[1]
