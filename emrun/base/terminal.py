"""Standard output and error after their reader has ended: the terminal was closed, or the other end of a pipe."""

from __future__ import annotations

import io
import os
import select
from pathlib import Path
from typing import Any


class _Output(io.FileIO):
    """Standard output or error; what is written after its reader has ended is dropped."""

    def write(self, data: Any) -> int:
        """Write, and return the number of bytes that were written or dropped."""
        try:
            return super().write(data)
        except OSError:
            leave_closed_terminal()
            return super().write(data)


def outlived(stream: Any) -> Any:
    """Return a text stream in place of standard output or error that drops what its reader does not take any more."""
    try:
        raw = _Output(stream.fileno(), "wb", closefd=False)
        stream.flush()
    except (AttributeError, OSError, ValueError):  # closed from the beginning, or not a file
        return stream
    lines = stream.line_buffering
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)


def leave_closed_terminal() -> None:
    """Drop what is written from now on to a terminal or a pipe that was closed; to write there would be an error."""
    for place in (1, 2):
        look = select.poll()
        look.register(place, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in look.poll(0)):
            with Path(os.devnull).open("wb") as nothing:
                os.dup2(nothing.fileno(), place)
