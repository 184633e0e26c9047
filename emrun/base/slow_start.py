"""What makes a start faster, and log lines for its slow steps, so that it does not look like a program that hangs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_LOG = logging.getLogger(__name__)

_DELAY = 2.0  # seconds before the line is logged


class NamedWhenSlow:
    """Logs a line such as `building the dataset...` while a block runs, once the block has taken two seconds.

    Args:
        what: what the block does, in words for the log.
    """

    def __init__(self, what: str) -> None:
        self._timer = Timer(_DELAY, _LOG.info, ("%s...", what))
        self._timer.daemon = True

    def __enter__(self) -> NamedWhenSlow:
        """Start the timer."""
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel the timer."""
        self.cancel()

    def cancel(self) -> None:
        """Cancel the timer, possibly before the block ends, and wait until its thread has ended."""
        self._timer.cancel()
        self._timer.join()


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage in this block, which makes many objects that stay in use."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
