"""The names of a run's checkpoints."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

from emrun.errors import StateError, StorageError
from emrun.storage.files import flush_directory, link_atomically, storing
from emrun.storage.manifest import ASIDE, Contents, free_place, is_directory_name, readable_manifest, verify
from emrun.wording import listed

_LOG = logging.getLogger(__name__)


def go_back_to(place: Path, recorded: Mapping[str, str] | None = None, *, known: Names | None = None) -> Path:
    """Make a checkpoint the latest one, under all its names, and give back the names that are missing.

    Those are the names of its time: as its state recorded them, as far as that is there, else as the manifests say that
    are not later. Names that later ones have go back likewise, or are given up. What lies under a name itself, in a
    copy that followed links, is put where checkpoints lie.

    Args:
        place: the checkpoint, intact.
        recorded: name -> directory, as it was then; None when its state did not record it.
        known: the names that there are; None for reading them.

    Returns:
        Where it lies now.
    """
    if known is None or not _is_same(known.root, place.parent):
        known = Names(place.parent)
    root = known.root
    with storing(root, "move names in"):
        place = known.settle(root / place.name)  # the same place by the path that the run has, a link perhaps
        current = known.current()
        here = Contents.of(root)
        manifests = dict(sorted(here.manifests(root).items(), key=lambda pair: pair[1].commit))
        own = manifests[place.name]
        later = {name for name, manifest in manifests.items() if manifest.commit > own.commit}
        then = {name: path for path, manifest in manifests.items() if path not in later for name in manifest.names}
        if recorded is not None:
            found = {name: path for name, path in recorded.items() if path in here.own and path not in later}
            then = {**{name: path for name, path in then.items() if name in recorded}, **found}
        moves = {name: path for name, path in then.items() if name not in current or current[name] in later}
        given_up = []
        for name, path in current.items():
            if path in later and name not in then and name != "latest":
                _LOG.warning("checkpoint %s is of a later time; it is given up", name)
                given_up.append(name)
            elif recorded is not None and name not in recorded and path not in {*later, place.name}:
                given_up += [name] if path in manifests and name in manifests[path].names else []  # was to be, then
        missing = sorted(name for name in moves if name not in current and name != "latest")
    if missing:
        _LOG.info("names of checkpoints were missing in %s; they are there again: %s", root, listed(missing))
    known.move({**moves, **dict.fromkeys(("latest", *own.names), place.name)}, given_up)
    return place.resolve()


class Names:
    """The names of a run's checkpoints, and how many were committed, as the process that writes the run knows them.

    They are read again only when somebody else changed the directory, which its times tell: there may be thousands.

    Only what loses its last name by a move is deleted, or what a failed commit left without its first one. An empty
    directory in its place aside says so beforehand, to whoever comes after a kill. What merely has no name is kept: a
    copy may have lost the links.

    Args:
        root: the directory of the run's checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commits = 0
        """The highest number of a commit."""
        self._of: dict[str, str] = {}
        self._asides: list[str] = []  # what killed processes and failed commits left
        self._expected: Path | None = None  # the place aside of what is committed and has no name yet
        self._seen: tuple[int, ...] | None = None

    def current(self) -> dict[str, str]:
        """Return name -> directory, itself where a directory stands under the name; links to nothing are left out."""
        self.look()
        return dict(self._of)

    def look(self) -> None:
        """Read the directory, unless it is as this process left it."""
        if self._seen is not None and self._seen == _times_of(self.root):
            return
        self._seen = _times_of(self.root)
        here = Contents.of(self.root)
        there = {*here.own, *here.named}
        self._of = {name: target for name, target in here.links.items() if target in there}
        self._of.update({name: name for name in here.named})
        self._asides, self._expected = here.asides, None
        self.commits = max((_commit_of(self.root / name) for name in there), default=0)

    def expect(self, place: Path) -> None:
        """Take note that a checkpoint is about to be committed, which gets its names by the next move."""
        self.commits += 1
        self._seen = None
        self._expected = self.root / f"{ASIDE}{place.name}"
        _make_aside(self._expected)

    def give_up_expecting(self) -> None:
        """Take note that what was about to be committed was not, if that is so."""
        if self._expected is not None and not (self.root / self._expected.name.removeprefix(ASIDE)).exists():
            with suppress(OSError):
                self._expected.rmdir()
            self._expected = None

    def move(self, names: Mapping[str, str], given_up: Iterable[str] = ()) -> None:
        """Give names to checkpoints, remove those that are given up, and delete what has none left by that.

        Args:
            names: name -> directory.
            given_up: names that are removed, unless they are given.

        Raises:
            StorageError: that failed; the next move deletes what this one was to.
        """
        root = self.root
        given_up = [name for name in given_up if name not in names]
        self._seen = None
        with storing(root, "move names in"):
            for name in (*names, *given_up):
                self._make_way(name)
            before = {self._of[name] for name in (*names, *given_up) if name in self._of}
            for name in given_up:
                self._of.pop(name, None)
            self._of.update(names)
            nameless = before - set(self._of.values())
            for each in nameless:
                _make_aside(root / f"{ASIDE}{each}")
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
            self._expected, self._seen = None, _times_of(root)

    def settle(self, place: Path) -> Path:
        """Put what lies under a name itself where checkpoints lie, and make the name a link.

        A copy of one that lies there, intact, is not put there a second time.

        Args:
            place: a checkpoint.

        Returns:
            Where it lies now.
        """
        self.look()
        under_names = [name for name, path in self._of.items() if name == path]
        under_names.sort(key=lambda name: name != place.name)
        there = Contents.of(self.root).manifests(self.root) if under_names else {}
        for name in under_names:
            path, manifest = self.root / name, there.pop(name, None)
            if manifest is None:
                continue  # `_make_way` for what gets this name
            twins = (each for each, other in there.items() if other == manifest and is_directory_name(each))
            twin = next((each for each in twins if _is_intact(self.root / each)), None)
            lies_at = self.root / twin if twin is not None else free_place(self.root, manifest.iteration)
            aside = self.root / f"{ASIDE}{name}"
            path.rename(lies_at if twin is None else aside)
            for link in [link for link, target in self._of.items() if target == name]:
                link_atomically(self.root / link, lies_at.name)
            if twin is None:
                there[lies_at.name] = manifest
            else:
                shutil.rmtree(aside)
            if path == place:
                place = lies_at
        if under_names:
            self._seen = None
        return place

    def _make_way(self, name: str) -> None:
        """Take a directory that stands under a name, of a copy that followed links, to where checkpoints lie."""
        path = self.root / name
        if path.is_symlink() or not path.is_dir():
            return
        with suppress(OSError):
            path.rmdir()  # what some archives make of a link
            return
        manifest = readable_manifest(path)
        if manifest is not None:
            place = free_place(self.root, manifest.iteration)
            self._of[name] = place.name
        else:
            place = next(each for n in count(1) if not (each := path.with_name(f"{name}-replaced-{n}")).exists())
            _LOG.warning("%s is a directory that is not a checkpoint; it is now %s", path, place.name)
            self._of.pop(name, None)
        path.rename(place)

    def _delete(self, nameless: Iterable[str]) -> None:
        """Delete what lost its last name, unless a link that somebody else made points at it."""
        root = self.root
        named = set(Contents.of(root).links.values())
        unfinished = [name.removeprefix(ASIDE) for name in self._asides if _is_empty(root / name)]
        for each in (*nameless, *filter(is_directory_name, unfinished)):
            if each not in named and (root / each).is_dir():
                (root / each).rename(root / f"{ASIDE}{each}")  # a checkpoint is never seen with half its files
        for name in (*self._asides, *(f"{ASIDE}{each}" for each in nameless)):
            if (root / name).exists():
                shutil.rmtree(root / name)
        self._asides = []


def _make_aside(aside: Path) -> None:
    """Make the empty directory that says what is to be deleted, in whose place that is put."""
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir()


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def _is_intact(place: Path) -> bool:
    with suppress(StorageError, StateError):
        return bool(verify(place))
    return False


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


def _times_of(directory: Path) -> tuple[int, ...] | None:
    """Return what tells a directory from the same one after a change of its names; None when it is not there."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _commit_of(place: Path) -> int:
    """Return the number of a checkpoint's commit; 0 where it is damaged or somebody deletes it."""
    with suppress(FileNotFoundError):
        found = place.stat()
        return _known_commit_of(place, found.st_ino, found.st_mtime_ns)
    return 0


@cache
def _known_commit_of(place: Path, inode: int, changed: int) -> int:
    """Likewise; the manifest is not read again while the directory is the same."""
    manifest = readable_manifest(place)
    return 0 if manifest is None else manifest.commit
