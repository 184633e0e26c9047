"""Counts of true and predicted classes over a stream, in memory that does not grow with the number of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.fields import FieldError, Kind, record, shown
from emrun.base.sources import is_nested
from emrun.base.wording import did_you_mean, listed
from emrun.dataset import classes_of
from emrun.hooks._columns import column

_CAPACITY = 65_536  # classes that wait on their device, so that batches need not wait for it
_BATCHES = 1024  # as each tensor takes more memory than a few numbers
_COUNTS = Kind("an int64 tensor", lambda value: value.dtype is torch.int64 and (value >= 0).all())
STATE = record({"counts": _COUNTS})
"""The fields of `ClassCounts.state_dict`."""

Counted = np.ndarray[Any, Any]


def names_of(argument: str, names: Sequence[str] | None, dataset: Any, labels: str) -> tuple[list[str] | None, str]:
    """Return the names of the classes, None if they have none, and where they are from, for messages.

    Args:
        argument: the name of the argument with the names.
        names: its value; None for the names of the dataset.
        dataset: the dataset; None if there is none.
        labels: the source with the labels.

    Returns:
        The names, with characters that no file can hold written as in Python, such as `\\udcff`; and the source.

    Raises:
        ArgumentError: the names are not a list of different names.
        HookError: those of the dataset are not.
    """
    if names is None:
        found = None if dataset is None else classes_of(dataset, labels)
        return found and _writable(found), f"classes_names of dataset {type(dataset).__name__}"
    check_names(argument, names)
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if not names or "" in names or twice is not None:
        why = f"has {twice!r} twice" if twice is not None else "needs a name for each class"
        raise ArgumentError(argument, f"the list {why}")
    return _writable(names), argument


def _writable(names: Sequence[str]) -> list[str]:
    return [name.encode(errors="backslashreplace").decode() for name in names]


@dataclass(frozen=True)
class ClassReader:
    """Reads true and predicted classes from batches.

    Args:
        owner: the class of the hook, for messages.
        predicted: the variable with class numbers of the same shape as the labels, or with logits: then axis 1 has the
            classes, and the largest counts.
        labels: the variable with the true class numbers.
        mask: a variable of the shape of the labels that is 0 where nothing counts; None if everything counts.
        names: the names of the classes, None if they have none.
        source: where the names are from, for messages.
    """

    owner: str
    predicted: str
    labels: str
    mask: str | None
    names: Sequence[str] | None
    source: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of a batch that are read."""
        return (self.predicted, self.labels, *([] if self.mask is None else [self.mask]))

    def read(self, batch_data: dict[str, Any]) -> tuple[list[Tensor], int | None]:
        """Return predicted and true classes and the mask, each with one axis, and the number of classes of logits.

        The tensors are copies, because the stream may use the memory of a batch again.

        Raises:
            ValueError: the shapes do not fit.
        """
        predicted, labels, *masks = (self._tensor(name, batch_data) for name in self.variables)
        for mask in masks:
            if mask.shape != labels.shape:
                shapes = f"{self.mask!r} has the shape {tuple(mask.shape)}, and {self.labels!r} {tuple(labels.shape)}"
                raise ValueError(f"{shapes}; a mask has a number for each label")
        found = _paired(predicted, labels)
        if found is None:
            raise ValueError(
                f"{self.predicted!r} has the shape {tuple(predicted.shape)}, and {self.labels!r} "
                f"{tuple(labels.shape)}; predictions are class numbers of the same shape as the labels, or have one "
                "more axis, axis 1, with a number for each class"
            )
        classes, is_logits = found
        count = predicted.shape[1] if is_logits else None
        if count is not None and self.names is not None and count != len(self.names):
            raise ValueError(
                f"{self.predicted!r} has {count} classes, shape {tuple(predicted.shape)}, but {self.source} has "
                f"{len(self.names)} names; list the names in classes_names"
            )
        kept = (classes if is_logits else classes.clone(), labels.clone(), *(each.clone() for each in masks))
        return [each if each.dim() == 1 else each.reshape(-1) for each in kept], count

    def checked(self, name: str, values: Tensor, mask: Counted | None, classes: int | None, most: int) -> Counted:
        """Return class numbers on the host, int64 of shape (examples,), without those that the mask leaves out.

        Raises:
            ValueError: a value is not the number of a class.
        """
        host = values.cpu()
        array = (host.double() if host.is_floating_point() else host).numpy()
        array = array if mask is None else array[mask]
        with np.errstate(invalid="ignore"):
            found = array.astype(np.int64)
        wrong = (found != array) | (found < 0) | (found >= (most if classes is None else classes))
        if not wrong.any():
            return found
        value = array[wrong][0].item()
        if isinstance(value, float) and not value.is_integer():
            more = "" if name != self.predicted else "; add the predicted class to the outputs of the model"
            raise ValueError(f"{name!r} has the value {value:g}, which is not the number of a class{more}")
        if value < 0:
            more = "" if name != self.labels else "; to leave some out, name a variable that is 0 there in mask_name"
            raise ValueError(f"{name!r} has the value {int(value)}, but classes are counted from 0{more}")
        if classes is None:
            raise ValueError(f"{name!r} has the class {int(value)}, but there can be at most {most:,} classes")
        whose = f", as many as {self.source} has names" if self.names is not None else ""
        raise ValueError(f"{name!r} has the class {int(value)}, but there are {classes} classes, counted from 0{whose}")

    def _tensor(self, name: str, batch_data: dict[str, Any]) -> Tensor:
        if name not in batch_data:
            there = list(batch_data)
            raise ValueError(f"a batch has no variable {name!r}{did_you_mean(name, there)} (it has {listed(there)})")
        value = batch_data[name]
        if isinstance(value, Tensor) and not is_nested(value) and not value.is_complex():
            return value.detach() if value.requires_grad else value
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


def _paired(predicted: Tensor, labels: Tensor) -> tuple[Tensor, bool] | None:
    """Return the predicted classes, and whether they are those of logits; None if the shapes do not fit."""
    if predicted.shape == labels.shape and labels.dim():
        return predicted, False
    column_of_labels = labels.dim() == 2 and labels.shape[1] == 1
    target = labels.shape[:1] if column_of_labels else labels.shape
    if predicted.dim() < 2 or predicted.shape[:1] + predicted.shape[2:] != target:
        return (predicted, False) if predicted.shape == target and target else None
    if predicted.shape[1] == 1:
        return predicted, False
    return (predicted.byte() if predicted.dtype is torch.bool else predicted).argmax(1), True


class ClassCounts:
    """Counts over the batches of a stream.

    Args:
        reader: reads the batches.
        is_matrix: count each pair of classes, in `counts` of shape (C, C): true class, predicted class. Otherwise
            `counts`, of shape (3, C), has for each class how often it was right, was predicted and was true.
        most: the largest number of classes.
    """

    def __init__(self, reader: ClassReader, *, is_matrix: bool, most: int) -> None:
        self._reader = reader
        self._is_matrix = is_matrix
        self._most = most
        self._classes = None if reader.names is None else len(reader.names)
        self._counts = self._empty(self._classes or 0)
        self._waiting: list[list[Tensor]] = []
        self._size = 0
        self._is_first = True

    def add(self, batch_data: dict[str, Any], stream: str) -> None:
        """Add a batch; the classes of the first batch are checked at once, those of others some batches later.

        Raises:
            StreamError: the variables are not classes.
        """
        try:
            values, classes = self._reader.read(batch_data)
            if classes is not None and classes != self._classes:
                if self._classes is not None or classes > self._most:
                    before = f"{self._most:,} at most" if self._classes is None else f"{self._classes} before"
                    raise ValueError(f"{self._reader.predicted!r} has {classes} classes, but {before}")
                self._classes = classes
            self._waiting.append(values)
            self._size += values[0].shape[0]
            if self._is_first or self._size > _CAPACITY or len(self._waiting) > _BATCHES:
                self._count()
        except ValueError as error:
            raise self._error(stream, error) from None
        self._is_first = False

    def finish(self, stream: str) -> Counted:
        """Return the counts; this waits for the device.

        Raises:
            StreamError: a value is not the number of a class.
        """
        try:
            self._count()
        except ValueError as error:
            raise self._error(stream, error) from None
        return self._counts

    def state_dict(self, stream: str) -> dict[str, Any]:
        """Return the counts so far."""
        return {"counts": torch.from_numpy(self.finish(stream).copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts.

        Raises:
            FieldError: they have another shape.
        """
        STATE.check(state)
        counts = state["counts"].cpu().numpy().copy()
        allowed = self._empty(counts.shape[-1] if self._classes is None and counts.ndim else self._classes or 0).shape
        if counts.shape != allowed or counts.shape[-1] > self._most:
            raise FieldError("counts", f"is {shown(state['counts'])}", f"of shape {allowed}")
        self._counts, self._is_first = counts, True

    def _count(self) -> None:
        """Count the classes that wait."""
        if not self._waiting:
            return
        predicted, labels, *masks = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting, self._size = [], 0
        mask = masks[0].cpu().numpy() != 0 if masks else None
        found = [
            self._reader.checked(name, values, mask, self._classes, self._most)
            for name, values in zip(self._reader.variables[:2], (predicted, labels), strict=True)
        ]
        n = self._classes or max(self._counts.shape[-1], *(int(each.max(initial=-1)) + 1 for each in found))
        counts = self._empty(n)
        before = tuple(slice(0, size) for size in self._counts.shape)
        counts[before] += self._counts
        guessed, true = found
        if self._is_matrix:
            counts += np.bincount(true * n + guessed, minlength=n * n).reshape(n, n)
        else:
            counts += [np.bincount(each, minlength=n) for each in (true[true == guessed], guessed, true)]
        self._counts = counts

    def _empty(self, classes: int) -> Counted:
        return np.zeros((classes if self._is_matrix else 3, classes), np.int64)

    def _error(self, stream: str, error: ValueError) -> StreamError:
        message = f"stream {stream!r}: {self._reader.owner}: {error}"
        return StreamError(message, first_batch=self._is_first)
