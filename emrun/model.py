"""The contract of models: what the main loop needs to train and evaluate with any backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from emrun.types import Batch, Prefetch


class BuiltApart(Protocol):
    """What another process builds once more, so that a model can tell whether a resume could build the same."""

    def structure(self, seconds: float) -> Any:
        """Return what the model compares itself with; None where that is not known after so many seconds."""

    def end(self) -> None:
        """End the other process."""


class AbstractModel(ABC):
    """Base of all models. `TorchModel` is the one that nearly everybody uses.

    A model may define the events of hooks too (`emrun.hook.EVENTS`); each is called after the hooks'.
    """

    optional_input_names: Sequence[str] = ()
    """Sources that the model uses when a batch has them."""

    has_updated: bool | None = None
    """Whether the last `run` with `train` changed the weights; None where that is not known."""

    is_lazy: bool = False
    """Whether the model has parts whose shapes the first batch decides, and has not seen a batch yet."""

    built_apart: Callable[[], Any] | None = None
    """Waits for the structure of what `build_apart` began, and returns it; set by what builds the model."""

    @classmethod
    def build_apart(cls, builds: Mapping[str, Callable[[], Any]]) -> BuiltApart | None:
        """Begin to build an argument of the constructor once more, before the model itself is built.

        Args:
            builds: argument -> what builds it, for those whose forms call nothing but classes: a function may load or
                download much.

        Returns:
            What is built in another process; None where the model compares nothing.
        """
        return None

    @property
    @abstractmethod
    def input_names(self) -> Sequence[str]:
        """Names of the sources that every batch must have."""

    @property
    @abstractmethod
    def output_names(self) -> Sequence[str]:
        """Names of what `run` returns, as far as they are known before the first batch."""

    @abstractmethod
    def run(self, batch: Batch, train: bool, stream: str) -> Mapping[str, Any]:
        """Run the model on a batch and, when `train` is true, update it.

        Args:
            batch: source name -> values; all sources have the same length.
            train: whether the model is to learn from this batch.
            stream: the name of the stream that the batch comes from.

        Returns:
            Output name -> value: a sequence or tensor with an entry an example, or a scalar that stands for the whole
            batch. No output has the name of a source.
        """

    def materialise(self, batch: Batch) -> None:  # noqa: B027 - most models are not lazy
        """Give the parts of a lazy model their shapes, from a batch of an evaluation pass; nothing is learned from it.

        The loop calls it before the training begins. A model that was loaded has the shapes of the checkpoint.
        """

    def step_values(self) -> Mapping[str, Any]:
        """Return what there is to say about the last `run` with `train`.

        Returns:
            `loss`: the scalar that was minimised, a number or a tensor of one element that stays on its device;
            `learning_rate`: that of each group of parameters, as numbers. A model leaves out what it does not have.
        """
        return {}

    def prefetcher(self) -> Prefetch | None:
        """Return what prepares batches for `run` while they wait for it, None when nothing is to be gained by that.

        Returns:
            A function that is called with each batch in the thread that reads it ahead, which must not change it. It
            returns None, or what the loop calls once, as a rule while `run` is still busy with the batch before, such
            as a copy to the device. `run` gets the same batch, and must do without if it was not prepared.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the training state, beside the weights, as plain types and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - a model may have no other state
        """Take back what `state_dict` returned; what the config changed meanwhile wins.

        Called twice, as `load` is, when an epoch is resumed in its middle: before and after `before_epoch`.

        Raises:
            StateError: the state does not fit this model.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the weights into an existing, empty directory."""

    def stage(self) -> Callable[[Path], None] | None:
        """Return what writes the weights as they are now, later and in another thread, while the training goes on.

        Returns:
            A function that does what `save` would do now; None where the training has to wait for `save`.
        """
        return None

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read the weights that `save` wrote."""
