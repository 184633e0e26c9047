"""The signals and terminations that end a run, and the points at which they end it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from emrun.base.arguments import check_choice
from emrun.base.types import InsteadOf, InterruptPolicy, Policy
from emrun.hook import Loop, TrainingTerminated
from emrun.loop.interrupts import Ending, Interrupted, Interrupts

_LOG = logging.getLogger(__name__)

_BETWEEN = ("before_training", "before_epoch", "after_epoch", "after_epoch_profile")  # a limit ends the run here
_DEFERRED = ("before_batch", "before_update", "after_update", "after_checkpoint")  # until the batch has been run


@contextmanager
def switched_on(owner: object, name: str, to: object = True) -> Iterator[None]:
    """Set an attribute in a block, by default to True."""
    before = getattr(owner, name)
    setattr(owner, name, to)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Endings:
    """Collects the signals and terminations that end the training, and decides when it ends.

    A signal ends the training after the update of the batch, or after the epoch. A termination ends it when all hooks
    have got the event in which a hook raised the termination; after the batch if the event belongs to an update, after
    the update if it is `after_batch`, and after the next batch, or the epoch, if it is `after_checkpoint`. In an
    evaluation, terminations have no effect, and a signal ends the evaluation after the batch. A limit ends the training
    after the epoch if its batch is the last one of the epoch, or if the epoch is being evaluated.

    Args:
        loop: knows whether it evaluates, and whether its model is within the batches of an update; then the run must
            not end yet.
        on_interrupt: whether the first signal ends the training after the current `batch` or `epoch`; see `Interrupts`.
        patience: the seconds in which the same signal again does not count.
    """

    is_alone = False
    """Whether a hook is called on this rank only, of several, so that what it wants is a wish."""

    def __init__(self, loop: Loop, on_interrupt: InterruptPolicy, patience: float = 0) -> None:
        check_choice("on_interrupt", on_interrupt, InterruptPolicy)
        self._loop = loop
        self.limit: TrainingTerminated | None = None
        """The limit that has been reached and ends the training."""
        self.ended_by: TrainingTerminated | None = None
        """The limit after which the extra streams are, or were, evaluated once more."""
        self.must_look = False
        """Whether to call `look` after the batch, because of a signal, a termination or a requested checkpoint."""
        self.wake_stream: Callable[[], None] = lambda: None
        """Called on a signal to end the wait for a batch; must not block."""
        self.request: Callable[[str, Policy, InsteadOf], None]
        """Requests a checkpoint."""
        self._known = self._interrupts = Interrupts(self._wake, on_interrupt, patience)  # the latter gets signals
        self._termination: TrainingTerminated | None = None
        self.begins_again = False
        """Whether an epoch that is resumed in its middle begins: terminations and requests have no effect then."""
        self._is_announced = False  # whether the end after this epoch has been logged

    @property
    def ending(self) -> Ending | None:
        """How signals end the run; None if there was none."""
        return self._known.ending

    @property
    def have_effect(self) -> bool:
        """Whether terminations and requests for checkpoints have an effect."""
        return not (self._loop.evaluating or self.begins_again)

    def begin(self) -> None:
        """Handle signals until `restore`; forget earlier signals and terminations."""
        self._termination = self.limit = self.ended_by = None
        self._is_announced = False
        self._interrupts.install()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._interrupts.restore()

    def take(self, event: str, ended: Sequence[TrainingTerminated]) -> None:
        """Handle the terminations that hooks raised in an event.

        Raises:
            TrainingTerminated: the training ends now.
        """
        if not self.have_effect or self._loop.at_end:
            return
        reasons = "; ".join(dict.fromkeys(error.reason for error in ended))
        is_limit = any(error.limit for error in ended)
        termination = ended[0] if len(ended) == 1 else TrainingTerminated(reasons, limit=is_limit)
        waits = (
            event not in _BETWEEN
            if is_limit
            else event in _DEFERRED or (event == "after_batch" and self._loop.model.is_accumulating)
        )
        if not waits:
            raise termination
        self.defer(termination)
        self.must_look = True

    def defer(self, termination: TrainingTerminated) -> None:
        """End the training with this termination at the next call of `raise_if_due`."""
        if termination.limit:
            self.limit = self.limit or termination
        else:
            self._termination = self._termination or termination

    def ask(self, name: str, on_failure: Policy, instead_of: InsteadOf) -> None:
        """Request a checkpoint; see `Loop.request_checkpoint`."""
        if self.have_effect:
            self.request(name, on_failure, instead_of)
            self.must_look = True

    def agree(self) -> None:
        """Let all ranks end the run at the same point; here there is one."""

    def take_notice(self) -> None:
        """Make the loop call `look` after the current batch."""
        self.must_look = True

    def announce_wait(self) -> None:
        """Log once that the run does not end before the end of the update."""
        reason = self._termination or self.limit
        if reason is None and self.ending is not None and self.ending.after_batch:
            reason = Interrupted(self.ending.signal)
        if reason is not None and not self._is_announced:
            self._is_announced = True
            _LOG.info("%s; the run ends with the last batch of this update", reason)

    def look(self, is_last: Callable[[], bool]) -> bool:
        """Handle what has happened; return whether the loop leaves the stream after this batch.

        Args:
            is_last: returns whether the batch is the last one, after which a limit does not leave the stream.
        """
        self.must_look = False
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
        wanted, self._known.wants_checkpoint = self._known.wants_checkpoint, False
        return wanted

    def is_interrupted(self) -> bool:
        """Return whether a signal ends the epoch after the current batch."""
        is_wanted = self.ending is not None and (self.ending.after_batch or self._loop.evaluating)
        return is_wanted and (self._loop.evaluating or not self._loop.model.is_accumulating)

    def raise_if_due(self, *, in_epoch: bool = False, is_left: bool = False) -> None:
        """Raise what ends the training: a signal, or a termination that was deferred.

        Args:
            in_epoch: whether the epoch is not complete.
            is_left: whether the train stream was left before its end; else a limit waits for the end of the epoch.
        """
        if self.ending is not None and (not in_epoch or self.is_interrupted()):
            raise Interrupted(self.ending.signal)
        ends = self.limit or self._termination
        if ends is not None and not (
            self._loop.evaluating or self._loop.at_end or (ends.limit and in_epoch and not is_left)
        ):
            raise ends

    def _wake(self) -> None:
        """Make the loop notice a signal; called by the signal handler."""
        self.must_look = True
        self.wake_stream()
