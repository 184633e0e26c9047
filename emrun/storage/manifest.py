"""What a checkpoint says of itself, and whether its files are what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emrun.arguments import safe_component
from emrun.errors import ReadTimeout, StateError, StorageError, reason_of
from emrun.fields import ANOTHER_CHECKPOINT, FILES, Kind, kinds_of, mapping_of, reading, record, sequence_of, whole
from emrun.storage.files import refuse_timeout
from emrun.storage.sealed import damaged_file, read_seal, seal

FORMAT = 1


FILE = "manifest.json"


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


MANIFEST = kinds_of(Manifest, format=whole(1), names=sequence_of(NAME), files=FILES)
"""Field of a manifest -> what it may hold. Checked where it is read, and the names before they are written."""


def verify(place: Path) -> Manifest:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        StorageError: a file is missing or differs, the manifest cannot be read, or its format is newer than emrun.
        StateError: a field of the manifest has a value that it cannot have, though its checksum is right.
    """
    manifest = read_manifest(place)
    damage = damaged_file(place, manifest.files)
    if damage is not None:
        name, is_there = damage
        what = "differs from its manifest" if is_there else "is missing"
        raise StorageError(f"checkpoint {place}: {name} {what}; the checkpoint is damaged")
    return manifest


def seal_manifest(folder: Path, commit: int, epoch: int, iteration: int, names: list[str]) -> None:
    """Flush the files of a checkpoint and write its manifest."""
    content = {"format": FORMAT, "commit": commit, "epoch": epoch, "iteration": iteration, "names": names}
    record({name: kind for name, kind in MANIFEST.items() if name != "files"}).check(content)
    seal(folder, FILE, content)


def read_manifest(place: Path) -> Manifest:
    """Return a checkpoint's manifest; errors as those of `verify`."""
    try:
        content, intact = read_seal(place / FILE)
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, place / FILE)
        raise StorageError(f"checkpoint {place}: {FILE} cannot be read ({reason_of(error)})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is int and version > FORMAT:
        newer = f"format {version} of {FILE} is newer than this emrun knows ({FORMAT})"
        raise StorageError(f"checkpoint {place}: {newer}")
    if not intact:
        raise StorageError(f"checkpoint {place}: {FILE} is damaged")
    with reading(f"{place / FILE}", ANOTHER_CHECKPOINT):
        record(MANIFEST).check(content)
        manifest = Manifest(**{name: content[name] for name in MANIFEST})
    directory = place.resolve().name
    if is_directory_name(directory) and directory.split("-")[1] != f"{manifest.iteration:08d}":
        raise StorageError(f"checkpoint {place}: {FILE} is that of another one; the checkpoint is damaged")
    return manifest


def readable_manifest(place: Path) -> Manifest | None:
    """Return a checkpoint's manifest, None where it is damaged or not there.

    Raises:
        ReadTimeout: the file system does not give it in time.
    """
    try:
        return read_manifest(place)
    except ReadTimeout:
        raise
    except (StorageError, StateError):
        return None
