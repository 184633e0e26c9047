"""The contract of models: what the main loop needs to train and evaluate a model of any backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.types import Batch, Prefetch
from emrun.schedule_plan import SchedulePlan


class Target(NamedTuple):
    """What a loss compares: an output with a source, and how the output becomes probabilities.

    `activation` is `softmax`, `sigmoid`, `identity` for an output that has probabilities, or None if it is not known.
    """

    loss: str
    output: str
    source: str | None
    activation: str | None


class AbstractModel(ABC):
    """Base class of models. Most projects use `TorchModel`.

    A model may also define events (`emrun.hook.EVENTS`). The model gets each event after the hooks.
    """

    optional_input_names: Sequence[str] = ()
    """Sources that the model uses if the batch has them."""

    metric_names: Sequence[str] = ()
    """Outputs that measure the quality of the model; `ComputeStats` without arguments computes their means."""

    writes: Sequence[str] = ()
    """Names of the statistics that `stream_values` returns."""

    in_units: Mapping[str, str] = {}
    """Output -> the source whose unit it has, in which the source is an output too; see `units` of `TorchModel`."""
    only_in: Mapping[str, Sequence[str]] = {}
    """Metric -> the streams in which there is one, for those of `metric_names` and `writes` that not all have."""

    has_updated: bool | None = None
    """Whether the last `run` with `train=True` changed the weights; None if that is not known."""

    skipped_updates: int = 0
    """Number of updates of the run that hooks or gradients in fp16 have skipped."""

    iterations_per_update: int = 1
    """Number of train batches that make an update, a window; the last window of an epoch may be shorter."""

    is_accumulating: bool = False
    """Whether a window has begun that the last train batch did not end. Checkpoints and the end of the run wait for its
    end, because the gradients of a window are not saved."""

    shares_batches: bool = False
    """Whether several ranks can train the model, each on its rows of every batch: it adds up their gradients."""

    least_rows: int = 1
    """The least number of rows that a rank with rows should get of a batch: 2 for BatchNorm."""

    is_sharded: bool = False
    """Whether each of several ranks has only a part of the weights, and writes its part of a checkpoint: what `stage`
    returns then returns what `emrun.storage.checkpoints.shards.write_shard` returns."""

    is_loaded: bool = False
    """Whether the model gets its weights from runs when it is built, by the argument `load_model`; an attribute of the
    class. Such a model has no checkpoints and cannot be trained."""

    write_setting: Callable[[str, Any], None] | None = None
    """Writes a value that the model has found for one of its arguments, such as the number for `auto`, to the config of
    the run. Called with the argument and the value. Set by the builder of the model; None without a run."""

    targets: Sequence[Target] = ()
    """What the losses compare, as far as it is known."""

    load_initial: Callable[[], Mapping[str, Any]] | None = None
    """Loads the weights that a new run begins with; None if there are none.

    It is called once, before the hooks are built, for a run that begins. Models that are built for a resume or an
    evaluation get None instead. It sets the attribute to None, and returns `source`, where the weights are from, and
    `rows`, what was loaded and what was not: {what, tensors, values, which}.
    """

    @property
    @abstractmethod
    def input_names(self) -> Sequence[str]:
        """Names of the sources that every batch must have."""

    @property
    @abstractmethod
    def output_names(self) -> Sequence[str]:
        """Names of the outputs that `run` returns, as far as they are known before the first batch."""

    def part_with(self, source: str) -> str:
        """Return the part of the model that needs a source, for messages."""
        return "the model"

    @abstractmethod
    def run(self, batch: Batch, train: bool, stream: str) -> Mapping[str, Any]:
        """Run the model on a batch and, if `train` is true, update the model.

        Args:
            batch: source name -> values; all sources have the same length.
            train: whether to train on this batch.
            stream: the name of the stream that the batch comes from.

        Returns:
            Output name -> value: a sequence or tensor with one entry per example, or a scalar for the whole batch. An
            output must not have the name of a source.
        """

    def begin_alike(self) -> None:  # noqa: B027 - most models are built alike
        """Take the parameters and buffers of rank 0; called on each of several ranks, before `before_training`."""

    def finish_update(self) -> None:  # noqa: B027 - most models have no windows
        """Make the update of a window that has begun; called after the last train batch of an epoch."""

    def step_values(self) -> Mapping[str, Any]:
        """Return values of the last `run` with `train=True`.

        There may be none yet, also after training epochs: when an epoch is resumed at the end of its train stream.

        Returns:
            `loss`: the scalar that was minimised, a number or a one-element tensor that stays on its device.
            `learning_rate`: the learning rate of each parameter group in the last update, or in the next one if there
            was none. The rates are numbers, or one-element tensors that the model does not change. They are a list,
            which becomes `learning_rate`, `learning_rate_1`, ..., or a mapping name -> rate, which becomes
            `learning_rate_NAME`. A model may leave out either.
        """
        return {}

    def schedule_plan(self) -> SchedulePlan | None:
        """Return the learning rates that the run will have, before the training; None if the model does not know them.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        return None

    def stream_values(self, stream: str) -> Mapping[str, Any]:
        """Return statistics of a stream of the current epoch that are not computed batch by batch.

        The loop adds them to the data of the epoch before the hooks get `after_epoch`. In a resumed run, the streams
        that had ended before the checkpoint are not run again: their statistics must be in `state_dict`.

        Args:
            stream: the name of a stream that has ended, with its `after_stream`.

        Returns:
            Name -> a plain number, or a mapping aggregation -> number; empty if there were no batches.
        """
        return {}

    def prefetcher(self) -> Prefetch | None:
        """Return a function that prepares batches ahead of their turn, or None if that would not save time.

        Returns:
            A function that gets each batch in the read-ahead thread and must not change the batch. It returns None, or
            a function that the loop calls once, usually while `run` is busy with the previous batch; this one may begin
            a copy to the device. `run` gets the same batch, and must also work if the batch was not prepared.
        """
        return None

    def predict_only(self) -> None:  # noqa: B027 - most models have no losses of their own
        """Prepare for `emrun predict`: leave out what needs a source that a batch does not have, such as losses."""

    def without_measures(self) -> None:  # noqa: B027 - most models have no losses of their own
        """Leave out losses and metrics, and what only they need: the model will be a part of another."""

    def state_dict(self) -> dict[str, Any]:
        """Return the training state without the weights, as plain types and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - a model may have no other state
        """Restore the state that `state_dict` returned. Values that have been changed in the config take precedence.

        When an epoch is resumed in its middle, this and `load` are called twice: before and after `before_epoch`.

        Raises:
            StateError: the state does not fit this model.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the weights to `directory`, which exists and is empty."""

    def stage(self) -> Callable[[Path], Any] | None:
        """Return a function that writes the current weights later, in another thread, while the training continues.

        Returns:
            A function that writes to a directory what `save` would write now; None if the loop must wait for `save`.
        """
        return None

    def of_rank(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state that each of several ranks has for itself, and that a checkpoint has of each.

        Args:
            state: what `state_dict` has returned.
        """
        return {}

    def of_new_rank(self, states: Sequence[Mapping[str, Any]], *, is_first: bool) -> dict[str, Any]:
        """Return these entries for a rank of a run that is resumed on another number of ranks.

        Args:
            states: the entries of all ranks before.
            is_first: whether this is rank 0, which takes over what all ranks have; the others begin with nothing.
        """
        return {}

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read the weights that `save` wrote to `directory`."""
