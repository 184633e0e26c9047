"""What the commands do about signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def ignore_early_requests() -> None:
    """Ignore SIGUSR1, which requests a checkpoint, until there is a run to save; by default it ends the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """End the process by SIGTERM only after the block has cleaned up."""

    class Terminated(KeyboardInterrupt):  # not a failure of the user's code
        pass

    def unwind(number: int, frame: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except Terminated:
        end_by_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by_signal(number: int) -> NoReturn:
    """End the process by a signal, so that its parent, such as a loop in a shell, stops too."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
