"""The beginning and the end of the `with` block of a main loop; the end also cleans up after an error."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from emrun.base.arguments import check_exit_status
from emrun.base.censor import hidden
from emrun.base.errors import reason_of
from emrun.base.randomness import sole_use
from emrun.base.terminal import restore_logging
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.batches import BatchLoop
from emrun.loop.outcome import Outcome
from emrun.loop.parts import Parts
from emrun.loop.ranks.hangs import HangWatch
from emrun.storage.log import RunLog

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Begins and ends the block in which epochs are run.

    Args:
        parts: what takes part.
        batches: runs the batches of a stream.
        log: the log of this process; None for none.
        preempt_exit_code: the exit status after SIGTERM; None to end the process by the signal.
    """

    parts: Parts
    batches: BatchLoop
    log: RunLog | None
    preempt_exit_code: int | None
    is_open: bool = field(default=False, init=False)
    outcome: Outcome | None = field(default=None, init=False)
    """How the session ended; None before."""
    _hangs: HangWatch | None = field(default=None, init=False)
    _alone: ExitStack = field(default_factory=ExitStack, init=False)  # while no other thread may train

    def __post_init__(self) -> None:
        if self.preempt_exit_code is not None:
            check_exit_status("preempt_exit_code", self.preempt_exit_code)

    def begin(self) -> None:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks.

        Raises:
            UsageError: another thread trains; or this training begins inside another one.
        """
        parts = self.parts
        with ExitStack() as alone:
            alone.enter_context(sole_use("evaluation" if parts.progress.evaluating else "training"))
            if self.log is not None:
                self.log.open()
            if parts.run is not None and parts.run.code is not None:
                parts.run.code.begin()
            self._alone = alone.pop_all()
        self.is_open = True
        self.outcome = None
        self.batches.begin_session()
        try:
            parts.requests.begin()
            if parts.ranks.several:
                self._begin_on_ranks()
            parts.prefetching.begin()
            parts.record.begin_session()
            parts.callbacks.notify("before_training")
        except TrainingTerminated as error:
            parts.requests.end_later(error)
        except BaseException as error:
            self.end(error)
            raise

    def _begin_on_ranks(self) -> None:
        """Begin to watch for ranks that hang; let all ranks have the same weights."""
        if self.log is not None:
            self._hangs = HangWatch(self.parts.ranks, self.log.path)
            self._hangs.start()
        self.parts.model.begin_alike()

    def end(self, error: BaseException | None) -> bool:
        """Save the last checkpoint, call `after_training` of all hooks, restore the signal handlers, close the log.

        Args:
            error: the error or the termination that ended the block; None if the block simply ended.

        Returns:
            Whether to suppress `error`: true for a termination and for None.

        Raises:
            BaseException: an error of the last checkpoint or of a hook, if nothing failed before.
        """
        failure = error
        restore_logging()
        self.batches.end_first_wait()
        try:
            failure = self._close(error)
        except BaseException as last_error:
            failure = last_error
            raise
        finally:
            self.is_open = False
            if self._hangs is not None:
                self._hangs.stop()
                self._hangs = None
            self._alone.close()
            self.parts.requests.restore()
            if self.log is not None:
                self.log.close(failure)
            if self.parts.run is not None:
                self.parts.run.close()
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop reading, save, and call the last events; return the error that made the training fail, if any."""
        parts = self.parts
        evaluating = parts.progress.evaluating
        failure = None if isinstance(error, TrainingTerminated) else error

        # the last checkpoint, and what is not written yet
        parts.streams.stop()
        failure = self._save_last(failure)
        if not evaluating:
            self._complete_record()
        if not isinstance(failure, TrainingAborted):  # the hook that raised it has given the reason
            parts.loss.warn()

        # how it ended
        outcome = Outcome.of(failure or error, None if evaluating else self.preempt_exit_code)
        limit = parts.requests.ended_by
        if limit is not None and outcome.status == "failed":
            why = f"{hidden(limit.reason)}, but the evaluation at the end failed: {outcome.reason}"
            outcome = replace(outcome, status="finished", reason=why)
        self.outcome = replace(outcome, warning=parts.loss.warning)

        # the last events
        if failure is not None:
            parts.callbacks.notify_all("on_error", error=failure)
        self._alone.close()  # all is saved: hooks may begin another training
        hook_error = parts.callbacks.notify_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            self.outcome = Outcome.of(failure)
        self._report_end(self.outcome, is_logged=failure is None and not evaluating)
        return failure

    def _save_last(self, failure: BaseException | None) -> BaseException | None:
        """Save the last checkpoint, and end the thread that writes; return the error that made the training fail."""
        parts = self.parts
        checkpointer = parts.checkpointer
        try:
            if parts.snapshot.is_before_evaluation and parts.model.is_sharded:
                _LOG.warning("the epoch is not saved before its evaluation: the weights lie on several ranks")
                checkpointer.wait()
            elif parts.snapshot.is_before_evaluation:
                checkpointer.save_only_latest()
            elif failure is None and not parts.progress.evaluating:
                parts.loss.look()
                checkpointer.save_latest()
            else:
                checkpointer.wait()
        except BaseException as saving_error:
            if failure is not None:
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            failure = failure or saving_error
        if failure is not None:
            try:
                checkpointer.report_saved()
            except BaseException:
                _LOG.exception("a hook failed in after_checkpoint")
        checkpointer.close()
        return failure

    def _complete_record(self) -> None:
        """Write the steps and rows that are not written yet; the run may have failed, so errors are logged."""
        try:
            self.parts.record.flush()
            self.parts.steps.close()
        except Exception as error:  # a device that has failed raises any error
            _LOG.warning("the last steps were not recorded: %s", reason_of(error))

    def _report_end(self, outcome: Outcome, *, is_logged: bool) -> None:
        """Write how the session ended into the trace, and log it."""
        status = outcome.status
        reason = outcome.reason
        progress = self.parts.progress
        if self.parts.run is not None:
            self.parts.run.end(status, outcome.exit_status, reason, progress.epochs_done, progress.iterations_done)
        if is_logged:
            _LOG.info("%s", f"{status}: {reason}" if reason and status != "interrupted" else reason or status)
