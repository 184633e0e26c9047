"""The signals of a process that starts others: those that it handles, and the one that says that a child has ended."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

from emrun.base.signals import handled

_ENDING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Collects signals, and waits until one of them arrives or a child ends; a context for the main thread.

    Args:
        numbers: the signals.

    Attributes:
        pending: the numbers of the signals that arrived, oldest first.
    """

    def __init__(self, numbers: Sequence[int] = _ENDING) -> None:
        self.pending: list[int] = []
        self._numbers = numbers
        self._reader, self._writer = socket.socketpair()
        self._entered = ExitStack()

    def __enter__(self) -> Signals:
        for each in (self._reader, self._writer):
            each.setblocking(False)
            self._entered.enter_context(each)
        self._entered.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        )
        self._entered.enter_context(handled(dict.fromkeys((*self._numbers, signal.SIGCHLD), self._note)))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most so long; one that arrived since the last call counts."""
        if select.select([self._reader], [], [], seconds)[0]:
            self._reader.recv(4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._numbers:
            self.pending.append(number)


def forget_in_child() -> None:
    """Undo in a forked child what `Signals` has set; SIGINT and SIGTERM get the handlers of a new Python."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
