"""What ends a training: which signal or termination, and when it counts."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from emrun.arguments import check_choice
from emrun.hook import TrainingTerminated
from emrun.loop.interrupts import Interrupts
from emrun.types import InterruptPolicy

_LOG = logging.getLogger(__name__)

_DEFERRED = ("before_update", "after_update")  # a termination in these takes effect when the update is done


class Endings:
    """Knows what ends the training, and says when.

    A signal ends it after the batch or the epoch, a termination at the end of the event in which a hook raised it, or
    after the batch when that is one of an update. In an evaluation terminations have no effect, and a signal ends it
    after the batch.

    Args:
        on_interrupt: after what the first signal ends it: the current `batch` or `epoch`.
        wake: ends the wait for a batch when there is a signal; must not block.
    """

    def __init__(self, on_interrupt: InterruptPolicy, wake: Callable[[], None]) -> None:
        check_choice("on_interrupt", on_interrupt, InterruptPolicy)
        self.evaluating = False
        """Whether nothing but an evaluation is to be done."""
        self.news = False
        """Whether to call `look` after the batch: a signal, a termination, or something to be saved."""
        self._on_interrupt = on_interrupt
        self._wake_stream = wake
        self._interrupts = Interrupts(self._wake)
        self._termination: TrainingTerminated | None = None
        self._begins_again = False
        self._is_announced = False  # whether the log says that a signal ends the training after this epoch

    @property
    def have_effect(self) -> bool:
        """Whether a termination or a request for a checkpoint has an effect."""
        return not (self.evaluating or self._begins_again)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Do nothing but an evaluation in this block."""
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False

    @contextmanager
    def beginning_again(self) -> Iterator[None]:
        """Begin an epoch that is resumed in its middle: nothing has an effect in this block."""
        self._begins_again = True
        try:
            yield
        finally:
            self._begins_again = False

    def begin(self) -> None:
        """Listen to signals, until `restore`; what there was before is forgotten."""
        self._termination, self._is_announced = None, False
        self._interrupts.install()

    def restore(self) -> None:
        """Put the signal handlers back that were there before."""
        self._interrupts.restore()

    def take(self, event: str, ended: Sequence[TrainingTerminated]) -> None:
        """Take what hooks raised in an event to end the training.

        Raises:
            TrainingTerminated: it ends now.
        """
        if not self.have_effect:
            return
        reasons = "; ".join(dict.fromkeys(error.reason for error in ended))
        termination = ended[0] if len(ended) == 1 else TrainingTerminated(reasons)
        if event not in _DEFERRED:
            raise termination
        self.defer(termination)
        self.news = True

    def defer(self, termination: TrainingTerminated) -> None:
        """Let the training end with this termination as soon as it can."""
        self._termination = self._termination or termination

    def take_notice(self) -> None:
        """Let the loop look after the batch at what happened elsewhere."""
        self.news = True

    def look(self) -> bool:
        """Look at the news; return whether the stream ends here."""
        self.news = False
        if self.is_interrupted() or self._termination is not None:
            return True
        if self._interrupts.signal is not None and not self._is_announced:
            self._is_announced = True
            name = signal.Signals(self._interrupts.signal).name
            _LOG.info("%s: the training ends after this epoch; another one ends it at once", name)
        return False

    def wants_checkpoint(self) -> bool:
        """Tell, once, whether a signal asked for a checkpoint."""
        wanted, self._interrupts.wants_checkpoint = self._interrupts.wants_checkpoint, False
        return wanted

    def is_interrupted(self) -> bool:
        """Tell whether a signal ends the epoch where it is."""
        return self._interrupts.signal is not None and (self._on_interrupt == "batch" or self.evaluating)

    def raise_if_due(self, *, in_epoch: bool = False) -> None:
        """Raise what ends the training: a signal, or a termination that waited for the end of an update."""
        if not in_epoch or self.is_interrupted():
            self._interrupts.raise_if_any()
        if self._termination is not None and not self.evaluating:
            raise self._termination

    def _wake(self) -> None:
        """Let the loop notice a signal; called by the handler."""
        self.news = True
        self._wake_stream()
