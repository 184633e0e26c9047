"""Signals that ask a training to end, turned into a flag."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

from emrun.hook import TrainingTerminated

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(TrainingTerminated):
    """The training ends because of a signal, with a checkpoint."""

    def __init__(self, signal_number: int) -> None:
        self.signal = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class Interrupts:
    """Notices the first SIGINT or SIGTERM between `install` and `restore`.

    The handler sets `signal`, calls `wake` and restores the default action, so that the second signal ends the process
    at once, whatever it is doing.

    Args:
        wake: called by the handler to end a wait; must not block.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.signal: int | None = None
        self._wake = wake
        self._previous: dict[signal.Signals, object] = {}

    def install(self) -> None:
        """Install the handlers; outside the main thread, where Python does not allow it, only say so."""
        self.signal = None
        if threading.current_thread() is not threading.main_thread():
            _LOG.info("not in the main thread: SIGINT and SIGTERM are not handled by this training")
            return
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous = {}

    def raise_if_any(self) -> None:
        """Raise `Interrupted` when there was a signal."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._wake()
