"""Snapshots of what a run is made from, written by a thread: the directories `code`, `code-2`, ... of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Thread

from emrun.base.errors import RunInUse, reason_of
from emrun.base.wording import few
from emrun.storage.code.files import RECORD, Code, changes, read_code, recorded_files, write_code
from emrun.storage.files import remove_files, storing

_LOG = logging.getLogger(__name__)

_LONGEST = 300  # characters of a list in the log
_MOMENT = 0.05  # seconds that the first batch may wait
_LONGEST_WAIT = 6.0  # seconds; git ends after five, unless a file system does not answer


class CodeSnapshot:
    """Writes what a run is made from, in a thread: when a run begins, and at a resume if something has changed.

    The first snapshot is the directory `code`, later ones are `code-2`, `code-3`, ... What goes wrong is in the
    snapshot and in the log; it never ends the run.

    Args:
        directory: the run directory.
        gather: returns what the run is made from.
    """

    def __init__(self, directory: Path, gather: Callable[[], Code]) -> None:
        self.directory = directory / "code"
        """The first directory, which also has the checksums of the first batches."""
        self._run = directory
        self._gather = gather
        self._thread: Thread | None = None  # the newest one; each waits for the one before
        self._is_given_up = False

    def begin(self) -> None:
        """Record what is imported now; later calls do nothing."""
        if self._thread is None:
            self.later(self._record).join(_MOMENT)  # meanwhile, steps would be slower

    def later(self, task: Callable[[], object]) -> Thread:
        """Do something in a thread after the tasks before, and return the thread."""
        self._thread = Thread(target=self._do, args=(self._thread, task), name="emrun-code", daemon=True)
        self._thread.start()
        return self._thread

    def end(self) -> None:
        """Wait for the tasks, at most a few seconds."""
        if self._thread is not None:
            self._thread.join(_LONGEST_WAIT)
            if self._thread.is_alive():
                self._is_given_up = True
                _LOG.warning("the code of the run is not recorded completely: the file system does not answer")

    def _do(self, before: Thread | None, task: Callable[[], object]) -> None:
        if before is not None:
            before.join()
        try:
            if not self._is_given_up:
                task()
        except RunInUse:  # the loop finds out, too
            pass
        except Exception as error:
            _LOG.warning("the code of the run is not recorded completely: %s", reason_of(error) or type(error).__name__)

    def _record(self) -> None:
        code = self._gather()
        number, newest = max(code_snapshots(self._run), default=(0, self.directory))
        before = read_code(newest) if number else None
        differences = changes(before, code.record) if before is not None else ([], [])
        if self._is_given_up or (before is not None and not any(differences)):
            return
        place = self._run / (f"code-{number + 1}" if number else "code")
        write_code(place, code)
        if any(differences):
            level = logging.WARNING if differences[0] else logging.INFO
            text = "the code has changed since the run began or was resumed: %s; see %s"
            _LOG.log(level, text, few([*differences[0], *differences[1]], _LONGEST), place)
        if code.record["problems"]:
            _LOG.warning("%s is not complete: %s", place, few(code.record["problems"], _LONGEST))


def code_snapshots(run_directory: Path) -> list[tuple[int, Path]]:
    """Return the directories `code`, `code-2`, ... of a run that are complete, in order; links are not followed."""
    snapshots = []
    for number in count(1):
        place = run_directory / (f"code-{number}" if number > 1 else "code")
        if place.is_symlink() or not (place / RECORD).exists():
            break
        snapshots.append((number, place))
    return snapshots


def changed_since(run_directory: Path, code: Code) -> tuple[list[str], Path]:
    """Return the modules and versions that differ from the newest snapshot of a run, in words, and its directory.

    Args:
        run_directory: the run directory; without a readable snapshot in it, nothing differs.
        code: what there is now.

    Raises:
        StorageError: the snapshot cannot be read.
    """
    _, place = max(code_snapshots(run_directory), default=(0, run_directory / "code"))
    before = read_code(place)
    return ([] if before is None else changes(before, code.record)[0]), place


def remove_code(run_directory: Path) -> None:
    """Delete the files that the snapshots `code`, `code-2`, ... of a run name, and directories that are empty then."""
    for _, path in code_snapshots(run_directory):
        with storing(path, "delete"):
            remove_files([path / file for file in recorded_files(path)], path)
