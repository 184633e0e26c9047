"""Ends a command by SIGINT, with one line, that is interrupted while its modules are imported; see `emrun.cli`."""

import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted by SIGINT\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_before = signal.getsignal(signal.SIGINT)
if _before is signal.default_int_handler:
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread
        _before = None


def end() -> None:
    """Handle SIGINT as before."""
    if _before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _before)
