"""How a process ends that has imported PyTorch, be it one of several ranks or the only one."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
from contextlib import suppress
from typing import Any

from emrun.base.terminal import PLACES
from emrun.ranks.group import has_joined

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def end_process(status: int) -> None:
    """Let this process end with an exit status once Python has waited for its threads and called its exit functions.

    Python would go on to take all modules apart, which takes a large part of a second after PyTorch was imported. In a
    rank, a thread of PyTorch that still runs now and then aborts the process meanwhile. Where PyTorch is not imported,
    and where a file is still open for writing, Python ends the process as usual; but a rank never does.

    Args:
        status: the exit status, with which the caller also exits.
    """
    if "torch" in sys.modules:
        atexit.register(_end, status)  # the last exit function is called first, when the threads have ended


def _end(status: int) -> None:
    """Call the other exit functions, delete what nothing refers to, write what is buffered, and end the process."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    gc.collect()
    files = [each for each in gc.get_objects() if issubclass(type(each), _WRITERS) and _is_written(each)]
    is_rank = has_joined()
    if files and not is_rank:
        return  # to close a file may write more than a flush does, such as the end of an archive
    try:
        for file in (*files, sys.stdout, sys.stderr):
            if file is not None and not file.closed:
                file.flush()
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    except (OSError, ValueError, AttributeError):
        if not is_rank:
            return  # Python says what cannot be written
    os._exit(status)


def _is_written(file: Any) -> bool:
    """Return whether a file is open for writing, and is not standard output or error."""
    with suppress(OSError, ValueError):  # not a file of the system, or without its buffer
        return not file.closed and file.writable() and file.fileno() not in (0, *PLACES)
    return False
