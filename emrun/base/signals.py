"""Handlers of signals for a block of code, and a block that waits for signals and for the ends of children."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)
_OF_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What terminals and clusters send to a whole process group, and the parent handles for its children."""
Handler = Callable[[int, FrameType | None], object] | signal.Handlers
_MASKS: dict[int, set[Any]] = {}  # a thread that forks -> its mask before
_INSTALLED: list[tuple[int, Handler, Any]] = []  # number, the handler of emrun, and the one before it


def is_main_thread() -> bool:
    """Return whether this is the only thread in which Python allows signal handlers."""
    return threading.current_thread() is threading.main_thread()


def unless_ignored(numbers: Iterable[int]) -> list[int]:
    """Return the numbers of signals without SIGHUP if this signal is ignored, as by nohup."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def handle(handlers: Mapping[int, Handler]) -> None:
    """Handle signals by functions, in this process alone: a child that is forked gets the handlers that were before.

    So a child ends by SIGTERM. The first signal for a whole process group has no effect in it.

    Args:
        handlers: number of a signal -> what `signal.signal` takes.
    """
    for number, handler in handlers.items():
        _INSTALLED.append((number, handler, signal.signal(number, handler)))


@contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals as `handle` does, in this block; outside the main thread nothing is changed."""
    count = len(_INSTALLED)
    if is_main_thread():
        handle(handlers)
    try:
        yield
    finally:
        if is_main_thread():
            for number, _, before in _INSTALLED[count:]:
                signal.signal(number, before or signal.SIG_DFL)
            del _INSTALLED[count:]


def _block() -> None:
    """Block the signals until the child has its handlers: Python forgets those that come before."""
    _MASKS[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {number for number, *_ in _INSTALLED})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.pop(threading.get_ident()))


def _leave_to_parent() -> None:
    """Undo the handlers in a forked child, but for those that it has set itself since."""
    handlers = {}
    while _INSTALLED:
        number, handler, before = _INSTALLED.pop()
        if signal.getsignal(number) == handler:
            handlers[number] = before or signal.SIG_DFL
            signal.signal(number, handlers[number])
    for number in _OF_GROUP:
        if handlers.get(number, signal.SIG_IGN) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signal.signal(number, handlers[number]))
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_leave_to_parent)


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
        for descriptor in (self._reader, writer):
            os.set_blocking(descriptor, False)
            self._entered.callback(os.close, descriptor)
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
    """Undo in a forked child what `Signals` has set; SIGINT gets the handler of a new Python."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
