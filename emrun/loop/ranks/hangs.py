"""Says that a rank hangs, and writes the stacks of a rank into its log on SIGUSR2."""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
from pathlib import Path
from time import monotonic

from emrun.ranks.group import Ranks, waits_since

_LOG = logging.getLogger(__name__)
_SHARE = 0.2  # of `rank_timeout`
_LONGEST_LOOK = 5.0  # seconds


class HangWatch:
    """A thread that says when this rank has waited for the others for a fifth of `rank_timeout`.

    Each rank that waits says so, on the terminal too; the rank that hangs does not. On SIGUSR2, a rank writes the
    stacks of its threads into its log, whatever it does.

    Args:
        ranks: the ranks.
        log: the log of this rank.
    """

    def __init__(self, ranks: Ranks, log: Path) -> None:
        self._ranks = ranks
        self._limit = ranks.longest_wait() * _SHARE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="emrun-hangs", daemon=True)
        self._file = log.open("a")

    def start(self) -> None:
        """Handle SIGUSR2, and start the thread."""
        faulthandler.register(signal.SIGUSR2, self._file)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; SIGUSR2 is handled as before."""
        self._stopped.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()

    def _watch(self) -> None:
        reported = None  # the beginning of the last wait that was reported
        while not self._stopped.wait(min(self._limit / 4, _LONGEST_LOOK)):
            since = waits_since()
            if since is not None and since != reported and monotonic() > since + self._limit:
                reported = since
                _LOG.critical(
                    "rank %d of %d has waited for the others for %.3g seconds; a rank that does not say so hangs, or "
                    "does something that takes long. `kill -USR2 PID`, with the process of the command, writes the "
                    "stacks of each rank into its log",
                    self._ranks.rank,
                    self._ranks.size,
                    self._limit,
                )
