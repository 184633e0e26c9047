"""Removes runs, or only their checkpoints, or what makes checkpoints resumable; never more than was shown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from emrun.errors import RunInUse, StateError, StorageError, UsageError
from emrun.runs.columns import Column, Row
from emrun.runs.search import find_runs
from emrun.runs.stored_run import StoredRun, size_below
from emrun.runs.summaries import Which
from emrun.runs.yaml_parts import MISSING
from emrun.storage.files import flush_directory, storing
from emrun.storage.lock import EVALUATIONS, LOCK_FILES, RunLock, last_writer_elsewhere, writer_of
from emrun.storage.manifest import TO_RESUME, Contents, leave_out
from emrun.storage.run import CHECKPOINTS, CONFIG
from emrun.storage.trace import TRACE

What = Literal["runs", "checkpoints", "optimizer states"]
"""What is removed: whole runs, all their checkpoints, or of each checkpoint what only a resume reads."""
_OWN = (CHECKPOINTS, EVALUATIONS, "code", "failures")
"""Directories of a run that are not searched for other runs."""
_ASIDE = f".{CHECKPOINTS}.removed"


@dataclass(frozen=True, slots=True)
class Removal:
    """What is removed of a run.

    Args:
        run: the run.
        what: what is removed.
        size: how many bytes this frees; 0 if there is nothing to remove.
    """

    run: StoredRun
    what: What
    size: int

    @classmethod
    def of(cls, run: StoredRun, what: What) -> Removal:
        """Return what would be removed of a run."""
        if what == "runs":
            return cls(run, what, run.size)
        if what == "checkpoints":
            return cls(run, what, sum(size_below(run.directory / name) for name in (CHECKPOINTS, _ASIDE)))
        found = 0
        for path in _files_to_resume(run.directory):
            with suppress(OSError):
                found += path.lstat().st_size
        return cls(run, what, found)

    def refusal(self) -> str | None:
        """Return why the run must not be touched: it runs, or it is not surely a run and only that; None if it may."""
        directory = self.run.directory
        if directory.is_symlink():
            return f"is a link; give the directory itself, {directory.resolve()}"
        if self.run.status == "running" or (writer := writer_of(directory)) is not None:
            return f"is in use by {writer_of(directory) if self.run.status == 'running' else writer}"
        if (other := last_writer_elsewhere(directory)) is not None:
            return f"may be in use by {other}; prune it on that host"
        if self.run.status == "damaged":
            return "is damaged, so that it may not be a run; look at it, and remove it by hand"
        if (directory / CHECKPOINTS).is_symlink():
            return f"has a link in place of its {CHECKPOINTS}; links are not followed"
        if self.what == "runs" and (other := _more_than_a_run(directory)) is not None:
            return f"is not only a run: it has {other}; remove it by hand"
        return None

    def carry_out(self) -> None:
        """Remove it, holding the lock of the run.

        Raises:
            RunInUse: another process has begun to write the run.
            UsageError: the run is not the one that was shown any more.
            StorageError: something cannot be removed; what is left is still a run.
        """
        directory = self.run.directory
        lock = RunLock(directory)
        try:
            if StoredRun(directory).trace != self.run.trace or directory.is_symlink():
                raise UsageError(f"{directory} has changed since it was shown; nothing of it was removed")
            with storing(directory, "remove files of"):
                if self.what == "runs":
                    self._remove_run()
                elif self.what == "checkpoints":
                    _remove_checkpoints(directory)
                else:
                    _remove_what_resumes(directory)
        finally:
            lock.release()
        if self.what == "runs":
            with storing(directory, "remove"):
                for name in LOCK_FILES:
                    (directory / name).unlink(missing_ok=True)
                with suppress(OSError):  # another process has begun a run in it
                    directory.rmdir()

    def _remove_run(self) -> None:
        """Remove all files; the trace is removed last, so that what an interrupt leaves is still a run."""
        last = (CONFIG, TRACE)
        for path in sorted(self.run.directory.iterdir(), key=lambda path: (path.name in last, path.name)):
            if path.name not in LOCK_FILES:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints at once, by a rename, so that no half of a checkpoint is left where a resume looks."""
    if (directory / _ASIDE).is_dir():
        shutil.rmtree(directory / _ASIDE)
    if (directory / CHECKPOINTS).is_dir():
        (directory / CHECKPOINTS).rename(directory / _ASIDE)
        flush_directory(directory)
        shutil.rmtree(directory / _ASIDE)


def _remove_what_resumes(directory: Path) -> None:
    for place in _checkpoints_in(directory):
        leave_out(place, TO_RESUME)


def _checkpoints_in(directory: Path) -> Iterator[Path]:
    root = directory / CHECKPOINTS
    with suppress(OSError):
        here = Contents.of(root)
        yield from (root / name for name in (*here.own, *here.named))


def _files_to_resume(directory: Path) -> Iterator[Path]:
    for place in _checkpoints_in(directory):
        yield from (place / name for name in TO_RESUME if (place / name).exists())


def _more_than_a_run(directory: Path) -> str | None:
    """Return what a directory has that a run does not write and that must not be lost."""
    with suppress(OSError):
        if Path.cwd().is_relative_to(directory.resolve()):
            return "the current directory"
    try:
        for path in sorted(directory.iterdir()):
            if path.name == ".git" or path.suffix == ".py":
                return path.name
            is_searched = path.is_dir() and not path.is_symlink() and path.name not in _OWN
            other = next(find_runs(path, deep=True), None) if is_searched else None
            if other is not None:
                return f"another run, {other.directory.relative_to(directory)}"
    except OSError as error:
        return f"files that cannot be read ({error.strerror})"
    return None


def without_best(rows: Sequence[Row], count: int, judged: Column, which: Which) -> list[Row]:
    """Return the rows except the `count` best by a statistic; runs that have not recorded it are the worst.

    Args:
        rows: the runs.
        count: how many are left out.
        judged: the column of the statistic.
        which: `min` if smaller values are better, `max` if larger values are.
    """

    def rank(row: Row) -> tuple[bool, float]:
        value = judged.of(row)
        return value is MISSING, 0.0 if value is MISSING else value if which == "min" else -value

    best = sorted(rows, key=rank)[:count]
    return [row for row in rows if row not in best]


def better(rows: Sequence[Row], by: str | None) -> tuple[str, Which]:
    """Return a statistic, and whether its lowest or its highest value is the best.

    Args:
        rows: the runs.
        by: an address, with `min:` or `max:` before it, or as the hooks SaveBest of the runs have it; None for the
            statistic that all of them have.

    Raises:
        UsageError: it is not known which value is better, or the runs have several statistics.
    """
    sign, _, address = (by or "").partition(":")
    if by is not None and sign in ("min", "max") and address:
        return address, "min" if sign == "min" else "max"
    if by is not None and "/" not in by:
        raise UsageError(f"--by: {by!r} is not a statistic; write for example --by min:valid/loss")
    watched = {row.summaries.watched for row in rows}
    found = [each for each in watched if by is None or _whole(each[0]) == _whole(by)]
    if len(found) == 1:
        return found[0]
    if by is None:
        raise UsageError("the runs have different statistics in SaveBest; name one: --by min:valid/loss")
    raise UsageError(f"--by: which value is better? write --by min:{by} or --by max:{by}")


def _whole(address: str) -> str:
    return address if address.count("/") > 1 else f"{address}/mean"


ERRORS = (RunInUse, StateError, StorageError, UsageError)
"""What `Removal.carry_out` raises about one run, so that the others can still be removed."""
