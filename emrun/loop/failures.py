"""What is saved of a step that failed, or whose update was skipped: all that a replay of the step needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from emrun.base.errors import RankFailed, reason_of
from emrun.base.types import Batch
from emrun.hook import Loop, UpdateSkipped
from emrun.loop.batch_calls import Calls, Handled
from emrun.loop.dispatch import Events
from emrun.loop.saving import Saving
from emrun.storage.capsules import Step, keep_failure
from emrun.storage.run import Run
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Failures:
    """Writes a capsule of the step that made the training fail, or that a hook keeps, if there is a run directory.

    Args:
        run: the run; None without a run directory.
        loop: has the model, whose weights are saved, and counts; gets the place of the capsule.
        events: knows which hook failed, and with which batch.
        saving: knows the newest checkpoint.
        randomness: the random states before the step; None without a run.
    """

    run: Run | None
    loop: Loop
    events: Events
    saving: Saving
    randomness: StepRandomness | None
    _trained: tuple[StreamWrapper, Handled] | None = field(default=None, init=False)

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Save the random states before each step of a stream, and the step that fails."""
        randomness = self.randomness
        if randomness is not None:
            calls.before.append(randomness.take_all)
            calls.first.append(lambda outputs: randomness.watch(of_whole_steps=not self.events.changes.by))
            calls.handled.failed.append(
                lambda error, batch: self._keep(error, batch, stream, calls.handled, train=train)
            )
            self._trained = (stream, calls.handled) if train else self._trained

    def keep_skipped(self, error: UpdateSkipped) -> None:
        """Keep the current step, whose update a hook skips and wants to replay; none if a model runs without the loop.

        Args:
            error: the reason, and the state of the hook.
        """
        if self._trained is None or not self.loop.training:
            return
        stream, handled = self._trained
        batch = handled.last[0] if handled.is_closing and handled.last is not None else stream.last_batch
        if (
            not handled.is_closing
            and self.events.changes.last is not None
            and self.events.changes.last[0] == stream.name
        ):
            batch = self.events.changes.last[1]
        if batch is not None:
            self._keep(error, batch, stream, handled, train=True)

    def _keep(
        self, error: BaseException, batch: Batch, stream: StreamWrapper, handled: Handled, *, train: bool
    ) -> None:
        """Write a capsule of a batch, unless the error does not come from a step.

        Args:
            error: the error; an `UpdateSkipped` if the training continues.
            batch: the batch.
            stream: the stream.
            handled: whether only the update of a window is made, and where its last batch is.
            train: whether the model was trained on the batch.
        """
        is_failure = not isinstance(error, UpdateSkipped)
        if self.run is None or self.randomness is None or isinstance(error, RankFailed):
            return
        position = handled.last[1] if handled.is_closing and handled.last is not None else stream.position
        is_counted = handled.is_closing and is_failure  # only its update has failed
        event, hook = self.events.failed_call()
        if event == "before_batch" and self.events.changes.offered is not None:
            batch = self.events.changes.offered
        step = Step(
            stream=stream.name,
            train=train,
            evaluating=self.loop.evaluating,
            epoch=self.loop.training_epochs_done,
            iteration=self.loop.iterations_done - (train and (event == "after_batch" or is_counted)),
            pass_number=position.pass_number,
            batch=position.batch - 1,
            event=event,
            hook=self.loop.hooks.index(hook) if hook is not None else None,
            hook_class=type(hook).__qualname__ if hook is not None else None,
        )
        if is_failure:
            try:
                self.saving.wait()
            except Exception as saving_error:  # the training must end with the failure of the step
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
        place = keep_failure(
            self.run.directory,
            error,
            step,
            batch,
            self.loop.model,
            randomness=self.randomness,
            hook=hook,
            checkpoint=self.saving.newest,
        )
        if is_failure:
            self.loop.capsule = place
