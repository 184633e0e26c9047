"""The signals and terminations that end a run, and the points at which they end it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from emrun.base.arguments import check_choice
from emrun.base.types import InsteadOf, InterruptPolicy, Policy
from emrun.hook import TrainingTerminated
from emrun.loop.interrupts import Ending, Interrupted, Interrupts

_LOG = logging.getLogger(__name__)

_BETWEEN = ("before_training", "before_epoch", "after_epoch", "after_epoch_profile")  # a limit ends the run here
_DEFERRED = ("before_batch", "before_update", "after_update", "after_checkpoint")  # until the batch has been run


class Endings:
    """Collects the signals and terminations that end the training, and decides when it ends.

    A signal ends the training after the update of the batch, or after the epoch. A termination ends it when all hooks
    have got the event in which a hook raised the termination; after the batch if the event belongs to an update, after
    the update if it is `after_batch`, and after the next batch, or the epoch, if it is `after_checkpoint`. In an
    evaluation, terminations have no effect, and a signal ends the evaluation after the batch. A limit ends the training
    after the epoch if its batch is the last one of the epoch, or if the epoch is being evaluated.

    Args:
        on_interrupt: whether the first signal ends the training after the current `batch` or `epoch`; see `Interrupts`.
        wake: called on a signal to end the wait for a batch; must not block.
        waits: returns whether the run must not end yet, because the model is within the batches of an update.
        request: requests a checkpoint.
        patience: the seconds in which the same signal again does not count.
    """

    def __init__(
        self,
        on_interrupt: InterruptPolicy,
        wake: Callable[[], None],
        waits: Callable[[], bool] = lambda: False,
        request: Callable[[str, Policy, InsteadOf], None] = lambda name, on_failure, instead_of: None,
        patience: float = 0,
    ) -> None:
        check_choice("on_interrupt", on_interrupt, InterruptPolicy)
        self.evaluating = False
        """Whether the loop only evaluates."""
        self.at_end = False
        """Whether the extra streams are evaluated once more after a limit has ended the training."""
        self.limit: TrainingTerminated | None = None
        """The limit that has been reached and ends the training."""
        self.news = False
        """Whether to call `look` after the batch, because of a signal, a termination or a requested checkpoint."""
        self._wake_stream = wake
        self._waits = waits
        self.request = request
        """Requests a checkpoint; see `Loop.request_checkpoint`."""
        self._interrupts = Interrupts(self._wake, on_interrupt, patience)
        self._termination: TrainingTerminated | None = None
        self._begins_again = False
        self._is_announced = False  # whether the end after this epoch has been logged

    @property
    def ending(self) -> Ending | None:
        """How signals end the run; None if there was none."""
        return self._interrupts.ending

    @property
    def have_effect(self) -> bool:
        """Whether terminations and requests for checkpoints have an effect."""
        return not (self.evaluating or self._begins_again)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Only evaluate in this block."""
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False

    @contextmanager
    def beginning_again(self) -> Iterator[None]:
        """Begin an epoch that is resumed in its middle; terminations and requests have no effect in this block."""
        self._begins_again = True
        try:
            yield
        finally:
            self._begins_again = False

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Evaluate once more in this block, at the end; terminations have no effect in it."""
        self.at_end = True
        try:
            yield
        finally:
            self.at_end = False

    def begin(self) -> None:
        """Handle signals until `restore`; forget earlier signals and terminations."""
        self._termination, self.limit, self._is_announced = None, None, False
        self._interrupts.install()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._interrupts.restore()

    def take(self, event: str, ended: Sequence[TrainingTerminated]) -> None:
        """Handle the terminations that hooks raised in an event.

        Raises:
            TrainingTerminated: the training ends now.
        """
        if not self.have_effect or self.at_end:
            return
        reasons = "; ".join(dict.fromkeys(error.reason for error in ended))
        is_limit = any(error.limit for error in ended)
        termination = ended[0] if len(ended) == 1 else TrainingTerminated(reasons, limit=is_limit)
        waits = event not in _BETWEEN if is_limit else event in _DEFERRED or (event == "after_batch" and self._waits())
        if not waits:
            raise termination
        self.defer(termination)
        self.news = True

    def defer(self, termination: TrainingTerminated) -> None:
        """End the training with this termination at the next call of `raise_if_due`."""
        if termination.limit:
            self.limit = self.limit or termination
        else:
            self._termination = self._termination or termination

    def agree(self) -> None:
        """Let all ranks end the run at the same point; here there is one."""

    def take_notice(self) -> None:
        """Make the loop call `look` after the current batch."""
        self.news = True

    def announce_wait(self) -> None:
        """Log once that the run does not end before the end of the update."""
        reason = self._termination or self.limit
        if reason is None and self.ending is not None and self.ending.after_batch:
            reason = Interrupted(self.ending.signal)
        if reason is not None and not self._is_announced:
            self._is_announced = True
            _LOG.info("%s; the run ends with the last batch of this update", reason)

    def look(self, is_last: Callable[[], bool]) -> bool:
        """Handle the news; return whether the loop leaves the stream after this batch.

        Args:
            is_last: returns whether the batch is the last one, after which a limit does not leave the stream.
        """
        self.news = False
        if self.is_interrupted() or self._termination is not None:
            return True
        if self.limit is not None and not is_last():
            return True
        if self.ending is not None and not self._is_announced:
            self._is_announced = True
            name = signal.Signals(self.ending.signal).name
            _LOG.info("%s: the training ends after this epoch; SIGTERM or a second signal ends it after a batch", name)
        return False

    def wants_checkpoint(self) -> bool:
        """Return whether a signal has requested a checkpoint since the last call."""
        wanted, self._interrupts.wants_checkpoint = self._interrupts.wants_checkpoint, False
        return wanted

    def is_interrupted(self) -> bool:
        """Return whether a signal ends the epoch after the current batch."""
        is_wanted = self.ending is not None and (self.ending.after_batch or self.evaluating)
        return is_wanted and (self.evaluating or not self._waits())

    def raise_if_due(self, *, in_epoch: bool = False, is_left: bool = False) -> None:
        """Raise what ends the training: a signal, or a termination that was deferred.

        Args:
            in_epoch: whether the epoch is not complete.
            is_left: whether the train stream was left before its end; else a limit waits for the end of the epoch.
        """
        if self.ending is not None and (not in_epoch or self.is_interrupted()):
            raise Interrupted(self.ending.signal)
        ends = self.limit or self._termination
        if ends is not None and not (self.evaluating or self.at_end or (ends.limit and in_epoch and not is_left)):
            raise ends

    def _wake(self) -> None:
        """Make the loop notice a signal; called by the signal handler."""
        self.news = True
        self._wake_stream()
