"""The two ends of the `with` block of a main loop: what is begun, and what is left in order whatever happened."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from emrun.arguments import check_exit_status
from emrun.errors import reason_of
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings
from emrun.loop.epochs import Epochs
from emrun.loop.first_batch import FirstBatch
from emrun.loop.loss_watch import LossWatch
from emrun.loop.outcome import Outcome
from emrun.loop.saving import Saving
from emrun.loop.state import TrainingState
from emrun.model import AbstractModel
from emrun.storage.run import Run
from emrun.streams.dataset_streams import DatasetStreams
from emrun.types import Prefetch

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Begins and ends the time in which epochs are run.

    Args:
        model: shown the first batch when it is lazy; prepares batches ahead.
        run: whose log is written, and which gets the end; None for none.
        streams: their readers are stopped at the end.
        state: where the training ends.
        events: calls the hooks.
        endings: listens to signals.
        saving: saves the last checkpoint.
        epochs: told of the beginning.
        first_batch: shows it to a lazy model.
        loss: says whether the loss was always finite.
        prefetches: whether batches may be prepared for the model ahead of their turn.
        preempt_exit_code: the exit status after SIGTERM, None for ending by the signal.
    """

    model: AbstractModel
    run: Run | None
    streams: DatasetStreams
    state: TrainingState
    events: Events
    endings: Endings
    saving: Saving
    epochs: Epochs
    first_batch: FirstBatch
    loss: LossWatch
    prefetches: bool
    preempt_exit_code: int | None
    outcome: Outcome | None = field(default=None, init=False)
    """How the last session ended."""
    prefetch: Prefetch | None = field(default=None, init=False)
    """What prepares batches for the model ahead of their turn, if anything does."""
    is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.preempt_exit_code is not None:
            check_exit_status("preempt_exit_code", self.preempt_exit_code)

    def begin(self) -> None:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks."""
        if self.run is not None:
            self.run.open_log()
        self.is_open = True
        self.outcome = None
        self.epochs.begin_session()
        try:
            self.endings.begin()
            self.first_batch.show(self.model, may_fail=bool(self.events.changers))
            self.prefetch = self._find_prefetch()
            self.events.notify("before_training")
            self.first_batch.show(self.model)  # which may need the before_training of the hooks that change batches
        except TrainingTerminated as error:
            self.endings.defer(error)
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None) -> bool:
        """Save what is to be saved, call `after_training` of every hook, restore the signal handlers, close the log.

        Args:
            error: what ended the block, if anything did.

        Returns:
            Whether that is a termination, which ends here, or nothing.

        Raises:
            BaseException: what the last checkpoint or a hook raised, when nothing else failed before.
        """
        failure = error
        try:
            failure = self._close(error)
        except BaseException as last_error:
            failure = last_error
            raise
        finally:
            self.is_open = False
            self.endings.restore()
            if self.run is not None:
                self.run.close_log(failure)
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop reading, save, and call the last events; return what made the training fail, if anything did."""
        failure = None if isinstance(error, TrainingTerminated) else error
        evaluating = self.endings.evaluating
        self.streams.stop()
        try:
            if failure is None and not evaluating:
                self.saving.save_latest(*self.state.point)
                self.loss.look(self.state.epochs_done + 1, self.state.iterations_done)
            else:
                self.saving.wait()
        except BaseException as saving_error:
            if failure is not None:
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            failure = failure or saving_error
        self.saving.close()
        if not isinstance(failure, TrainingAborted):  # the guard has said it
            self.loss.warn()
        outcome = Outcome.of(failure or error, None if evaluating else self.preempt_exit_code)
        self.outcome = replace(outcome, warning=self.loss.warning)
        if failure is not None:
            self.events.notify_all("on_error", error=failure)
        hook_error = self.events.notify_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            self.outcome = Outcome.of(failure)
        status, reason = self.outcome.status, self.outcome.reason
        if self.run is not None:
            self.run.end(status, self.outcome.exit_status, reason, self.state.iterations_done)
        if failure is None and not evaluating:
            _LOG.info("%s", f"{status}: {reason}" if reason else status)
        return failure

    def _find_prefetch(self) -> Prefetch | None:
        """Return what prepares batches, None when there is nothing or a hook may change them afterwards."""
        prefetch = self.model.prefetcher() if self.prefetches else None
        if prefetch is not None and self.events.changers:
            _LOG.info(
                "batches are not copied to the device ahead: %s.before_batch may change them (a hook that only looks "
                "says so with `changes_batches = False`)",
                self.events.changers[0],
            )
            return None
        return prefetch
