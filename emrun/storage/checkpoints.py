"""Checkpoints: immutable directories that are committed by one rename, verified by a manifest and named by links.

A copy of a run that followed the links has directories under the names; each is that name's checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from emrun.errors import ReadTimeout, StorageError, UsageError
from emrun.storage.checkpoint_names import Names
from emrun.storage.files import check_guards, flush_directory, flush_lines, link_atomically, storing, written_aside
from emrun.storage.manifest import ASIDE, Contents, free_place, is_directory_name, read_manifest, seal_manifest, verify
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
    here = Contents.of(root)
    manifests = here.manifests(root)

    def order(name: str) -> tuple[int, bool, str]:
        """Return what checkpoints are sorted by: the commit, of a damaged one the last before it by name."""
        is_own = is_directory_name(name)
        if name in manifests:
            return manifests[name].commit, is_own, name
        before = [each.commit for other, each in manifests.items() if is_directory_name(other) and other < name]
        return max(before, default=0) if is_own else 0, is_own, name

    damaged: list[str] = []
    for place in [root / name for name in sorted((*here.own, *here.named), key=order, reverse=True)]:
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
    own = read_manifest(root / place.name).commit
    here = Contents.of(place.parent)
    for name, manifest in here.manifests(place.parent).items():
        if manifest.commit > own or name == place.name:
            continue
        if manifest.commit < own:
            try:
                _copy(place.parent / name, root / name)
            except FileNotFoundError:
                shutil.rmtree(root / name, ignore_errors=True)
        elif name in here.named:
            link_atomically(root / name, place.name)  # a copy that followed links has it twice
    for name, target in here.links.items():
        if (root / target).is_dir():
            link_atomically(root / name, target)
    return root / place.name


def _copy(place: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(place.iterdir()):
        shutil.copy2(path, target / path.name)


def is_unfinished(root: Path) -> bool:
    """Tell whether a process was killed while it wrote a checkpoint."""
    return bool(Contents.of(root).asides)
