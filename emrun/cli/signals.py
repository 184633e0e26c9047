"""Signals, as the commands take them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def ignore_early_requests() -> None:
    """Ignore SIGUSR1, which asks for a checkpoint, until there is a training to save; by default it would kill."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """End the process by SIGTERM only when the block has cleaned up behind it."""

    class Terminated(KeyboardInterrupt):  # which is nobody's failure
        pass

    def unwind(number: int, frame: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning short
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except Terminated:
        end_by_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that whoever waits for it, such as a shell's loop, stops too."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
