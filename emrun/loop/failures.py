"""What is saved of a step that failed, or whose update was skipped: all that a replay of the step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.types import Batch
from emrun.hook import AbstractHook, UpdateSkipped
from emrun.loop.progress import Progress
from emrun.model import AbstractModel
from emrun.storage.capsules import Step, keep_failure
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.stream import StreamPosition, StreamWrapper


class StepAtWork:
    """Knows the batches that hooks got, the random states at that time, and the call of a hook that failed.

    Args:
        randomness: records the random states before each hook that may change a batch; None if failures are not kept.
    """

    def __init__(self, randomness: StepRandomness | None) -> None:
        self.randomness = randomness
        self.offered: Batch | None = None
        """The batch that the last called hook got in `before_batch`, if hooks may change batches."""
        self.failed_event: str | None = None
        """The event in which a hook or the model failed; None if this is not known."""
        self.failed: Any = None
        """The hook or the model that failed."""
        self._changed: Batch | None = None  # the last batch with the changes of all hooks
        self._stream_name = ""  # of this batch

    def offer(self, batch: Batch) -> None:
        """Note the batch that a hook, which may change the batch, gets now."""
        self.offered = dict(batch)
        if self.randomness is not None:
            self.randomness.before_hook()

    def change(self, stream_name: str, batch: Batch) -> None:
        """Note a batch with the changes of all hooks."""
        if self.randomness is not None:
            self.randomness.before_model()
        self._stream_name = stream_name
        self._changed = batch

    def changed(self, stream_name: str) -> Batch | None:
        """Return the last batch of a stream with the changes of all hooks; None if no hook may change batches."""
        return self._changed if self._stream_name == stream_name else None

    def fail(self, event: str, listener: Any) -> None:
        """Note that a hook or the model failed in an event, or asks to keep the step."""
        self.failed_event = event
        self.failed = listener

    def forget_failure(self) -> None:
        """Forget what `fail` has noted."""
        self.failed_event = None
        self.failed = None


class Window(NamedTuple):
    """The last batch of a window that is open."""

    batch: Batch
    position: StreamPosition  # in the stream, after this batch


@dataclass(eq=False)
class Failures:
    """Writes a capsule of the step that made the training fail, or that a hook keeps, if there is a run directory.

    Args:
        directory: the run directory; None for none.
        model: its weights are saved.
        hooks: the hooks.
        progress: where the training is.
        at_work: knows which hook failed, with which batch, and the random states before the step.
    """

    directory: Path | None
    model: AbstractModel
    hooks: list[AbstractHook]
    progress: Progress
    at_work: StepAtWork
    capsule: Path | None = field(default=None, init=False)
    """The directory with the batch that made the training fail; None if there is none."""
    _trained: StreamWrapper | None = field(default=None, init=False)  # the stream that the model is trained on
    _closing: Window | None = field(default=None, init=False)  # the window whose update is made, after its last batch

    def begin_stream(self, stream: StreamWrapper, *, train: bool) -> None:
        """Note the stream that the model is trained on."""
        if train:
            self._trained = stream

    def begin_first_step(self) -> None:
        """Keep the random states before the first step of a stream."""
        if self.at_work.randomness is not None:
            self.at_work.randomness.take_all()

    def end_first_step(self, *, hooks_change_batches: bool) -> Callable[[Batch], None] | None:
        """Return what to call before each later step of a stream; None for nothing."""
        if self.at_work.randomness is None:
            return None
        return self.at_work.randomness.watch(of_whole_steps=not hooks_change_batches)

    @contextmanager
    def closing(self, window: Window | None) -> Iterator[None]:
        """A block that makes the update of a window after its last batch."""
        self._closing = window
        try:
            yield
        finally:
            self._closing = None

    def failed_hook(self) -> AbstractHook | None:
        """Return the hook that failed in this stream; None if none has, or the model has failed."""
        return next((hook for hook in self.hooks if hook is self.at_work.failed), None)

    def keep_skipped(self, error: UpdateSkipped) -> None:
        """Keep the current step, whose update a hook skips and wants to replay; none if a model runs without the loop.

        Args:
            error: the reason, and the state of the hook.
        """
        stream = self._trained
        if stream is None or not self.progress.training:
            return
        batch = stream.last_batch
        changed = self.at_work.changed(stream.name)
        if self._closing is not None:
            batch = self._closing.batch
        elif changed is not None:
            batch = changed
        if batch is not None:
            self._keep(error, batch, stream, train=True)

    def keep(self, error: BaseException, batch: Batch, stream: StreamWrapper, *, train: bool) -> None:
        """Keep the step that has failed, unless the error does not come from a step."""
        self.capsule = self._keep(error, batch, stream, train=train)

    def _keep(self, error: BaseException, batch: Batch, stream: StreamWrapper, *, train: bool) -> Path | None:
        """Write a capsule of a batch; return its directory.

        Args:
            error: the error; an `UpdateSkipped` if the training continues.
            batch: the batch.
            stream: the stream.
            train: whether the model was trained on the batch.
        """
        at_work = self.at_work
        if self.directory is None or at_work.randomness is None:
            return None
        event = at_work.failed_event
        if event == "before_batch" and at_work.offered is not None:
            batch = at_work.offered

        # after the batch, and after a window of which only the update has failed, the batch is counted already
        closing = self._closing if train else None  # a hook may evaluate within the update
        only_update_failed = closing is not None and not isinstance(error, UpdateSkipped)
        is_counted = train and (event == "after_batch" or only_update_failed)
        position = stream.position if closing is None else closing.position
        hook = self.failed_hook()
        step = Step(
            stream=stream.name,
            train=train,
            evaluating=self.progress.evaluating,
            epoch=self.progress.epochs_done,
            iteration=self.progress.iterations_done - is_counted,
            pass_number=position.pass_number,
            batch=position.batch - 1,
            event=event,
            hook=self.hooks.index(hook) if hook is not None else None,
            hook_class=type(hook).__qualname__ if hook is not None else None,
        )
        return keep_failure(
            self.directory,
            error,
            step,
            batch,
            self.model,
            randomness=at_work.randomness,
            hook=hook,
            checkpoint=self.progress.newest_checkpoint,
        )
