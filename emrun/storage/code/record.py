"""The record of what a run is made from, flushed by a thread: the directories `code`, `code-2`, ... of the run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any

from emrun.base.censor import Censor
from emrun.base.errors import RunInUse, reason_of
from emrun.base.wording import listed
from emrun.storage.code.files import (
    BATCHES,
    RECORD,
    Code,
    FirstBatches,
    add_modules,
    changes,
    make_code_directory,
    read_code,
    recorded_files,
    write_code,
)
from emrun.storage.files import aside_of, remove_files, storing

_LOG = logging.getLogger(__name__)

_CODE = re.compile(r"code(?:-([1-9]\d{0,8}))?")
_SHOWN = 5  # entries of a list in the log
_MOMENT = 0.05  # seconds that the first batch may wait
_LONGEST_WAIT = 6.0  # seconds; gathering ends after five, unless a file system does not answer


class CodeRecord:
    """Records what a run is made from: once, and again at a resume if something has changed.

    The first record is the directory `code`, later ones are `code-2`, `code-3`, ... What goes wrong is in the record
    and in the log; it never ends the run.

    Args:
        directory: the run directory.
        censor: removes values of the environment.
        gather: returns what the run is made from: which of the given modules, by name, and if the second argument is
            true the packages and repositories.
        is_gathered: waits for some seconds at most, and tells whether `gather` will answer at once.
    """

    def __init__(
        self,
        directory: Path,
        censor: Censor,
        gather: Callable[[Mapping[str, Any], bool], Code],
        is_gathered: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self.batches = FirstBatches(directory / "code", censor)
        """The first batches of the streams, in the directory `code`."""
        self._directory = directory
        self._censor = censor
        self._gather = gather
        self._is_gathered = is_gathered
        self._thread: Thread | None = None
        self._tasks: list[Callable[[], object]] = []  # of the thread, which ends when there is none
        self._changing = Lock()
        self._began = 0.0
        self._listed: set[str] = set()  # the modules that were imported when the training began
        self._newest = Path()
        self._is_given_up = False

    def begin(self, iterations_done: int) -> None:
        """List the imported modules and write the record; later calls do nothing.

        A thread flushes the record to disk. What was not gathered in time is gathered and written by the thread, too,
        but then each of its many calls of the system holds up the training.

        Args:
            iterations_done: the number of iterations of the run so far.
        """
        if not self._began:
            self._began = monotonic()
            modules = dict(sys.modules)
            self._listed = set(modules)
            steps = self._record(modules, iterations_done)
            if self._is_gathered(_MOMENT):
                self._try(partial(next, steps, None))
            self.later(partial(list, steps))

    def later(self, task: Callable[[], object]) -> None:
        """Let a thread do something when the record is written."""
        with self._changing:
            self._tasks.append(task)
            if len(self._tasks) == 1:
                self._thread = Thread(target=self._work, name="emrun-code", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Wait until the thread has ended, at most a few seconds, and add modules that were imported meanwhile."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, self._began + _LONGEST_WAIT - monotonic()))
        if self._thread.is_alive():
            self._is_given_up = True
            _LOG.warning("the code of the run is not recorded completely: the file system does not answer")
        else:
            self._try(self._add)

    def _work(self) -> None:
        while not self._is_given_up:
            self._try(self._tasks[0])
            with self._changing:
                del self._tasks[0]
                if not self._tasks:
                    return

    def _try(self, task: Callable[[], object]) -> None:
        try:
            task()
        except RunInUse:  # the loop finds out, too
            pass
        except Exception as error:
            _LOG.warning("the code of the run is not recorded completely: %s", reason_of(error) or type(error).__name__)

    def _record(self, modules: Mapping[str, Any], iterations_done: int) -> Iterator[None]:
        """Write the record, but for what is flushed to disk; then, from the second step on, flush."""
        code = self._gather(modules, True).censored(self._censor)
        if self._is_given_up:
            return
        for _, place in code_records(self._directory):
            aside_of(place / RECORD).unlink(missing_ok=True)
        newest, place = max(written_records(self._directory), default=(0, Path()))
        before = read_code(place) if newest else None
        found = changes(before, code.record()) if before is not None else ([], [])
        if before is not None and not any(found):
            self._newest = place
            self._tell(add_modules(self._newest, before, code))
            return
        self._newest = self._free_place(newest + 1)
        make_code_directory(self._newest)
        flush = write_code(self._newest, code, iterations_done)
        yield
        flush()
        if any(found):
            level = logging.WARNING if found[0] else logging.INFO
            text = "the code has changed since the run began or was resumed: %s; see %s"
            _LOG.log(level, text, listed(_first([*found[0], *found[1]])), self._newest)
        self._tell(code.problems)

    def _free_place(self, number: int) -> Path:
        """Return the first directory from a number on that has nothing but the checksums of batches."""
        while True:
            place = _place(self._directory, number)
            if not place.is_dir() or {path.name for path in place.iterdir()} <= {BATCHES}:
                return place
            number += 1

    def _add(self) -> None:
        late = {name: each for name, each in dict(sys.modules).items() if name not in self._listed}
        code = self._gather(late, False) if late else None
        recorded = read_code(self._newest) if code is not None and code.modules else None
        if code is not None and recorded is not None:
            self._tell(add_modules(self._newest, recorded, code.censored(self._censor)))

    def _tell(self, problems: Sequence[str]) -> None:
        if problems:
            _LOG.warning("%s is not complete: %s", self._newest, "; ".join(_first(problems)))


def _first(entries: Sequence[str]) -> list[str]:
    more = [f"{len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return [*entries[:_SHOWN], *more]


def code_records(run_directory: Path) -> list[tuple[int, Path]]:
    """Return the directories `code`, `code-2`, ... of a run with their numbers; links are not followed."""
    found = []
    for path in run_directory.iterdir():
        match = _CODE.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found.append((int(match[1] or 1), path))
    return sorted(found)


def written_records(run_directory: Path) -> list[tuple[int, Path]]:
    """Return those of `code_records` that are complete."""
    return [each for each in code_records(run_directory) if (each[1] / RECORD).exists()]


def changed_since(run_directory: Path, code: Code) -> tuple[list[str], Path]:
    """Return the modules and versions that differ from the newest record of a run, in words, and the record's path.

    Args:
        run_directory: the run directory; without a readable record in it, nothing differs.
        code: what there is now, censored.

    Raises:
        StorageError: the record cannot be read.
    """
    _, place = max(written_records(run_directory), default=(0, run_directory / "code"))
    before = read_code(place)
    return ([], place) if before is None else (_first(changes(before, code.record())[0]), place)


def remove_code(run_directory: Path) -> None:
    """Delete the files that the records `code`, `code-2`, ... of a run name, and directories that are empty then."""
    for _, path in code_records(run_directory):
        with storing(path, "delete"):
            remove_files([path / each for each in recorded_files(path)], path)


def _place(run_directory: Path, number: int) -> Path:
    return run_directory / ("code" if number == 1 else f"code-{number}")
