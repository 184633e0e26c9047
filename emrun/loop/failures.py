"""What is saved of a step that failed, or whose update was skipped: all that a replay of the step needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from emrun.base.errors import RankFailed, reason_of
from emrun.base.types import Batch
from emrun.hook import UpdateSkipped
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings
from emrun.loop.saving import Saving
from emrun.loop.state import TrainingState
from emrun.model import AbstractModel
from emrun.storage.capsules import Step, keep_failure
from emrun.storage.draws import Draws
from emrun.storage.run import Run
from emrun.streams.stream import StreamPosition

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Failures:
    """Writes a capsule of the step that made the training fail, or that a hook keeps, if there is a run directory.

    Args:
        run: the run; None without a run directory.
        model: the model, whose weights are saved.
        state: the counters of the training.
        events: knows which hook failed, and with which batch.
        endings: knows whether the loop only evaluates.
        saving: knows the newest checkpoint.
        draws: the random states before the step; None without a run.
    """

    run: Run | None
    model: AbstractModel
    state: TrainingState
    events: Events
    endings: Endings
    saving: Saving
    draws: Draws | None
    capsule: Path | None = field(default=None, init=False)

    def keep(
        self,
        error: BaseException,
        batch: Batch,
        stream: str,
        position: StreamPosition,
        *,
        train: bool,
        is_counted: bool,
    ) -> None:
        """Write a capsule of the current batch, unless the error does not come from a step.

        Args:
            error: the error; an `UpdateSkipped` if the training continues.
            batch: the batch.
            stream: the name of the stream.
            position: the position in the stream after the batch.
            train: whether the model was trained on the batch.
            is_counted: whether the batch counts among the iterations done, because only its update has failed.
        """
        if self.run is None or self.draws is None or isinstance(error, RankFailed):
            return
        event, hook = self.events.failed_call()
        if event == "before_batch" and self.events.offered is not None:
            batch = self.events.offered
        step = Step(
            stream=stream,
            train=train,
            evaluating=self.endings.evaluating,
            epoch=self.state.epochs_done,
            iteration=self.state.iterations_done - (train and (event == "after_batch" or is_counted)),
            pass_number=position.pass_number,
            batch=position.batch - 1,
            event=event,
            hook=self.events.hooks.index(hook) if hook is not None else None,
            hook_class=type(hook).__qualname__ if hook is not None else None,
        )
        is_failure = not isinstance(error, UpdateSkipped)
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
            self.model,
            censor=self.run.censor,
            draws=self.draws,
            hook=hook,
            checkpoint=self.saving.newest,
        )
        if is_failure:
            self.capsule = place
