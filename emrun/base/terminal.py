"""Standard output and error after their reader has ended, and the log after other code has configured logging anew."""

from __future__ import annotations

import io
import logging
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
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


_KEPT: dict[logging.Handler, int] = {}  # what emrun logs to -> what `logging.disable` had disabled before


@contextmanager
def kept_on(handler: logging.Handler) -> Iterator[None]:
    """Log to a handler in this block; see `restore_logging`."""
    root = logging.getLogger()
    root.addHandler(handler)
    _KEPT[handler] = root.manager.disable
    try:
        yield
    finally:
        _KEPT.pop(handler, None)
        root.removeHandler(handler)


def leave_logs() -> None:
    """Log nowhere that another process logs, of which this one was forked."""
    _KEPT.clear()
    logging.getLogger().handlers.clear()


def restore_logging() -> None:
    """Log again after other code, such as a library, has removed handlers, disabled loggers or raised the level."""
    root = logging.getLogger()
    for handler, disabled in _KEPT.items():
        if handler not in root.handlers:
            root.addHandler(handler)
        logging.disable(min(root.manager.disable, disabled))
        root.setLevel(min(root.level, handler.level or logging.INFO, logging.INFO))
    for name, each in root.manager.loggerDict.items():
        if _KEPT and name.startswith("emrun.") and isinstance(each, logging.Logger):
            each.disabled = False
