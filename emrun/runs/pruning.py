"""Removes runs, or only their checkpoints, or what makes checkpoints resumable; never more than was shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from emrun.base.errors import RunInUse, StateError, StorageError, UsageError
from emrun.epoch_data import named
from emrun.runs.columns import Column, Row
from emrun.runs.run_files import RunFiles, others_shown, remove_empty
from emrun.runs.stored_run import MISSING, StoredRun, size_of_files
from emrun.runs.summaries import Which
from emrun.storage.checkpoints.manifest import ASIDE, FILE as MANIFEST, Contents, files_to_resume, leave_out
from emrun.storage.files import remove_files, storing
from emrun.storage.lock import LOCK_FILES, RunLock, last_writer_elsewhere, process_of, writer_of
from emrun.storage.run import CHECKPOINTS

What = Literal["runs", "checkpoints", "optimizer states"]
"""What is removed: whole runs, all their checkpoints, or of each checkpoint what only a resume reads."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What is removed of a run: files that emrun has written, and never anything else.

    Args:
        run: the run.
        what: what is removed.
        files: the files, in the order in which they are removed.
        others: what else is in the directory, if the whole run would be removed; then it is not.
        folders: folders that go when nothing is in them, each after those in it.
    """

    run: StoredRun
    what: What
    files: Sequence[Path]
    others: Sequence[Path] = ()
    folders: Sequence[Path] = ()

    @classmethod
    def of(cls, run: StoredRun, what: What) -> Removal:
        """Return what would be removed of a run."""
        if what == "optimizer states":
            places = _checkpoints_in(run.directory)
            return cls(run, what, [place / name for place in places for name in files_to_resume(place)])
        content = RunFiles.of(run.directory)
        if what == "checkpoints":
            home = run.directory / CHECKPOINTS
            files = [path for path in content.files if home in (path, *path.parents)]
            return cls(
                run, what, files, folders=[folder for folder in content.folders if home in (folder, *folder.parents)]
            )
        return cls(run, what, content.files, content.others, [*content.folders, run.directory])

    @property
    def size(self) -> int:
        """How many bytes this frees; 0 if there is nothing to remove. A file under several names counts once."""
        return size_of_files(self.files)

    def refusal(self) -> str | None:
        """Return why the run must not be touched: it runs, or it is not surely a run; None if it may."""
        directory = self.run.directory
        if directory.is_symlink():
            return f"is a link; give the directory itself, {directory.resolve()}"
        writer = writer_of(directory)
        if self.run.status == "running" or writer is not None:
            return f"is in use by {writer or 'a process that has just ended'}"
        if (other := last_writer_elsewhere(directory)) is not None:
            return f"may be in use by {other}; prune it on that host"
        trace = self.run.trace
        if self.run.status == "killed" and not any((directory / name).exists() for name in LOCK_FILES):
            process = process_of(trace.get("host"), trace.get("pid"))
            if process is not None:
                return f"may be in use by {process}, although its lock is gone; prune it when that process has ended"
        if self.run.status == "damaged":
            return "is damaged, so that it may not be a run; look at it, and remove it by hand"
        if (directory / CHECKPOINTS).is_symlink():
            return f"has a link in place of its {CHECKPOINTS}; links are not followed"
        if self.others:
            return others_shown(directory, self.others)
        with suppress(OSError):
            if self.what == "runs" and Path.cwd().is_relative_to(directory.resolve()):
                return "is or has the current directory; go to another one first"
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
            others = RunFiles.of(directory).others if self.what == "runs" else ()
            if others:
                raise UsageError(f"nothing was removed: {directory} {others_shown(directory, others)}")
            with storing(directory, "remove files of"):
                if self.what == "optimizer states":
                    for place in _checkpoints_in(directory):
                        leave_out(place, files_to_resume(place))
                    return
                locks = [directory / name for name in LOCK_FILES if self.what == "runs"]  # while the lock is held
                remove_files([*self._set_aside(), *self.files, *locks], directory)
                remove_empty(self.folders)
        finally:
            lock.release()

    def _set_aside(self) -> list[Path]:
        """Rename the checkpoints in which nothing else is, so that no half of one is left where a resume looks.

        Returns:
            The files under their new names, and the manifests of the other checkpoints; for each folder that a process
            has left which was killed, the one that it had, so that the folder goes.
        """
        leftovers = (self.run.directory / CHECKPOINTS).glob(f"{ASIDE}*")
        set_aside = [leftover / MANIFEST for leftover in leftovers if not leftover.is_symlink()]
        files = set(self.files)
        for place in _checkpoints_in(self.run.directory):
            contents = list(place.iterdir())
            if files.issuperset(contents):
                aside = place.rename(place.with_name(f"{ASIDE}{place.name}"))
                set_aside += [aside / path.name for path in contents]
            else:
                set_aside += [path for path in contents if path.name == MANIFEST and path in files]
        return set_aside


def _checkpoints_in(directory: Path) -> Iterator[Path]:
    root = directory / CHECKPOINTS
    with suppress(OSError):
        yield from (root / name for name in Contents.of(root).checkpoints)


def without_best(rows: Sequence[Row], count: int, statistic: Column, which: Which) -> list[Row]:
    """Return the rows except the `count` best by a statistic; runs that have not recorded it are the worst.

    Args:
        rows: the runs.
        count: how many are left out.
        judged: the column of the statistic.
        which: `min` if smaller values are better, `max` if larger values are.
    """

    def rank(row: Row) -> tuple[bool, float]:
        value = statistic.of(row)
        if value is MISSING:
            return True, 0.0
        return False, value if which == "min" else -value

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
    candidates = [candidate for candidate in watched if by is None or named(candidate[0]) == named(by)]
    if len(candidates) == 1:
        return candidates[0]
    if by is None:
        raise UsageError("the runs have different statistics in SaveBest; name one: --by min:valid/loss")
    raise UsageError(f"--by: which value is better? write --by min:{by} or --by max:{by}")


ERRORS = (RunInUse, StateError, StorageError, UsageError)
"""What `Removal.carry_out` raises about one run, so that the others can still be removed."""
