"""Names what takes long at the start, so that nobody takes the silence for a program that hangs."""

from __future__ import annotations

import logging
from threading import Timer

_LOG = logging.getLogger(__name__)

_DELAY = 2.0  # seconds of silence


class NamedWhenSlow:
    """Logs a line such as `building the dataset...` when a block takes longer than two seconds, while it does.

    Args:
        what: what the block does.
    """

    def __init__(self, what: str) -> None:
        self._timer = Timer(_DELAY, _LOG.info, ("%s...", what))
        self._timer.daemon = True

    def __enter__(self) -> NamedWhenSlow:
        """Wait from now on."""
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Log nothing any more."""
        self.cancel()

    def cancel(self) -> None:
        """Log nothing any more, before the block ends; the thread of the timer is gone afterwards."""
        self._timer.cancel()
        self._timer.join()
