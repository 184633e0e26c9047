"""Signals that end the training or request a checkpoint: handlers that set flags."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType

from emrun.hook import TrainingTerminated

_LOG = logging.getLogger(__name__)
_ENDING = (signal.SIGINT, signal.SIGTERM)
_SAVING = signal.SIGUSR1


class Interrupted(TrainingTerminated):
    """A signal ends the training; a checkpoint is saved."""

    def __init__(self, signal_number: int) -> None:
        self.signal = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class Interrupts:
    """Handles the first SIGINT or SIGTERM, and each SIGUSR1, between `install` and `restore`.

    The handler of SIGINT and SIGTERM sets `signal`, calls `wake` and restores the default action, so that a second
    signal ends the process at once. The handler of SIGUSR1 sets `wants_checkpoint` and calls `wake`.

    Args:
        wake: called by the handlers to end a wait; must not block.
        patience: the seconds after the first signal in which another one is ignored.
    """

    def __init__(self, wake: Callable[[], None], patience: float = 0) -> None:
        self.signal: int | None = None
        self.wants_checkpoint = False
        self._wake = wake
        self._patience = patience
        self._since = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def install(self) -> None:
        """Install the handlers; outside the main thread, where Python does not allow handlers, only log a line."""
        self.signal = None
        self.wants_checkpoint = False
        if threading.current_thread() is not threading.main_thread():
            _LOG.info("not in the main thread: this training does not handle SIGINT, SIGTERM and SIGUSR1")
            return
        for number in _ENDING:
            self._previous[number] = signal.signal(number, self._end)
        self._previous[_SAVING] = signal.signal(_SAVING, self._save)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous = {}

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and monotonic() - self._since < self._patience:
            return
        is_first, self.signal, self._since = self.signal is None, number, monotonic()
        if not (is_first and self._patience):
            for each in _ENDING:
                signal.signal(each, signal.SIG_DFL)
        if is_first:
            self._wake()
        else:
            os.kill(os.getpid(), number)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.wants_checkpoint = True
        self._wake()
