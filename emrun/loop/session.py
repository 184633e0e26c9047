"""The two ends of the `with` block of a main loop: what is begun, and what is left in order whatever happened."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from emrun.arguments import check_exit_status
from emrun.errors import reason_of
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.epochs import Epochs
from emrun.loop.first_batch import FirstBatch
from emrun.loop.outcome import Outcome
from emrun.types import Prefetch

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Begins and ends the time in which epochs are run.

    Args:
        epochs: what is run in between, with all that it is run with.
        first_batch: shows it to a lazy model.
        prefetches: whether batches may be prepared for the model ahead of their turn.
        preempt_exit_code: the exit status after SIGTERM, None for ending by the signal.
    """

    epochs: Epochs
    first_batch: FirstBatch
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
        epochs = self.epochs
        if epochs.run is not None:
            epochs.run.log.open()
        self.is_open = True
        self.outcome = None
        epochs.begin_session()
        try:
            epochs.endings.begin()
            self.first_batch.show(epochs.model, may_fail=bool(epochs.events.changers))
            self.prefetch = self._find_prefetch()
            epochs.events.notify("before_training")
            self.first_batch.show(epochs.model)  # which may need the before_training of the hooks that change batches
        except TrainingTerminated as error:
            epochs.endings.defer(error)
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
        epochs, failure = self.epochs, error
        try:
            failure = self._close(error)
        except BaseException as last_error:
            failure = last_error
            raise
        finally:
            self.is_open = False
            epochs.endings.restore()
            if epochs.run is not None:
                epochs.run.log.close(failure)
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop reading, save, and call the last events; return what made the training fail, if anything did."""
        epochs, failure = self.epochs, None if isinstance(error, TrainingTerminated) else error
        evaluating = epochs.endings.evaluating
        epochs.streams.stop()
        try:
            if failure is None and not evaluating:
                epochs.saving.save_latest(*epochs.state.point)
                epochs.loss.look(epochs.state.epochs_done + 1, epochs.state.iterations_done)
            else:
                epochs.saving.wait()
        except BaseException as saving_error:
            if failure is not None:
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            failure = failure or saving_error
        epochs.saving.close()
        if not isinstance(failure, TrainingAborted):  # the guard has said it
            epochs.loss.warn()
        outcome = Outcome.of(failure or error, None if evaluating else self.preempt_exit_code)
        self.outcome = replace(outcome, warning=epochs.loss.warning)
        if failure is not None:
            epochs.events.notify_all("on_error", error=failure)
        hook_error = epochs.events.notify_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            self.outcome = Outcome.of(failure)
        status, reason = self.outcome.status, self.outcome.reason
        if epochs.run is not None:
            epochs.run.end(status, self.outcome.exit_status, reason, *epochs.state.point[:2])
        if failure is None and not evaluating:
            _LOG.info("%s", f"{status}: {reason}" if reason else status)
        return failure

    def _find_prefetch(self) -> Prefetch | None:
        """Return what prepares batches, None when there is nothing or a hook may change them afterwards."""
        prefetch = self.epochs.model.prefetcher() if self.prefetches else None
        if prefetch is not None and self.epochs.events.changers:
            _LOG.info(
                "batches are not copied to the device ahead: %s.before_batch may change them (a hook that only looks "
                "says so with `changes_batches = False`)",
                self.epochs.events.changers[0],
            )
            return None
        return prefetch
