"""Where the training is: the counters, the phase of the epoch, and the stream whose batches are run."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from emrun.streams.stream import StreamWrapper

Point = tuple[int, int, str]
"""Identifies a state of the training: epochs done, iterations done, phase of the epoch."""


class Phase(enum.Enum):
    """The part of an epoch in which the loop is."""

    BEFORE = "before"  # the zeroth epoch is not complete
    TRAIN = "train"  # in the train stream
    EVALUATE = "evaluate"  # after the train stream, before the end of the extra streams
    BETWEEN = "between"  # between two epochs


@dataclass(eq=False)
class Progress:
    """Where the training is. The loop writes this, and a snapshot that is loaded; all others only read.

    The blocks (`with progress.evaluation()`) change something and restore this at their end. What has the name of an
    attribute of `emrun.hook.Loop` is described there.
    """

    epochs_done: int = 0
    iterations_done: int = 0
    updates_done: int = 0
    phase: Phase = Phase.BEFORE
    training: bool = False
    evaluating: bool = False
    at_end: bool = False
    records_epochs: bool = True
    """Whether an epoch that ends is one of the run, and not an evaluation within the training."""
    begins_again: bool = False
    """Whether an epoch that is resumed in its middle begins again: what hooks request then has no effect."""
    stream: StreamWrapper | None = None
    """The stream whose batches are run; None between streams."""
    stream_name: str | None = None
    batch_length: int = 0
    epoch_began: float = 0.0
    epoch_is_resumed: bool = False
    newest_checkpoint: tuple[str, int] | None = None
    """The name of the directory and the iteration of the checkpoint that was last saved or loaded."""

    @property
    def point(self) -> Point:
        """Identifies the state of the training."""
        return self.epochs_done, self.iterations_done, self.phase.value

    @property
    def is_in_epoch(self) -> bool:
        """Whether a training epoch has begun but is not complete."""
        return self.phase in (Phase.TRAIN, Phase.EVALUATE)

    @property
    def hooks_steer(self) -> bool:
        """Whether terminations and requests for checkpoints have an effect."""
        return not (self.evaluating or self.begins_again)

    def only_evaluate(self, evaluating: bool) -> None:
        """Evaluate only, from now on, or train."""
        self.evaluating = evaluating

    def start_from(self, epochs_done: int, iterations_done: int, updates_done: int, phase: Phase) -> None:
        """Set the counters to those of a checkpoint."""
        self.epochs_done = epochs_done
        self.iterations_done = iterations_done
        self.updates_done = updates_done
        self.phase = phase

    def start_between_epochs(self, epochs_done: int, iterations_done: int, updates_done: int) -> None:
        """Set the counters to those of a loaded model, before another epoch."""
        phase = Phase.BETWEEN if epochs_done or iterations_done else Phase.BEFORE
        self.start_from(epochs_done, iterations_done, updates_done, phase)

    def take_checkpoint(self, directory: str, iteration: int) -> None:
        """Note the checkpoint that was saved or loaded last."""
        self.newest_checkpoint = (directory, iteration)

    def begin_epoch(self, *, is_resumed: bool) -> None:
        """Begin an epoch, or resume one in its middle."""
        self.epoch_began = perf_counter()
        self.epoch_is_resumed = is_resumed

    def begin_train_streams(self) -> bool:
        """Enter the train stream of an epoch; return False if the epoch is resumed after the train stream."""
        if self.phase is Phase.EVALUATE:
            return False
        self.phase = Phase.TRAIN
        return True

    def end_train_streams(self) -> None:
        """Leave the last train stream of an epoch."""
        self.phase = Phase.EVALUATE

    def end_epoch(self, *, trained: bool) -> None:
        """End an epoch; it counts if the model was trained in it."""
        self.epochs_done += trained
        self.phase = Phase.BETWEEN

    def go_back(self, epochs_done: int) -> None:
        """Go back to the evaluations of an epoch, because they or the events after them have failed."""
        self.epochs_done = epochs_done
        self.phase = Phase.EVALUATE

    def enter(self, stream: StreamWrapper, *, train: bool) -> None:
        """Begin with the batches of a stream, on which the model is trained or evaluated."""
        self.stream = stream
        self.stream_name = stream.name
        self.training = train

    @contextmanager
    def streams_of(self, *, train: bool) -> Iterator[None]:
        """A block for a stream; a hook may evaluate another stream between two batches of one."""
        stream = self.stream
        stream_name = self.stream_name
        training = self.training
        self.training = train
        try:
            yield
        finally:
            self.stream = stream
            self.stream_name = stream_name
            self.training = training

    @contextmanager
    def evaluation(self, *, is_recorded: bool) -> Iterator[None]:
        """A block that only evaluates; a hook may call this between two batches.

        Args:
            is_recorded: whether the evaluation is recorded as an epoch of the run.
        """
        evaluating = self.evaluating
        batch_length = self.batch_length
        records_epochs = self.records_epochs
        self.evaluating = True
        self.records_epochs = is_recorded
        try:
            yield
        finally:
            self.evaluating = evaluating
            self.batch_length = batch_length
            self.records_epochs = records_epochs

    @contextmanager
    def evaluation_at_end(self) -> Iterator[None]:
        """A block that evaluates once more, because a limit has ended the training."""
        self.at_end = True
        try:
            yield
        finally:
            self.at_end = False

    @contextmanager
    def beginning_again(self, iterations_done: int, updates_done: int) -> Iterator[None]:
        """A block in which an epoch begins again, with the counters of its first beginning."""
        iterations_before = self.iterations_done
        updates_before = self.updates_done
        self.iterations_done = iterations_done
        self.updates_done = updates_done
        self.begins_again = True
        try:
            yield
        finally:
            self.iterations_done = iterations_before
            self.updates_done = updates_before
            self.begins_again = False

    @contextmanager
    def last_update(self) -> Iterator[None]:
        """A block that makes the update of a window after its last batch: for hooks, this batch does not count yet."""
        self.iterations_done -= 1
        try:
            yield
        finally:
            self.iterations_done += 1
        self.updates_done += 1

    @contextmanager
    def whole_batch(self, length: int) -> Iterator[None]:
        """A block for hooks that get the current batch of all ranks."""
        before = self.batch_length
        self.batch_length = length
        try:
            yield
        finally:
            self.batch_length = before
