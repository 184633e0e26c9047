"""Checkpoints: immutable directories that are committed by one rename, verified by a manifest and named by links."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from emrun.errors import StorageError, UsageError, listed
from emrun.files import (
    check_guards,
    describe,
    flush_directory,
    flush_file,
    flush_lines,
    json_digest,
    link_atomically,
    storing,
)

_LOG = logging.getLogger(__name__)

FORMAT = 1
DEFAULTS = ("best", "latest")  # the names that are tried in turn when none is given
_MANIFEST = "manifest.json"
_ASIDE = ".tmp-"  # how the names begin of directories that are being written or deleted
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


def go_back_to(place: Path) -> None:
    """Make a checkpoint the latest one, under all its names.

    Names that later ones have go back to where they were, as far as that is there.
    """
    own = _read_manifest(place)
    manifests = sorted(_manifests(place.parent), key=lambda pair: pair[1].commit)
    earlier = {name: path for path, manifest in manifests if manifest.commit <= own.commit for name in manifest.names}
    with storing(place.parent, "move names in"):
        later = [path for path in place.parent.iterdir() if path.is_symlink() and _commit_of(path) > own.commit]
        for link in later:
            if link.name in earlier:
                link_atomically(link, earlier[link.name].name)
            elif link.name != "latest":
                _LOG.warning("checkpoint %s is of a later time; it is given up", link.name)
                link.unlink()
    name_checkpoint(place, ["latest", *own.names])


def is_directory_name(name: str) -> bool:
    """Tell whether a name is one that emrun gives to the directories of checkpoints."""
    return bool(_DIRECTORY.fullmatch(name))


def commit(
    root: Path,
    save: Callable[[Path], None],
    *,
    epoch: int,
    iteration: int,
    names: Iterable[str],
    given_up: Iterable[str] = (),
) -> Path:
    """Write a checkpoint and give it names.

    The files are written into a temporary directory and flushed to disk, after the lines that they count on and before
    the manifest; one rename makes it a checkpoint; then the names move to it, and what no name points at is deleted.

    Args:
        root: the directory of the run's checkpoints; made when absent.
        save: writes the checkpoint's files into an existing, empty directory.
        epoch: training epochs done.
        iteration: batches of the train stream run.
        names: the names it gets, such as `latest`.
        given_up: names that are removed.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: it could not be written; what was there before is untouched.
    """
    names = sorted(names)
    check_guards(root)
    flush_lines()
    with storing(root, "write a checkpoint in"):
        if not root.exists():
            root.mkdir()  # without those above it: a run that was removed does not come back as its checkpoints alone
            flush_directory(root.parent)
        aside = root / f"{_ASIDE}{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            save(aside)
            files = {}
            for path in sorted(aside.iterdir()):
                flush_file(path)
                files[path.name] = describe(path)
            manifest = Manifest(FORMAT, _next_number(root), epoch, iteration, names, files)
            (aside / _MANIFEST).write_text(_encode(manifest), encoding="utf-8")  # whole: its directory has no name yet
            flush_file(aside / _MANIFEST)
            flush_directory(aside)
            place = _free_place(root, iteration)
            check_guards(place)
            aside.rename(place)
            flush_directory(root)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    name_checkpoint(place, names, given_up)
    return place


def name_checkpoint(place: Path, names: Iterable[str], given_up: Iterable[str] = ()) -> None:
    """Move names to a checkpoint, remove those that are given up, and delete the checkpoints that have none left."""
    root = place.parent
    with storing(root, "move names in"):
        for name in names:
            link_atomically(root / name, place.name)
        flush_directory(root)
    with storing(root, "delete old checkpoints in"):
        for name in given_up:
            (root / name).unlink(missing_ok=True)
        with os.scandir(root) as found:
            entries = list(found)
        links = [root / each.name for each in entries if each.is_symlink() and not each.name.startswith(".")]
        named = {link.readlink().name for link in links}
        for each in entries:
            if each.name.startswith(_ASIDE):  # by a process that was killed
                shutil.rmtree(each)
        for each in entries:
            if _is_checkpoint(each) and each.name not in named:
                aside = root / f"{_ASIDE}{each.name}"
                (root / each.name).rename(aside)  # a checkpoint is never seen with half its files
                shutil.rmtree(aside)


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
    """
    places = _checkpoints(root) if root.is_dir() else []
    damaged: list[str] = []
    for place in sorted(places, key=_order, reverse=True):
        try:
            verify(place)
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
    for each in _checkpoints(place.parent):
        if 0 < _commit_of(each) < own:
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
    return bool(_DIRECTORY.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _checkpoints(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return [root / each.name for each in entries if _is_checkpoint(each)]


def _order(place: Path) -> tuple[int, str]:
    """Return what checkpoints are sorted by: the number of the commit, or the name where that cannot be read."""
    try:
        return _read_manifest(place).commit, place.name
    except StorageError:
        followers = [path for path in _checkpoints(place.parent) if path.name < place.name]
        return max((_commit_of(path) for path in followers), default=0), place.name


def _commit_of(place: Path) -> int:
    try:
        return _read_manifest(place).commit
    except StorageError:
        return 0


def verify(place: Path) -> Manifest:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        StorageError: a file is missing or differs, the manifest cannot be read, or its format is newer than emrun.
    """
    manifest = _read_manifest(place)
    for name, expected in manifest.files.items():
        path = place / name
        if name != Path(name).name or not path.is_file():
            raise StorageError(f"checkpoint {place}: {name} is missing; the checkpoint is damaged")
        with storing(path, "read"):
            found = describe(path)
        if found != expected:
            raise StorageError(f"checkpoint {place}: {name} differs from its manifest; the checkpoint is damaged")
    return manifest


def _next_number(root: Path) -> int:
    """Return the `commit` of the next checkpoint; a damaged one does not keep it from being saved."""
    number = 0
    with os.scandir(root) as entries:
        for each in filter(_is_checkpoint, entries):
            with suppress(FileNotFoundError):  # somebody deletes it
                found = each.stat(follow_symlinks=False)
                number = max(number, _known_commit_of(root / each.name, found.st_ino, found.st_mtime_ns))
    return number + 1


@cache
def _known_commit_of(place: Path, inode: int, changed: int) -> int:
    """Likewise `_commit_of`; it is not read again while the directory is the same."""
    return _commit_of(place)


def _manifests(root: Path) -> Iterable[tuple[Path, Manifest]]:
    """Yield a run's checkpoints with their manifests, those that can be read."""
    for path in _checkpoints(root):
        with suppress(StorageError):
            yield path, _read_manifest(path)


def _encode(manifest: Manifest) -> str:
    content = asdict(manifest)
    return json.dumps({**content, "sha256": json_digest(content)}, indent=2) + "\n"


def _read_manifest(place: Path) -> Manifest:
    try:
        content = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        known = content["format"] <= FORMAT
        intact = content.pop("sha256", None) == json_digest(content)
        manifest = Manifest(**content) if known and intact else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"checkpoint {place}: {_MANIFEST} cannot be read ({error})") from error
    if not known:
        newer = f"format {content['format']} is newer than this emrun knows ({FORMAT})"
        raise StorageError(f"checkpoint {place}: {newer}")
    if manifest is None:
        raise StorageError(f"checkpoint {place}: {_MANIFEST} is damaged")
    if place.resolve().name.split("-")[1:2] != [f"{manifest.iteration:08d}"]:
        raise StorageError(f"checkpoint {place}: {_MANIFEST} is that of another one; the checkpoint is damaged")
    return manifest


def _free_place(root: Path, iteration: int) -> Path:
    place = root / f"it-{iteration:08d}"
    number = 1
    while place.exists():
        number += 1
        place = root / f"it-{iteration:08d}-{number}"
    return place
