"""Whether a model comes back from a checkpoint as it was, and what it keeps that no checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emrun.diagnosis.differences import DIGEST, NOT_PERSISTENT, varying
from emrun.diagnosis.private_state import unsaved_state
from emrun.encoding import encode
from emrun.errors import StateError
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.randomness import preserved_randomness, seed_everything
from emrun.storage.state_file import load_state, save_state
from emrun.types import Batch

_WAYS = (
    "keep it in a buffer (register_buffer), in get_extra_state() and set_extra_state() of the module, or in "
    "state_dict() and load_state_dict() of the model"
)


@dataclass(slots=True)
class RoundTrip:
    """Saves a model that was trained and loads it into another one, and compares what both make of the same batches.

    Args:
        trained: the model that is saved.
        other: the one into which it is loaded, built in the same way.
        batches: the batches that the first one is run on, each with its stream.
    """

    trained: AbstractModel
    other: AbstractModel
    batches: list[tuple[str, Batch]] = field(default_factory=list)
    _before: dict[str, str] = field(default_factory=dict)  # what no checkpoint may have, before the first update

    def begin(self) -> None:
        """Note what the model keeps before its first update."""
        self._before = unsaved_state(self.trained)

    def check(self, directory: Path) -> None:
        """Save and load, and compare.

        Args:
            directory: where the checkpoint is made.

        Raises:
            StateError: it is not the same.
        """
        directory.mkdir()
        self.trained.save(directory)
        saved = encode(self.trained.state_dict(), "state of the model")
        save_state({"model": saved}, directory)
        self.other.load(directory)
        self.other.load_state_dict(load_state(directory)["model"])
        came_back = encode(self.other.state_dict(), "state of the model", copied=True)
        for stream, batch in dict(reversed(self.batches)).items():  # the first batch of each stream
            before, after = (_run(each, batch, stream, train=False) for each in (self.trained, self.other))
            for name, value in before.items():
                if not _equal(value, after.get(name)):
                    suspects = self._suspects()
                    cause = f". In no checkpoint, but changed by training: {'; '.join(suspects)}" if suspects else ""
                    raise StateError(
                        f"the model does not come back from a checkpoint as it was: output {name!r} of stream "
                        f"{stream!r} is another one; what its save(), load() and state_dict() leave out must be a "
                        f"parameter or a buffer, or part of get_extra_state(){cause}"
                    )
        if not _equal(saved, came_back):
            raise StateError("the model's state_dict() is another one after load_state_dict() of the same")

    def lost_state(self, dataset: Any, train_stream_name: str) -> Iterator[str]:
        """Yield what has changed in training and is in no checkpoint, nor made anew from any batch, as caches are.

        Both models are run once more on the batches that the first one has seen: what is made from batches is equal
        then.
        """
        if not self._changed():
            return
        loop = MainLoop(self.other, dataset, train_stream_name=train_stream_name)
        loop.notify("before_training")
        loop.notify("before_epoch", epoch_id=1)
        for name, batch in self.batches:
            for model in (self.other, self.trained):
                _run(model, batch, name, train=name == train_stream_name)
        for what in self._suspects():
            way = "register it without persistent=False" if what.endswith(NOT_PERSISTENT) else _WAYS
            yield f"{what} changes in training, but is in no checkpoint: a resume would not be exact; {way}"

    def _changed(self) -> list[str]:
        """Return what has changed since the first update, and may be in no checkpoint."""
        return varying(self._before, unsaved_state(self.trained))

    def _suspects(self) -> list[str]:
        """Return what has changed in training and is another in the model that has the checkpoint."""
        one, other = unsaved_state(self.other), unsaved_state(self.trained)
        names = sorted({*self._changed()} & {*varying(one, other)})
        # of the model itself, numbers and texts: weights differ as soon as something else does
        return [each for each in names if not (each.startswith("model") and one.get(each, DIGEST).startswith(DIGEST))]


def _run(model: AbstractModel, batch: Batch, stream: str, *, train: bool) -> Mapping[str, Any]:
    with preserved_randomness():
        seed_everything(0, "round trip", stream)
        return model.run(batch, train, stream)


def _equal(one: Any, other: Any) -> bool:
    """Tell whether two values are the same, numbers of tensors up to what kernels may differ by."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one, other, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return np.allclose(one, other, equal_nan=True) if one.dtype.kind in "fc" else np.array_equal(one, other)
    return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself
