"""Check that a checkpoint restores a model exactly, and find state of the model that is saved in no checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emrun.base.encoding import decode, encode
from emrun.base.errors import StateError
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch
from emrun.diagnosis.differences import DIGEST, NOT_PERSISTENT, varying
from emrun.diagnosis.private_state import unsaved_state
from emrun.events import listener
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.storage.checkpoints.state_file import load_state, save_state

_WAYS = (
    "save it in a buffer (register_buffer), in get_extra_state() and set_extra_state() of the module, or in "
    "state_dict() and load_state_dict() of the model"
)


@dataclass(slots=True)
class RoundTrip:
    """Saves a trained model, loads it into a second model and compares the outputs of both for the same batches.

    Args:
        trained: the model that is saved.
        other: the model into which the checkpoint is loaded; built in the same way.
        batches: the batches on which `trained` has been run, each with the name of its stream.
    """

    trained: AbstractModel
    other: AbstractModel
    batches: list[tuple[str, Batch]] = field(default_factory=list)
    _before: dict[str, str] = field(default_factory=dict)  # `unsaved_state` before the first update

    def begin(self) -> None:
        """Record the state that may be in no checkpoint, before the first update."""
        self._before = unsaved_state(self.trained)

    def check(self, directory: Path) -> None:
        """Save, load and compare; see `difference`.

        Raises:
            StateError: an output or a state dict of the loaded model differs.
        """
        difference = self.difference(directory)
        if difference is None:
            return
        what, name, stream, *_ = difference
        if not stream:
            raise StateError("the model's state_dict() differs after load_state_dict() of the same state")
        _evaluated(self.trained, dict(reversed(self.batches))[stream], stream)  # the last batch of both is the same
        suspects = self._suspects()
        cause = f". Changed by training, but in no checkpoint: {'; '.join(suspects)}" if suspects else ""
        raise StateError(
            f"a checkpoint does not restore the model exactly: {what} {name!r} of stream {stream!r} "
            "differs after loading; state that save(), load() and state_dict() leave out must be a "
            f"parameter, a buffer or part of get_extra_state(){cause}"
        )

    def difference(
        self, directory: Path, train: Callable[[], object] = lambda: None
    ) -> tuple[str, str, str, Any, Any] | None:
        """Save, load and compare; return what differs first, its name, its stream and both values, or None.

        What differs is an output or a metric, or the state dict, which has no stream.

        Args:
            directory: the checkpoint directory to create.
            train: is called before the checkpoint is loaded; may train a model that is both.
        """
        directory.mkdir()
        self.trained.save(directory)
        saved = encode(self.trained.state_dict(), "state of the model", copied=True)
        save_state({"model": saved}, directory)
        batches = dict(reversed(self.batches))  # the first batch of each stream
        before = {stream: _evaluated(self.trained, batch, stream) for stream, batch in batches.items()}
        train()
        self.other.load(directory)
        self.other.load_state_dict(decode(load_state(directory)["model"]))
        came_back = encode(self.other.state_dict(), "state of the model", copied=True)
        for stream, batch in batches.items():
            after = _evaluated(self.other, batch, stream)
            for name, value in before[stream].items():
                if not equal(value, after.get(name)):
                    what = "metric" if name in self.trained.writes else "output"
                    return what, name, stream, value, after.get(name)
        return None if equal(saved, came_back) else ("state_dict", "state_dict", "", saved, came_back)

    def lost_state(self, begin: Callable[[AbstractModel], MainLoop]) -> Iterator[str]:
        """Yield messages on state that training has changed and that is neither in a checkpoint nor a cache of a batch.

        Both models are run once more on the same batches, after which state that only depends on the batches is equal.

        Args:
            begin: begins a training of a model in a main loop of its own.
        """
        if not self._changed():
            return
        loop = begin(self.other)
        for name, batch in self.batches:
            for model in (self.other, self.trained):
                run_repeatably(model, batch, name, train=name == loop.train_stream_name)
        for what in self._suspects():
            way = "register it without persistent=False" if what.endswith(NOT_PERSISTENT) else _WAYS
            yield f"{what} changes in training, but is in no checkpoint: a resume would not be exact; {way}"

    def _changed(self) -> list[str]:
        """Return the names of state that has changed since the first update and may be in no checkpoint."""
        return varying(self._before, unsaved_state(self.trained))

    def _suspects(self) -> list[str]:
        """Return the names of state that has changed in training and differs in the loaded model."""
        one = unsaved_state(self.other)
        names = sorted({*self._changed()} & {*varying(one, unsaved_state(self.trained))})
        # of the model itself, only numbers and strings: its tensors differ whenever anything else does
        return [name for name in names if not (name.startswith("model") and one.get(name, DIGEST).startswith(DIGEST))]


def run_repeatably(model: AbstractModel, batch: Batch, stream: str, *, train: bool) -> Mapping[str, Any]:
    """Run a model on a batch, each time with the same random states, which are restored."""
    with preserved_randomness():
        seed_everything(0, "round trip", stream)
        return model.run(batch, train, stream)


def _evaluated(model: AbstractModel, batch: Batch, stream: str) -> dict[str, Any]:
    """Return copies of the outputs of a model for a copy of a batch, and its statistics of the batch as a stream."""
    return {**copied(run_repeatably(model, copied(batch), stream, train=False)), **statistics_of(model, stream)}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return deep copies of values."""
    return {name: copy.deepcopy(value) for name, value in values.items()}


def statistics_of(model: AbstractModel, stream: str) -> Mapping[str, Any]:
    """End a stream of a model that has statistics of whole streams, and return them."""
    call = listener(model, "after_stream", AbstractModel)
    if not model.writes or call is None:
        return {}
    with preserved_randomness():
        call(stream_name=stream)
    return model.stream_values(stream)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, floating-point tensors and arrays up to the tolerance of `allclose`."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        if one.is_sparse:
            return equal(one.to_dense(), other.to_dense())
        return torch.allclose(one, other, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return np.allclose(one, other, equal_nan=True) if one.dtype.kind in "fc" else np.array_equal(one, other)
    return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself
