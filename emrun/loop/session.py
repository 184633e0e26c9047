"""The beginning and the end of the `with` block of a main loop; the end also cleans up after an error."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from emrun.base.arguments import check_exit_status
from emrun.base.errors import reason_of
from emrun.base.types import Prefetch
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.epochs import Epochs
from emrun.loop.first_batch import FirstBatch
from emrun.loop.outcome import Outcome
from emrun.storage.log import RunLog

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Begins and ends the block in which epochs are run.

    Args:
        epochs: the epochs, with all that they use.
        first_batch: gives a lazy model its shapes.
        prefetches: whether batches may be prepared for the model ahead of their turn.
        preempt_exit_code: the exit status after SIGTERM; None to end the process by the signal.
        log: the log of this process; None for none.
    """

    epochs: Epochs
    first_batch: FirstBatch
    prefetches: bool
    preempt_exit_code: int | None
    log: RunLog | None
    outcome: Outcome | None = field(default=None, init=False)
    """How the last session ended."""
    prefetch: Prefetch | None = field(default=None, init=False)
    """The function that prepares batches for the model ahead of their turn; None if there is none."""
    is_open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.preempt_exit_code is not None:
            check_exit_status("preempt_exit_code", self.preempt_exit_code)

    def begin(self) -> None:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks."""
        epochs = self.epochs
        if self.log is not None:
            self.log.open()
        if epochs.run is not None and epochs.run.code is not None:
            epochs.run.code.begin(epochs.state.iterations_done)
        self.is_open = True
        self.outcome = None
        epochs.begin_session()
        try:
            epochs.endings.begin()
            self.first_batch.show(epochs.model, may_fail=bool(epochs.events.changers))
            if epochs.events.of_ranks is not None:
                epochs.model.begin_alike()
            self.prefetch = self._find_prefetch()
            epochs.events.notify("before_training")
            self.first_batch.show(epochs.model)  # now the hooks that change batches are ready
        except TrainingTerminated as error:
            epochs.endings.defer(error)
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None) -> bool:
        """Save the last checkpoint, call `after_training` of all hooks, restore the signal handlers, close the log.

        Args:
            error: the error or the termination that ended the block; None if the block simply ended.

        Returns:
            Whether to suppress `error`: true for a termination and for None.

        Raises:
            BaseException: an error of the last checkpoint or of a hook, if nothing failed before.
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
            if self.log is not None:
                self.log.close(failure)
            if epochs.run is not None:
                epochs.run.close()
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop reading, save, and call the last events; return the error that made the training fail, if any."""
        epochs, failure = self.epochs, None if isinstance(error, TrainingTerminated) else error
        evaluating = epochs.endings.evaluating
        epochs.streams.stop()
        try:
            if epochs.state.has_gone_back:
                epochs.saving.save_only_latest(*epochs.state.point)
            elif failure is None and not evaluating:
                epochs.saving.save_latest(*epochs.state.point)
                epochs.loss.look(epochs.state.epochs_done + 1, epochs.state.iterations_done)
            else:
                epochs.saving.wait()
        except BaseException as saving_error:
            if failure is not None:
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            failure = failure or saving_error
        if failure is not None:
            try:
                epochs.saving.tell()
            except BaseException:
                _LOG.exception("a hook failed in after_checkpoint")
        epochs.saving.close()
        if not evaluating:
            self._complete_steps()
        if not isinstance(failure, TrainingAborted):  # the hook that raised it has given the reason
            epochs.loss.warn()
        outcome = Outcome.of(failure or error, None if evaluating else self.preempt_exit_code)
        if epochs.ended_by is not None and outcome.status == "failed":
            why = f"{epochs.ended_by.reason}, but the evaluation at the end failed: {outcome.reason}"
            outcome = replace(outcome, status="finished", reason=why)
        self.outcome = self._censored(replace(outcome, warning=epochs.loss.warning))
        if failure is not None:
            epochs.events.notify_all("on_error", error=failure)
        hook_error = epochs.events.notify_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            self.outcome = self._censored(Outcome.of(failure))
        status, reason = self.outcome.status, self.outcome.reason
        if epochs.run is not None:
            epochs.run.end(status, self.outcome.exit_status, reason, *epochs.state.point[:2])
        if failure is None and not evaluating:
            _LOG.info("%s", f"{status}: {reason}" if reason and status != "interrupted" else reason or status)
        return failure

    def _censored(self, outcome: Outcome) -> Outcome:
        """Return an outcome without values of the environment: hooks send the reason to trackers."""
        run = self.epochs.run
        if run is None or outcome.reason is None:
            return outcome
        return replace(outcome, reason=run.censor(outcome.reason))

    def _complete_steps(self) -> None:
        """Write the steps that are in the last checkpoint only; the run may have failed, so errors are logged."""
        try:
            self.epochs.steps.close()
        except Exception as error:  # a device that has failed raises any error
            _LOG.warning("the last steps were not recorded: %s", reason_of(error))

    def _find_prefetch(self) -> Prefetch | None:
        """Return the function that prepares batches; None if there is none, or if a hook may change batches later."""
        prefetch = self.epochs.model.prefetcher() if self.prefetches else None
        if prefetch is not None and self.epochs.events.changers:
            _LOG.info(
                "batches are not copied to the device ahead of their turn, because %s.before_batch may change them; a "
                "hook that only looks at batches can set `changes_batches = False`",
                self.epochs.events.changers[0],
            )
            return None
        return prefetch
