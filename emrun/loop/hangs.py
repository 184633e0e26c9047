"""Writes the stacks of all ranks into one file when they hang, or on SIGUSR2, and says which rank is elsewhere."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import sys
import threading
import traceback
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from emrun.base.signals import handled, is_main_thread
from emrun.base.wording import listed
from emrun.ranks.group import Ranks, waits_since

_LOG = logging.getLogger(__name__)
_SHARE = 0.2  # of `rank_timeout`
_LONGEST_LOOK = 5.0  # seconds
_FILE = "stacks-{}.txt"
_HEAD = re.compile(r"^rank (\d+) of \d+, process \d+, (?:waits|is elsewhere: (.+))$", re.MULTILINE)


class HangWatch:
    """A thread that looks at how long this rank waits for the others, between `start` and `stop`.

    When the rank has waited for a fifth of `rank_timeout`, or gets SIGUSR2, the thread appends its stacks to a new file
    `stacks-N.txt` of the run. The threads of the other ranks find the file, and append theirs. So each rank writes for
    itself, on any number of machines, and one that does not answer is known by that. Rank 0 logs the result.

    Args:
        ranks: the ranks.
        directory: the run directory.
    """

    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self._ranks = ranks
        self._directory = directory
        self._limit = ranks.longest_wait() * _SHARE
        self._look = min(self._limit / 4, _LONGEST_LOOK)
        self._known: set[Path] = set()
        self._told: float | None = None  # the beginning of the last wait that was reported
        self._stopped = False
        self._entered = ExitStack()
        self._reader = self._writer = -1
        self._thread = threading.Thread(target=self._watch, name="emrun-hangs", daemon=True)

    def start(self) -> None:
        """Start the thread; in the main thread, also handle SIGUSR2."""
        self._known = self._files()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if is_main_thread():
            before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._entered.callback(signal.set_wakeup_fd, before)
            self._entered.enter_context(handled({signal.SIGUSR2: lambda number, frame: None}))
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._entered.close()
        self._stopped = True
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _watch(self) -> None:
        while not self._stopped:
            is_asked = self._is_asked(self._look)
            since, there = waits_since(), self._files()
            hangs = since is not None and since != self._told and monotonic() > since + self._limit
            new = sorted(there - self._known)
            if self._stopped or not (is_asked or hangs or new):
                continue
            self._told = since if hangs or new else self._told
            path = new[-1] if new else self._directory / _FILE.format(len(there) + 1)
            self._known |= {*there, path}
            try:
                self._append(path, since)
                if self._ranks.is_first:
                    self._report(path)
            except OSError as error:
                _LOG.warning("%s cannot be written: %s", path, error)

    def _is_asked(self, seconds: float) -> bool:
        """Wait for a signal; return whether it is SIGUSR2."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return False
        return signal.SIGUSR2 in os.read(self._reader, 4096)

    def _files(self) -> set[Path]:
        return set(self._directory.glob(_FILE.format("*")))

    def _append(self, path: Path, since: float | None) -> None:
        frames, names = sys._current_frames(), {each.ident: each.name for each in threading.enumerate()}
        main = threading.main_thread().ident or 0
        place = traceback.extract_stack(frames[main], limit=1)[0]
        now = "waits" if since is not None else f"is elsewhere: {place.filename}:{place.lineno}, in {place.name}"
        stacks = [
            f"\n\nthread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident])).rstrip()}"
            for ident in sorted(frames, key=lambda each: each != main)
            if ident != threading.get_ident()
        ]
        text = f"rank {self._ranks.rank} of {self._ranks.size}, process {os.getpid()}, {now}{''.join(stacks)}"
        with path.open("ab", buffering=0) as file:  # all at once, so that ranks do not mix
            file.write(f"{text}\n\n".encode(errors="backslashreplace"))

    def _report(self, path: Path) -> None:
        """Log which rank is elsewhere, as soon as all have written, or after some time."""
        ends_at, found = monotonic() + 4 * self._look, dict[str, str]()
        while not self._stopped and len(found) < self._ranks.size and monotonic() < ends_at:
            self._is_asked(self._look / 10)
            found = dict(_HEAD.findall(path.read_text(encoding="utf-8")))
        places = {rank: found.get(str(rank), "it does not answer") for rank in range(self._ranks.size)}
        elsewhere = [f"rank {rank} is elsewhere ({place})" for rank, place in places.items() if place]
        extremes = {0: "all ranks wait for each other", self._ranks.size: "no rank waits for another"}
        said = extremes.get(len(elsewhere)) or f"{listed(elsewhere)}, and the others wait"
        _LOG.warning("%s; the stacks of all ranks are in %s", said, path)
