"""The beginning and the end of the `with` block of a main loop; the end also cleans up after an error."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from emrun.base.arguments import check_exit_status
from emrun.base.censor import hidden
from emrun.base.errors import reason_of
from emrun.base.randomness import sole_use
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.terminal import restore_logging
from emrun.base.types import Prefetch
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.batch_calls import Calls
from emrun.loop.epochs import Epochs
from emrun.loop.hangs import HangWatch
from emrun.loop.loss_watch import LossWatch
from emrun.loop.outcome import Outcome
from emrun.loop.steps import StepRecord
from emrun.storage.log import RunLog
from emrun.storage.run import Run
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Begins and ends the block in which epochs are run.

    Args:
        epochs: the epochs, with all that they use.
        run: the run; None without a run directory.
        steps: the step record.
        loss: knows whether the loss was finite.
        prefetches: whether batches may be prepared for the model ahead of their turn.
        preempt_exit_code: the exit status after SIGTERM; None to end the process by the signal.
        log: the log of this process; None for none.
    """

    epochs: Epochs
    run: Run | None
    steps: StepRecord
    loss: LossWatch
    prefetches: bool
    preempt_exit_code: int | None
    log: RunLog | None
    prefetch: Prefetch | None = field(default=None, init=False)
    """The function that prepares batches for the model ahead of their turn; None if there is none."""
    is_open: bool = field(default=False, init=False)
    _hangs: HangWatch | None = field(default=None, init=False)
    _silence: NamedWhenSlow | None = field(default=None, init=False)  # until the first batch
    _alone: ExitStack = field(default_factory=ExitStack, init=False)  # while no other thread may train

    def __post_init__(self) -> None:
        if self.preempt_exit_code is not None:
            check_exit_status("preempt_exit_code", self.preempt_exit_code)

    def begin(self) -> None:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks.

        Raises:
            UsageError: another thread trains; or this training begins inside another one.
        """
        epochs = self.epochs
        with ExitStack() as alone:
            alone.enter_context(sole_use("evaluation" if epochs.loop.evaluating else "training"))
            if self.log is not None:
                self.log.open()
            if self.run is not None and self.run.code is not None:
                self.run.code.begin()
            self._alone = alone.pop_all()
        self.is_open = True
        epochs.loop.outcome = None
        self._silence = None
        try:
            epochs.endings.begin()
            if self.log is not None and epochs.events.of_ranks is not None:
                self._hangs = HangWatch(epochs.events.of_ranks.ranks, self.log.path)
                self._hangs.start()
            if epochs.events.of_ranks is not None:
                epochs.loop.model.begin_alike()
            self.prefetch = self._find_prefetch()
            epochs.loop.rows.sinks.clear()  # of an earlier session
            epochs.loop.rows.listeners.clear()
            epochs.events.notify("before_training")
        except TrainingTerminated as error:
            epochs.endings.defer(error)
        except BaseException as error:
            self.end(error)
            raise

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Log a line if the first batch of the session takes long."""
        if self._silence is None:
            self._silence = NamedWhenSlow("reading and running the first batch").__enter__()
            calls.first.append(lambda outputs: self._end_silence())
            calls.end.append(self._end_silence)

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

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
        restore_logging()
        self._end_silence()
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
            epochs.endings.restore()
            if self.log is not None:
                self.log.close(failure)
            if self.run is not None:
                self.run.close()
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop reading, save, and call the last events; return the error that made the training fail, if any."""
        epochs, failure = self.epochs, None if isinstance(error, TrainingTerminated) else error
        evaluating = epochs.loop.evaluating
        epochs.streams.stop()
        try:
            if epochs.state.kept.is_used and epochs.loop.model.is_sharded:
                _LOG.warning("the epoch is not saved before its evaluation: the weights lie on several ranks")
                epochs.saving.wait()
            elif epochs.state.kept.is_used:
                epochs.saving.save_only_latest(*epochs.state.point)
            elif failure is None and not evaluating:
                self.loss.look()
                epochs.saving.save_latest(*epochs.state.point)
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
            self.loss.warn()
        outcome = Outcome.of(failure or error, None if evaluating else self.preempt_exit_code)
        if epochs.endings.ended_by is not None and outcome.status == "failed":
            why = f"{hidden(epochs.endings.ended_by.reason)}, but the evaluation at the end failed: {outcome.reason}"
            outcome = replace(outcome, status="finished", reason=why)
        epochs.loop.outcome = replace(outcome, warning=self.loss.warning)
        if failure is not None:
            epochs.events.notify_all("on_error", error=failure)
        self._alone.close()  # all is saved: hooks may begin another training
        hook_error = epochs.events.notify_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            epochs.loop.outcome = Outcome.of(failure)
        outcome = epochs.loop.outcome
        status, reason = outcome.status, outcome.reason
        if self.run is not None:
            self.run.end(status, outcome.exit_status, reason, *epochs.state.point[:2])
        if failure is None and not evaluating:
            _LOG.info("%s", f"{status}: {reason}" if reason and status != "interrupted" else reason or status)
        return failure

    def _complete_steps(self) -> None:
        """Write the steps and rows that are not written yet; the run may have failed, so errors are logged."""
        try:
            self.epochs.loop.rows.flush()
            self.steps.close()
        except Exception as error:  # a device that has failed raises any error
            _LOG.warning("the last steps were not recorded: %s", reason_of(error))

    def _find_prefetch(self) -> Prefetch | None:
        """Return the function that prepares batches; None if there is none, or if a hook may change batches later."""
        prefetch = self.epochs.loop.model.prefetcher() if self.prefetches else None
        if prefetch is not None and self.epochs.events.changes.by:
            _LOG.info(
                "batches are not copied to the device ahead of their turn, because %s.before_batch may change them; a "
                "hook that only looks at batches can set `changes_batches = False`",
                self.epochs.events.changes.by[0],
            )
            return None
        return prefetch
