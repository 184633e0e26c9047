"""Signals that end the training or request a checkpoint: handlers that set flags."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from types import FrameType
from typing import NamedTuple

from emrun.base.signals import handled, is_main_thread, unless_ignored
from emrun.base.terminal import leave_closed_terminal
from emrun.base.types import InterruptPolicy
from emrun.hook import TrainingTerminated

_LOG = logging.getLogger(__name__)
_ENDING = (signal.SIGINT, signal.SIGTERM)
_HANGUP = signal.SIGHUP
_SAVING = signal.SIGUSR1


class Interrupted(TrainingTerminated):
    """A signal ends the training; a checkpoint is saved."""

    def __init__(self, signal_number: int) -> None:
        self.signal = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class Ending(NamedTuple):
    """How signals end the training.

    Args:
        signal: the number of the signal.
        after_batch: whether the training ends after the batch; otherwise after the epoch.
    """

    signal: int
    after_batch: bool


class Interrupts:
    """Handles the signals that end a training, and each SIGUSR1, between `install` and `restore`.

    With the policy `batch`, the first signal ends the training after the batch, and the second ends the process. With
    `epoch`, a first SIGINT ends the training after the epoch, SIGTERM or a second signal after the batch, and the third
    ends the process. The handler sets `ending` and calls `wake`; before the last signal it restores the default action,
    so that this signal has its effect whatever the process is doing. SIGHUP counts as SIGTERM, but only as the first
    signal, because a terminal that closes sends several; it is left ignored if it is, as by nohup.

    The handler of SIGUSR1 sets `wants_checkpoint` and calls `wake`.

    Args:
        wake: called by the handlers to end a wait; must not block.
        policy: see above.
        patience: the seconds in which the same signal again does not count.
    """

    def __init__(self, wake: Callable[[], None], policy: InterruptPolicy = "batch", patience: float = 0) -> None:
        self.ending: Ending | None = None
        self.wants_checkpoint = False
        self._wake = wake
        self._most = 1 if policy == "batch" else 2  # signals that the process survives
        self._patience = patience
        self._count = 0
        self._since = 0.0
        self._installed = ExitStack()

    def install(self) -> None:
        """Install the handlers; outside the main thread, where Python does not allow handlers, only log a line."""
        self.ending = None
        self._count = 0
        self.wants_checkpoint = False
        if not is_main_thread():
            _LOG.info("not in the main thread: this training does not handle SIGINT, SIGTERM, SIGHUP and SIGUSR1")
            return
        handlers = dict.fromkeys(unless_ignored([*_ENDING, _HANGUP]), self._end)
        self._installed.enter_context(handled({**handlers, _SAVING: self._save}))

    def restore(self) -> None:
        """Restore the previous handlers."""
        self._installed.close()

    def take(self, ending: Ending | None, *, wants_checkpoint: bool) -> None:
        """Take what the signals of all ranks ask for."""
        self.ending = ending
        self.wants_checkpoint |= wants_checkpoint

    def forget_checkpoint(self) -> None:
        """Forget that a signal has asked for a checkpoint."""
        self.wants_checkpoint = False

    def _end(self, number: int, frame: FrameType | None) -> None:
        if number == _HANGUP:
            leave_closed_terminal()
        before = self.ending
        is_again = before is not None and number == before.signal and monotonic() - self._since < self._patience
        if before is not None and (number == _HANGUP or is_again):
            return
        self._count += 1
        self._since = monotonic()
        if self._count > self._most or (self._count == self._most and not self._patience):
            for ending in _ENDING:
                signal.signal(ending, signal.SIG_DFL)
        if self._count > self._most:
            os.kill(os.getpid(), number)
            return
        self.ending = Ending(number, number != signal.SIGINT or self._count == self._most)
        self._wake()

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.wants_checkpoint = True
        self._wake()
