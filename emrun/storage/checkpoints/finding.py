"""Which checkpoints of a run there are: by name, the newest intact one, and those that cannot be used."""

from __future__ import annotations

import errno
import logging
import shlex
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from emrun.base.errors import ReadTimeout, StateError, StorageError, UsageError
from emrun.base.types import Json
from emrun.base.wording import did_you_mean, from_here, listed
from emrun.storage.checkpoints.manifest import Contents, free_place, readable_manifest, verify

_LOG = logging.getLogger(__name__)

DEFAULTS = ("best", "latest")  # the names that are tried in this order if no name is given


def find(root: Path, name: str | None = None) -> Path:
    """Return the directory of a run's checkpoint.

    Args:
        root: the directory of the run's checkpoints.
        name: the checkpoint's name or directory name; None for `best` or, if that is missing, `latest`.

    Raises:
        UsageError: the checkpoint does not exist; the message lists those that do.
    """
    content = Contents.of(root)

    # a link, or a directory
    candidates = (name,) if name else DEFAULTS
    for candidate in candidates:
        path = root / candidate
        if candidate == Path(candidate).name and not candidate.startswith(".") and path.is_dir():
            target = path.resolve()
            if target.parent != root.resolve():
                raise StorageError(errno.ELOOP, f"{path} leads to {target}, which is not beside it")
            return target

    # a copy of the run may have lost the links
    manifests = {}
    if not content.links and not content.others:
        manifests = content.manifests(root)
    for candidate in candidates:
        named = [place for place, manifest in manifests.items() if candidate in manifest.names]
        if named:
            return (root / max(named, key=lambda each: manifests[each].commit)).resolve()

    # neither
    places = root.iterdir() if root.is_dir() else ()
    names = sorted(place.name for place in places if place.is_dir() and not place.name.startswith("."))
    wanted = f"no checkpoint {name!r}{did_you_mean(name, names) or ';'}" if name else "no checkpoint;"
    raise UsageError(f"{root}: {wanted} available: {listed(names)}")


def kept(root: Path) -> list[Json]:
    """Return the checkpoints of a run, each once, the damaged ones first.

    Returns:
        For each, `directory`: the name of its directory; `names`: such as `best`, with those that are directories in a
        copy of the run; `epoch` and `iteration`: how many were done, -1 if it is damaged; `damage`: why it cannot be
        read, or None.

    Raises:
        UsageError: there are none.
        ReadTimeout: the file system does not return a file in time.
    """
    content = Contents.of(root)
    found: dict[Any, Json] = {}
    for directory in (*sorted(content.checkpoints), *sorted(content.others)):
        names = sorted(name for name, target in content.links.items() if target == directory)
        row: Json = {"directory": directory, "names": names, "epoch": -1, "iteration": -1, "damage": None}
        try:
            manifest = verify(root / directory)
            row |= {"epoch": manifest.epoch, "iteration": manifest.iteration}
            same = found.setdefault(manifest.commit, row)
            if same is not row:
                same["names"].append(directory)
        except ReadTimeout:
            raise
        except (StorageError, StateError) as error:
            if (root / directory).is_dir():  # otherwise a run at work has deleted it
                found[directory] = {**row, "damage": str(error)}
    if not found:
        find(root)  # raises the error
    return sorted(found.values(), key=itemgetter("iteration"))


def newest(root: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, and log a warning about newer ones that are damaged.

    Returns:
        None if the run has no checkpoint.

    Raises:
        StorageError: all checkpoints are damaged.
        StateError: a field of the newest manifest has an invalid value.
    """
    content = Contents.of(root)
    manifests = content.manifests(root)

    def order(name: str) -> tuple[int, str]:
        """Return the sort key: the commit number; for a damaged checkpoint, that of the one before it by name."""
        before = [manifest.commit for directory, manifest in manifests.items() if directory <= name]
        manifest = manifests.get(name)
        return max(before, default=0) if manifest is None else manifest.commit, name

    damaged: list[str] = []
    for place in [root / name for name in sorted(content.checkpoints, key=order, reverse=True)]:
        try:
            verify(place)
        except ReadTimeout:
            raise
        except StorageError as error:
            if not place.is_dir():
                return newest(root)  # the run is still writing and deleted it: there is a newer one
            damaged.append(str(error))
            continue
        for message in damaged:
            _LOG.warning("%s; continuing from %s instead", message, place.name)
        return place
    if damaged:
        raise StorageError("\n  ".join((f"no checkpoint of {root} is intact:", *damaged)))
    return None


def check_names(root: Path) -> None:
    """Check that the names of a run's checkpoints are links.

    Raises:
        UsageError: some are directories, as in a copy of the run that followed links.
    """
    content = Contents.of(root)
    known = list(content.manifests(root).values()) if content.others else []
    ways = []
    for name in sorted(content.others):
        place = from_here(root / name)
        manifest = readable_manifest(root / name)
        shown = shlex.quote(str(place))
        if manifest is not None and manifest not in known:  # the only copy of a checkpoint
            ways.append(f"mv {shown} {shlex.quote(str(free_place(place.parent, manifest.iteration)))}")
            known.append(manifest)
        elif manifest is not None or not any((root / name).iterdir()):
            ways.append(f"rm -r {shown}")
        else:
            ways.append(f"move {shown} elsewhere: it is not a checkpoint")
    if ways:
        raise UsageError(
            f"{from_here(root)} has directories instead of links, as a copy that followed links has: it can be "
            f"evaluated, but not resumed. Copy the run again with `cp -a`, or do this: {'; '.join(ways)}"
        )


def note_intact(error: StorageError, root: Path) -> None:
    """Add a note to the error of a damaged checkpoint: the names of the intact ones, or else their directories."""
    if isinstance(error, ReadTimeout):
        return
    intact = []
    content = Contents.of(root)
    names = {target: name for name, target in sorted(content.links.items())}
    for directory in sorted((*content.checkpoints, *content.others)):
        with suppress(StorageError, StateError):
            verify(root / directory)
            intact.append(names.get(directory, directory))
    error.add_note(f"intact checkpoints: {listed(intact)}")


def is_unfinished(root: Path) -> bool:
    """Return whether a process was killed while it wrote a checkpoint."""
    return bool(Contents.of(root).asides)
