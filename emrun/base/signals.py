"""Handlers of signals for a block of code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

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
