"""Checkpoints: immutable directories that are committed by one rename, verified by a manifest and named by links.

A copy of a run that followed the links has directories under the names; each is that name's checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from emrun.arguments import safe_component
from emrun.errors import ReadTimeout, StateError, StorageError, UsageError, reason_of
from emrun.fields import ANOTHER_CHECKPOINT, FILES, Kind, mapping_of, reading, record, sequence_of, whole
from emrun.storage.files import (
    check_guards,
    describe,
    flush_directory,
    flush_file,
    flush_lines,
    json_digest,
    link_atomically,
    refuse_timeout,
    storing,
)
from emrun.wording import listed

_LOG = logging.getLogger(__name__)

FORMAT = 1
DEFAULTS = ("best", "latest")  # the names that are tried in turn when none is given
_MANIFEST = "manifest.json"
_ASIDE = ".tmp-"  # how the names begin of directories that are being written or deleted, or are to be
_DIRECTORY = re.compile(r"it-\d{8,}(-\d+)?")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself; written last, so that a directory without one is no checkpoint.

    The file also holds a `sha256` of all this.

    Args:
        format: the version of the format.
        commit: counts the checkpoints of a run; the highest is the newest.
        epoch: training epochs done.
        iteration: batches of the train stream run.
        names: the names that it is given when it is committed; a process killed before it could do so leaves that to
            the resume.
        files: file name -> `{"sha256": ..., "size": bytes}`.
    """

    format: int
    commit: int
    epoch: int
    iteration: int
    names: list[str]
    files: dict[str, dict[str, Any]]


def is_directory_name(name: str) -> bool:
    """Tell whether a name is one that emrun gives to the directories of checkpoints."""
    return bool(_DIRECTORY.fullmatch(name))


def is_name(name: Any) -> bool:
    """Tell whether something can be the name of a checkpoint: one safe component of a path, not that of a directory."""
    try:
        return bool(safe_component("checkpoint", name) == name) and not is_directory_name(name)
    except ValueError:
        return False


NAME = Kind("a name such as 'best': letters, digits, '.', '_', '-', not that of a directory", is_name)
NAMES = mapping_of(Kind("that of a directory such as 'it-00000120'", is_directory_name), NAME)
"""Name of a checkpoint -> its directory."""
MANIFEST = {
    "format": whole(1),
    "commit": whole(),
    "epoch": whole(),
    "iteration": whole(),
    "names": sequence_of(NAME),
    "files": FILES,
}
"""Field of a manifest -> what it may hold. Checked where it is read, and the names before they are written."""


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
        manifests = {path.name: each for path, each in sorted(_manifests(root), key=lambda pair: pair[1].commit)}
        own = manifests[place.name]
        there = {path.name for path in _checkpoints(root)}
        later = {name for name, manifest in manifests.items() if manifest.commit > own.commit}
        then = {name: path for path, manifest in manifests.items() if path not in later for name in manifest.names}
        if recorded is not None:
            found = {name: path for name, path in recorded.items() if path in there - later}
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


def commit(
    root: Path,
    save: Callable[[Path], None],
    *,
    epoch: int,
    iteration: int,
    names: Iterable[str],
    given_up: Iterable[str] = (),
    known: Names | None = None,
) -> Path:
    """Write a checkpoint and give it names.

    The files are written into a temporary directory and flushed to disk, after the lines that they count on and before
    the manifest; one rename makes it a checkpoint; then the names move to it, and what has lost its last is deleted.

    Args:
        root: the directory of the run's checkpoints; made when absent.
        save: writes the checkpoint's files into an existing, empty directory.
        epoch: training epochs done.
        iteration: batches of the train stream run.
        names: the names it gets, such as `latest`.
        given_up: names that are removed.
        known: the names that there are; None for reading them.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: it could not be written; what was there before is untouched.
    """
    names = sorted(names)
    known = Names(root) if known is None else known
    check_guards(root)
    flush_lines()
    with storing(root, "write a checkpoint in"):
        if not root.exists():
            root.mkdir()  # without those above it: a run that was removed does not come back as its checkpoints alone
            flush_directory(root.parent)
        known.look()
        aside = root / f"{_ASIDE}{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            save(aside)
            files = {}
            for path in sorted(aside.iterdir()):
                flush_file(path)
                files[path.name] = describe(path)
            manifest = Manifest(FORMAT, known.commits + 1, epoch, iteration, names, files)
            (aside / _MANIFEST).write_text(_encode(manifest), encoding="utf-8")  # whole: its directory has no name yet
            flush_file(aside / _MANIFEST)
            flush_directory(aside)
            place = free_place(root, iteration)
            check_guards(place)
            known.expect(place)
            aside.rename(place)
            flush_directory(root)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            known.give_up_expecting()
    known.move(dict.fromkeys(names, place.name), given_up)
    return place


def name_checkpoint(
    place: Path, names: Iterable[str], given_up: Iterable[str] = (), *, known: Names | None = None
) -> None:
    """Move names to a checkpoint, remove those that are given up, and delete what has none left by that."""
    known = Names(place.parent) if known is None else known
    with storing(known.root, "read"):
        known.look()
    known.move(dict.fromkeys(names, place.name), given_up)


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
        self._of, self._asides, self._expected, self.commits = {}, [], None, 0
        self._seen = _times_of(self.root)
        entries = _entries(self.root)
        directories = {each.name for each in entries if each.is_dir(follow_symlinks=False)}
        for each in entries:
            if each.name.startswith(_ASIDE):
                self._asides.append(each.name)
            elif each.is_symlink() and not each.name.startswith("."):
                target = Path(os.readlink(each)).name  # noqa: PTH115 - of thousands
                if target in directories:
                    self._of[each.name] = target
            elif _is_checkpoint(each) or _is_named_directory(each):
                with suppress(FileNotFoundError):  # somebody deletes it
                    found = each.stat(follow_symlinks=False)
                    number = _known_commit_of(self.root / each.name, found.st_ino, found.st_mtime_ns)
                    self.commits = max(self.commits, number)
                if not is_directory_name(each.name):
                    self._of[each.name] = each.name

    def expect(self, place: Path) -> None:
        """Take note that a checkpoint is about to be committed, which gets its names by the next move."""
        self.commits += 1
        self._seen = None
        self._expected = self.root / f"{_ASIDE}{place.name}"
        _make_aside(self._expected)

    def give_up_expecting(self) -> None:
        """Take note that what was about to be committed was not, if that is so."""
        if self._expected is not None and not (self.root / self._expected.name.removeprefix(_ASIDE)).exists():
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
                _make_aside(root / f"{_ASIDE}{each}")
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
        under_names = sorted(
            (name for name, path in self._of.items() if name == path), key=lambda name: name != place.name
        )
        there: dict[int, list[tuple[Path, Manifest]]] = {}
        for each, manifest in _manifests(self.root) if under_names else ():
            there.setdefault(manifest.commit, []).append((each, manifest))
        for name in under_names:
            path = self.root / name
            try:
                manifest = _read_manifest(path)
            except (StorageError, StateError):
                continue  # `_make_way` for what gets this name
            of_commit = there.setdefault(manifest.commit, [])
            twin = next((each for each, other in of_commit if other == manifest and _is_intact(each)), None)
            lies_at = twin or free_place(self.root, manifest.iteration)
            aside = self.root / f"{_ASIDE}{name}"
            path.rename(lies_at if twin is None else aside)
            for link in [link for link, target in self._of.items() if target == name]:
                link_atomically(self.root / link, lies_at.name)
            if twin is None:
                of_commit.append((lies_at, manifest))
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
        try:
            place = free_place(self.root, _read_manifest(path).iteration)
            self._of[name] = place.name
        except (StorageError, StateError):
            place = next(each for n in count(1) if not (each := path.with_name(f"{name}-replaced-{n}")).exists())
            _LOG.warning("%s is a directory that is not a checkpoint; it is now %s", path, place.name)
            self._of.pop(name, None)
        path.rename(place)

    def _delete(self, nameless: Iterable[str]) -> None:
        """Delete what lost its last name, unless a link that somebody else made points at it."""
        root = self.root
        links = [each for each in _entries(root) if each.is_symlink() and not each.name.startswith(".")]
        named = {Path(os.readlink(each)).name for each in links}  # noqa: PTH115 - of thousands
        unfinished = [name.removeprefix(_ASIDE) for name in self._asides if _is_empty(root / name)]
        for each in (*nameless, *filter(is_directory_name, unfinished)):
            if each not in named and (root / each).is_dir():
                (root / each).rename(root / f"{_ASIDE}{each}")  # a checkpoint is never seen with half its files
        for name in (*self._asides, *(f"{_ASIDE}{each}" for each in nameless)):
            if (root / name).exists():
                shutil.rmtree(root / name)
        self._asides = []


def _make_aside(aside: Path) -> None:
    """Make the empty directory that says what is to be deleted, in whose place that is put."""
    try:
        aside.mkdir()
    except FileExistsError:  # of a process that was killed
        shutil.rmtree(aside)
        aside.mkdir()


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def _is_intact(place: Path) -> bool:
    try:
        verify(place)
    except (StorageError, StateError):
        return False
    return True


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


def _times_of(directory: Path) -> tuple[int, ...] | None:
    """Return what tells a directory from the same one after a change of its names; None when it is not there."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _entries(root: Path) -> list[os.DirEntry[str]]:
    """Return what is in a directory, nothing when it is not there."""
    try:
        with os.scandir(root) as found:
            return list(found)
    except FileNotFoundError:
        return []


def find(root: Path, name: str | None = None) -> Path:
    """Return a run's checkpoint.

    Args:
        root: the directory of the run's checkpoints.
        name: its name or directory; None for `best`, or else `latest`.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    for candidate in (name,) if name else DEFAULTS:
        path = root / candidate
        if candidate == Path(candidate).name and not candidate.startswith(".") and path.is_dir():
            return path.resolve()
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    wanted = f"no checkpoint {name!r}" if name else "no checkpoint"
    raise UsageError(f"{root}: {wanted}; there is {listed([each for each in names if not each.startswith('.')])}")


def newest(root: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, with a warning about newer ones that are damaged.

    Returns:
        None when there is none at all.

    Raises:
        StorageError: all of them are damaged.
        StateError: a field of the newest manifest has a value that it cannot have.
    """
    places = [root / each.name for each in _entries(root) if _is_checkpoint(each) or _is_named_directory(each)]
    damaged: list[str] = []
    for place in sorted(places, key=_order, reverse=True):
        try:
            verify(place)
        except ReadTimeout:
            raise
        except StorageError as error:
            if not place.is_dir():
                return newest(root)  # the run goes on and has deleted it meanwhile: there is a newer one
            damaged.append(str(error))
            continue
        for message in damaged:
            _LOG.warning("%s; going on from %s instead", message, place.name)
        return place
    if damaged:
        raise StorageError(f"no checkpoint of {root} is intact: {'; '.join(damaged)}")
    return None


def copy_up_to(place: Path, root: Path) -> Path:
    """Copy a checkpoint and those before it, with their names, into another run; return the copy.

    The run that they are of may go on meanwhile: what it deletes of those before is left out.

    Args:
        place: the checkpoint.
        root: the directory of the other run's checkpoints, which is made.

    Raises:
        FileNotFoundError: the run has deleted the checkpoint.
    """
    root.mkdir()
    _copy(place, root / place.name)
    own = _commit_of(root / place.name)
    for entry in _entries(place.parent):
        each = place.parent / entry.name
        is_own = _is_checkpoint(entry)
        number = _commit_of(each) if is_own or _is_named_directory(entry) else 0
        if number == own and not is_own and each.name != place.name:
            link_atomically(root / each.name, place.name)  # a copy that followed links has it twice
        elif 0 < number < own:
            try:
                _copy(each, root / each.name)
            except FileNotFoundError:
                shutil.rmtree(root / each.name, ignore_errors=True)
    for link in place.parent.iterdir():
        with suppress(FileNotFoundError):  # the name is given up
            if link.is_symlink() and not link.name.startswith(".") and (root / link.readlink().name).is_dir():
                link_atomically(root / link.name, link.readlink().name)
    return root / place.name


def _copy(place: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(place.iterdir()):
        shutil.copy2(path, target / path.name)


def is_unfinished(root: Path) -> bool:
    """Tell whether a process was killed while it wrote a checkpoint."""
    return root.is_dir() and any(path.name.startswith(_ASIDE) for path in root.iterdir())


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    return is_directory_name(entry.name) and entry.is_dir(follow_symlinks=False)


def _is_named_directory(entry: os.DirEntry[str]) -> bool:
    """Tell whether a checkpoint lies under a name itself, in a copy that followed links."""
    is_name = not (is_directory_name(entry.name) or entry.name.startswith("."))
    return is_name and entry.is_dir(follow_symlinks=False) and Path(entry, _MANIFEST).exists()


def _checkpoints(root: Path) -> list[Path]:
    """Return the directories of a run's checkpoints, but for those that stand under a name."""
    return [root / each.name for each in _entries(root) if _is_checkpoint(each)]


def _order(place: Path) -> tuple[int, bool, str]:
    """Return what checkpoints are sorted by: the number of the commit, or the name where that cannot be read."""
    is_own = is_directory_name(place.name)
    try:
        return _read_manifest(place).commit, is_own, place.name
    except ReadTimeout:
        raise
    except (StorageError, StateError):
        followers = [path for path in _checkpoints(place.parent) if is_own and path.name < place.name]
        return max((_commit_of(path) for path in followers), default=0), is_own, place.name


def _commit_of(place: Path) -> int:
    try:
        return _read_manifest(place).commit
    except ReadTimeout:
        raise
    except (StorageError, StateError):
        return 0


def verify(place: Path) -> Manifest:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        StorageError: a file is missing or differs, the manifest cannot be read, or its format is newer than emrun.
        StateError: a field of the manifest has a value that it cannot have, though its checksum is right.
    """
    manifest = _read_manifest(place)
    for name, expected in manifest.files.items():
        path = place / name
        with storing(path, "read"):
            found = describe(path) if name == Path(name).name and path.is_file() else None
        if found is None:
            raise StorageError(f"checkpoint {place}: {name} is missing; the checkpoint is damaged")
        if found != expected:
            raise StorageError(f"checkpoint {place}: {name} differs from its manifest; the checkpoint is damaged")
    return manifest


@cache
def _known_commit_of(place: Path, inode: int, changed: int) -> int:
    """Likewise `_commit_of`; it is not read again while the directory is the same."""
    return _commit_of(place)


def _manifests(root: Path) -> Iterable[tuple[Path, Manifest]]:
    """Yield a run's checkpoints with their manifests, those that can be read and do not stand under a name."""
    for path in _checkpoints(root):
        with suppress(StorageError, StateError):
            yield path, _read_manifest(path)


def _encode(manifest: Manifest) -> str:
    content = asdict(manifest)
    record({name: kind for name, kind in MANIFEST.items() if name != "files"}).check(content)
    return json.dumps({**content, "sha256": json_digest(content)}, indent=2) + "\n"


def _read_manifest(place: Path) -> Manifest:
    try:
        content = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        intact = isinstance(content, dict) and content.pop("sha256", None) == json_digest(content)
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, place / _MANIFEST)
        raise StorageError(f"checkpoint {place}: {_MANIFEST} cannot be read ({reason_of(error)})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is int and version > FORMAT:
        newer = f"format {version} of {_MANIFEST} is newer than this emrun knows ({FORMAT})"
        raise StorageError(f"checkpoint {place}: {newer}")
    if not intact:
        raise StorageError(f"checkpoint {place}: {_MANIFEST} is damaged")
    with reading(f"{place / _MANIFEST}", ANOTHER_CHECKPOINT):
        record(MANIFEST).check(content)
        manifest = Manifest(**{each.name: content[each.name] for each in fields(Manifest)})
    directory = place.resolve().name
    if is_directory_name(directory) and directory.split("-")[1] != f"{manifest.iteration:08d}":
        raise StorageError(f"checkpoint {place}: {_MANIFEST} is that of another one; the checkpoint is damaged")
    return manifest


def free_place(root: Path, iteration: int) -> Path:
    """Return where the next checkpoint of an iteration will lie."""
    place = root / f"it-{iteration:08d}"
    number = 1
    while place.exists():
        number += 1
        place = root / f"it-{iteration:08d}-{number}"
    return place
