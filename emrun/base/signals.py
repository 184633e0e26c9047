"""Handlers of signals for a block of code, and a block that waits for signals and for the ends of children."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def is_main_thread() -> bool:
    """Return whether this is the only thread in which Python allows signal handlers."""
    return threading.current_thread() is threading.main_thread()


def unless_ignored(numbers: Iterable[int]) -> list[int]:
    """Return the numbers of signals without SIGHUP if this signal is ignored, as by nohup."""
    return [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals by functions in this block; outside the main thread nothing is changed.

    Args:
        handlers: number of a signal -> what `signal.signal` takes.
    """
    before = {number: signal.signal(number, each) for number, each in handlers.items()} if is_main_thread() else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


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
        self._reader = -1
        self._entered = ExitStack()

    def __enter__(self) -> Signals:
        self._reader, writer = os.pipe()
        for each in (self._reader, writer):
            os.set_blocking(each, False)
            self._entered.callback(os.close, each)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._entered.callback(signal.set_wakeup_fd, before)
        self._entered.enter_context(handled(dict.fromkeys((*self._numbers, signal.SIGCHLD), self._note)))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most so long; one that arrived since the last call counts."""
        if select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._numbers:
            self.pending.append(number)


def forget_in_child() -> None:
    """Undo in a forked child what `Signals` has set; SIGINT and SIGTERM get the handlers of a new Python."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
