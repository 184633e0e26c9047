"""Checkpoints: immutable directories that are committed by one rename, verified by a manifest and named by links.

A copy of a run that followed the links has directories under the names; each is that name's checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from emrun.errors import ReadTimeout, StateError, StorageError, UsageError
from emrun.storage.checkpoint_names import (
    ASIDE,
    Names,
    checkpoints_in,
    commit_of,
    entries_of,
    free_place,
    is_checkpoint,
    is_named_directory,
)
from emrun.storage.files import check_guards, flush_directory, flush_lines, link_atomically, storing, written_aside
from emrun.storage.manifest import is_directory_name, read_manifest, seal_manifest, verify
from emrun.wording import listed

_LOG = logging.getLogger(__name__)

DEFAULTS = ("best", "latest")  # the names that are tried in turn when none is given


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
        place = free_place(root, iteration)
        try:
            with written_aside(place, root / f"{ASIDE}{os.getpid()}") as aside:
                aside.mkdir()
                save(aside)
                seal_manifest(aside, known.commits + 1, epoch, iteration, names)
                check_guards(place)
                known.expect(place)
        finally:
            known.give_up_expecting()
    known.move(dict.fromkeys(names, place.name), given_up)
    return place


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
    places = [root / each.name for each in entries_of(root) if is_checkpoint(each) or is_named_directory(each)]
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
    own = commit_of(root / place.name)
    for entry in entries_of(place.parent):
        each = place.parent / entry.name
        is_own = is_checkpoint(entry)
        number = commit_of(each) if is_own or is_named_directory(entry) else 0
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
    return root.is_dir() and any(path.name.startswith(ASIDE) for path in root.iterdir())


def _order(place: Path) -> tuple[int, bool, str]:
    """Return what checkpoints are sorted by: the number of the commit, or the name where that cannot be read."""
    is_own = is_directory_name(place.name)
    try:
        return read_manifest(place).commit, is_own, place.name
    except ReadTimeout:
        raise
    except (StorageError, StateError):
        followers = [path for path in checkpoints_in(place.parent) if is_own and path.name < place.name]
        return max((commit_of(path) for path in followers), default=0), is_own, place.name
