"""Standard output and error after their reader has ended, and the log after other code has configured logging anew."""

from __future__ import annotations

import functools
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLACES = {1, 2}
"""The descriptors of standard output and error, with emrun's own, which stay open to the end of the process."""


class _Output(io.FileIO):
    """Standard output or error; what is written after its reader has ended is dropped."""

    def write(self, data: Any) -> int:
        """Write, and return the number of bytes that were written or dropped."""
        try:
            return super().write(data)
        except OSError:
            leave_closed_terminal()
            return super().write(data)


class _Buffer(io.BufferedWriter):
    """The bytes of standard output or error; other code cannot close what emrun writes to."""

    def close(self) -> None:
        """Flush."""
        self.flush()


class _Text(io.TextIOWrapper):
    """The text of standard output or error; other code cannot take its buffer away."""

    def detach(self) -> Any:
        """Return the buffer, which this stream keeps."""
        return self.buffer


def outlived(stream: Any) -> Any:
    """Return a text stream in place of standard output or error that drops what its reader does not take any more.

    The stream has a descriptor of its own: after `os.close(2)`, the next file that is opened has the number 2.
    """
    try:
        raw = _Output(os.dup(stream.fileno()), "wb", closefd=False)
        stream.flush()
    except (AttributeError, OSError, ValueError):  # closed from the beginning, or not a file
        return stream
    PLACES.add(raw.fileno())
    return _Text(_Buffer(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering)


OUTPUT: dict[str, Any] = {}
"""`stdout` and `stderr` as they were when the command began; see `restore_output`."""


def restore_output() -> None:
    """Let `sys.stdout` and `sys.stderr` be what they were when the command began, although other code replaced them."""
    vars(sys).update(OUTPUT)


def leave_closed_terminal() -> None:
    """Drop what is written from now on to a terminal or a pipe that was closed; to write there would be an error."""
    look = select.poll()
    for place in PLACES:
        look.register(place, 0)
    for place, event in look.poll(0):
        if event & (select.POLLHUP | select.POLLERR):
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
        level = min(handler.level or logging.INFO, logging.INFO)
        if root.manager.disable > disabled:  # each of these calls visits all loggers
            logging.disable(disabled)
        if root.level > level:
            root.setLevel(level)
    if _KEPT:
        loggers = root.manager.loggerDict
        for name in _own_names(len(loggers)):
            logger = loggers.get(name)
            if isinstance(logger, logging.Logger):
                logger.disabled = False


@functools.lru_cache(maxsize=1)
def _own_names(count: int) -> list[str]:
    """Return the names of the loggers of emrun among all, of which libraries add thousands; `count` is their number."""
    return [name for name in logging.getLogger().manager.loggerDict if name.startswith("emrun.")]
