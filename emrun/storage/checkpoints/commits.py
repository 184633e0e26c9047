"""Checkpoints: immutable directories that are committed by one rename, verified by a manifest and named by links."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from emrun.base.wording import listed
from emrun.storage.checkpoints.manifest import (
    ASIDE,
    FILE,
    Contents,
    free_place,
    is_directory_name,
    readable_manifest,
    seal_manifest,
)
from emrun.storage.files import (
    check_owner,
    flush_directory,
    flush_lines,
    link_atomically,
    remove_files,
    storing,
    written_aside,
)
from emrun.storage.sealed import files_of

_LOG = logging.getLogger(__name__)


def commit(
    root: Path,
    save: Callable[[Path], Mapping[str, Any] | None],
    *,
    epoch: int,
    iteration: int,
    names: Iterable[str],
    given_up: Iterable[str] = (),
    known: Names | None = None,
) -> Path:
    """Write a checkpoint and give it names.

    Appended lines of the run's other files are flushed to disk first. The checkpoint's files are written into a
    temporary directory and flushed, then the manifest; one rename makes the directory a checkpoint. Then the names move
    to it, and checkpoints that lose their last name are deleted.

    Args:
        root: the directory of the run's checkpoints; created if it is missing.
        save: writes the checkpoint's files into an existing, empty directory. What it returns are the entries in the
            manifest of files that it has flushed and described already.
        epoch: the number of finished training epochs.
        iteration: the number of batches of the train stream that were run.
        names: the names of the new checkpoint, such as `latest`.
        given_up: names to remove.
        known: the present names, if the caller has them; None to read them.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: the checkpoint could not be written; older checkpoints are unchanged.
    """
    names = sorted(names)
    known = Names(root) if known is None else known
    check_owner(root / ASIDE)
    flush_lines()
    with storing(root, "write a checkpoint in"):
        if not root.exists():
            root.mkdir()  # without parents: a run that was deleted must not reappear with only this directory
            flush_directory(root.parent)
        known.look()
        place = free_place(root, iteration)
        try:
            with written_aside(place, root / f"{ASIDE}{os.getpid()}") as aside:
                aside.mkdir()
                described = save(aside)
                seal_manifest(aside, known.commits + 1, epoch, iteration, names, described)
                check_owner(place)
                known.expect(place)
        finally:
            known.give_up_expecting()
    known.move(dict.fromkeys(names, place.name), given_up)
    return place


def go_back_to(place: Path, recorded: Mapping[str, str] | None = None, *, known: Names | None = None) -> None:
    """Make a checkpoint the latest one, and restore the names to the time when it was saved.

    The checkpoint gets `latest` and its own names. Names of later checkpoints go back to the checkpoints that had them
    at that time, or are removed; missing names are created again. The names of that time are those that the
    checkpoint's state recorded, else those in the manifests that are not later.

    Args:
        place: the checkpoint, intact.
        recorded: name -> directory, as the checkpoint's state recorded them; None if it has no record.
        known: the present names, if the caller has them; None to read them.
    """
    if known is None or not _is_same(known.root, place.parent):
        known = Names(place.parent)
    root = known.root
    with storing(root, "update the checkpoint names in"):
        current = known.current()
        contents = Contents.of(root)
        manifests = dict(sorted(contents.manifests(root).items(), key=lambda pair: pair[1].commit))
        manifest = manifests[place.name]
        later = {name for name, other in manifests.items() if other.commit > manifest.commit}

        # the names at the time when the checkpoint was saved
        then = {}
        for path, other in manifests.items():
            if path not in later:
                then.update(dict.fromkeys(other.names, path))
        if recorded is not None:
            then = {name: path for name, path in then.items() if name in recorded}
            for name, path in recorded.items():
                if path in contents.checkpoints and path not in later:
                    then[name] = path

        # those that others have now
        moved = set(later)
        if recorded is not None:
            moved.add(place.name)  # names may move to it without a new checkpoint
        moves = {name: path for name, path in then.items() if name not in current or current[name] in moved}

        # those that were not there, or were about to be removed
        given_up = []
        for name, path in current.items():
            is_first_name = path in manifests and name in manifests[path].names
            if path in later and name not in then and name != "latest":
                _LOG.warning("the checkpoint name %s belongs to a later checkpoint; the name is removed", name)
                given_up.append(name)
            elif recorded is not None and name not in recorded and path not in moved and is_first_name:
                given_up.append(name)  # its removal was due
        missing = sorted(name for name in moves if name not in current and name != "latest")
    if missing:
        _LOG.debug("restored missing checkpoint names in %s: %s", root, listed(missing))
    known.move({**moves, **dict.fromkeys(("latest", *manifest.names), place.name)}, given_up)


class Names:
    """The names of a run's checkpoints and the number of commits, kept in memory by the process that writes the run.

    There may be thousands of names, so they are read again only if the times of the directory show that another process
    changed it.

    A checkpoint is deleted only if a move takes its last name, or if a failed commit left it without a first name. An
    empty directory `.tmp-<checkpoint>` marks such a checkpoint beforehand, so that the next process can delete it if
    this one is killed. Other checkpoints without a name are not deleted: a copy of the run may have lost the links.

    Args:
        root: the directory of the run's checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commits = 0
        """The highest commit number of the checkpoints."""
        self._of: dict[str, str] = {}
        self._asides: list[str] = []  # left behind by killed processes and failed commits
        self._expected: Path | None = None  # marks the checkpoint that is committed and has no name yet
        self._seen: tuple[int, ...] | None = None

    def current(self) -> dict[str, str]:
        """Return name -> directory, without broken links."""
        self.look()
        return dict(self._of)

    def look(self) -> None:
        """Read the directory if another process has changed it."""
        if self._seen is not None and self._seen == _times_of(self.root):
            return
        self._seen = _times_of(self.root)
        contents = Contents.of(self.root)
        self._of = {name: target for name, target in contents.links.items() if target in contents.checkpoints}
        self._asides = contents.asides
        self._expected = None
        self.commits = max((_commit_of(self.root / name) for name in contents.checkpoints), default=0)

    def expect(self, place: Path) -> None:
        """Mark a checkpoint that is about to be committed; the next `move` gives it its names."""
        self.commits += 1
        self._seen = None
        self._expected = self.root / f"{ASIDE}{place.name}"
        _make_aside(self._expected)

    def give_up_expecting(self) -> None:
        """Remove the mark of `expect` if the checkpoint was not committed."""
        if self._expected is not None and not (self.root / self._expected.name.removeprefix(ASIDE)).exists():
            with suppress(OSError):
                self._expected.rmdir()
            self._expected = None

    def move(self, names: Mapping[str, str], given_up: Iterable[str] = (), *, deletes: bool = True) -> None:
        """Give names to checkpoints, remove other names, and delete the checkpoints that lose their last name.

        Args:
            names: name -> directory.
            given_up: names to remove; those that are also in `names` stay.
            deletes: whether to delete the checkpoints that lose their last name.

        Raises:
            StorageError: the operation failed; the next move deletes the checkpoints that this one did not delete.
        """
        root = self.root
        given_up = [name for name in given_up if name not in names]
        self._seen = None
        with storing(root, "update the checkpoint names in"):
            before = {self._of[name] for name in (*names, *given_up) if name in self._of}
            for name in given_up:
                self._of.pop(name, None)
            self._of.update(names)
            nameless = before - set(self._of.values()) if deletes else set()
            for checkpoint in nameless:
                _make_aside(root / f"{ASIDE}{checkpoint}")
            for name, directory in names.items():
                link_atomically(root / name, directory)
            flush_directory(root)
        with storing(root, "delete old checkpoints in"):
            for name in given_up:
                (root / name).unlink(missing_ok=True)
            if self._expected is not None:
                self._expected.rmdir()
            if nameless or self._asides:
                self._delete(nameless)
            self._seen = _times_of(root)
            self._expected = None

    def _delete(self, nameless: Iterable[str]) -> None:
        """Delete checkpoints that lost their last name, unless a link made by another process points to them."""
        root = self.root
        named = set(Contents.of(root).links.values())
        marked = [name.removeprefix(ASIDE) for name in self._asides if _is_empty(root / name)]
        unfinished = [name for name in marked if is_directory_name(name)]
        for checkpoint in (*nameless, *unfinished):
            place = root / checkpoint
            if checkpoint in named or not place.is_dir():
                continue
            files = _own_files(place)
            if set(place.iterdir()) <= set(files):
                place.rename(root / f"{ASIDE}{checkpoint}")  # no process sees a checkpoint with half its files
            else:
                remove_files(files, place)
                _LOG.warning("%s stays, with files that the run has not written", place)
        for name in (*self._asides, *(f"{ASIDE}{checkpoint}" for checkpoint in nameless)):
            if (root / name).exists():
                shutil.rmtree(root / name)
        self._asides = []


def _own_files(place: Path) -> list[Path]:
    """Return the files of a checkpoint, the manifest first; a folder or pipe with their name is not of the run."""
    files = [place / name for name in files_of(place / FILE)]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def _make_aside(aside: Path) -> None:
    """Make the empty directory that marks a checkpoint to be deleted; the checkpoint is renamed to it."""
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
    aside.mkdir()


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


def _times_of(directory: Path) -> tuple[int, ...] | None:
    """Return values that differ after a change of the directory's entries; None if the directory is missing."""
    try:
        status = directory.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _commit_of(place: Path) -> int:
    """Return the commit number of a checkpoint; 0 if it is damaged or another process deletes it."""
    with suppress(FileNotFoundError):
        status = place.stat()
        return _known_commit_of(place, status.st_ino, status.st_mtime_ns)
    return 0


@cache
def _known_commit_of(place: Path, inode: int, changed: int) -> int:
    """Return the same; the manifest is not read again while the directory has not changed."""
    manifest = readable_manifest(place)
    return 0 if manifest is None else manifest.commit
