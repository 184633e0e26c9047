"""The content of the directory of checkpoints: the manifest of each, and whether its files match the manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.errors import ReadTimeout, StateError, StorageError, UsageError, reason_of
from emrun.base.fields import ANOTHER_CHECKPOINT, FILES, Kind, mapping_of, reading, record, sequence_of, whole
from emrun.base.wording import from_here
from emrun.storage.files import check_no_link, flush_directory, refuse_timeout, storing
from emrun.storage.sealed import damaged_file, read_seal, seal, write_seal

FORMAT = 4
"""The version of a run: of its checkpoints, with all that a resume reads."""
_LAST_COMMITS = {1: "87578c47", 2: "8d47ace3", 3: "f71e93c4"}
"""Earlier version -> the last commit of emrun that resumes a run of it."""
FILE = "manifest.json"
STATE, TRAINED, FROZEN = "state.pt", "training.safetensors", "frozen.safetensors"
SHARDS = "shards.json"
"""Where the rows of each tensor lie, if each rank has written its own; see `emrun.storage.checkpoints.shards`."""
_TO_RESUME_OF_RANKS = re.compile(r"(training|state)-\d+\.safetensors")
ASIDE = ".tmp-"  # prefix of directories that are being written or deleted, or will be deleted
_DIRECTORY = re.compile(r"it-\d{8,}(-\d+)?")
_NUMBER = re.compile(r"-\d+$")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint. It is written last, so that a directory without a manifest is not a checkpoint.

    The file also holds a `sha256` of these fields.

    Args:
        format: the version of the format.
        commit: the number of the checkpoint within the run; the newest checkpoint has the highest.
        epoch: the number of finished training epochs.
        iteration: the number of batches of the train stream that were run.
        names: the names that the checkpoint gets when it is committed. If the process is killed before it has created
            them, a resume creates them.
        files: file name -> `{"sha256": ..., "size": bytes}`.
    """

    format: int
    commit: int
    epoch: int
    iteration: int
    names: list[str]
    files: dict[str, dict[str, Any]]


def is_directory_name(name: str) -> bool:
    """Return whether a name has the form that emrun gives to the directories of checkpoints."""
    return bool(_DIRECTORY.fullmatch(name))


def share_names(one: str, other: str) -> bool:
    """Return whether checkpoints of two prefixes can have the same name: `epoch-1` is one of `epoch`."""
    return one == other or _NUMBER.sub("", one) == other or _NUMBER.sub("", other) == one


def numbered(prefix: str, names: Iterable[str]) -> list[str]:
    """Return those of the names that are a prefix with a number, such as `epoch-1`."""
    return [name for name in names if name != prefix and _NUMBER.sub("", name) == prefix]


NAME = Kind(
    "a name such as 'best': letters, digits, '.', '_', '-', but not the name of a directory",
    lambda name: safe_component("checkpoint", name) == name and not is_directory_name(name),
)
NAMES = mapping_of(Kind("the name of a directory such as 'it-00000120'", is_directory_name), NAME)
"""Name of a checkpoint -> its directory."""


MANIFEST = {
    "format": whole(1),
    **dict.fromkeys(("commit", "epoch", "iteration"), whole()),
    "names": sequence_of(NAME),
    "files": FILES,
}
"""Field of a manifest -> the kind of its value. Checked when a manifest is read, and, but for `files`, written."""


def verify(place: Path) -> Manifest:
    """Read a checkpoint's manifest, compare every file with it and return it.

    Raises:
        StorageError: a file is missing or differs, the manifest cannot be read, or its format is newer than this
            version of emrun supports.
        StateError: a field of the manifest has an invalid value although its checksum is correct.
    """
    manifest = read_manifest(place)
    damage = damaged_file(place, manifest.files)
    if damage is not None:
        name, is_there = damage
        what = "differs from its manifest" if is_there else "is missing"
        raise StorageError(f"checkpoint {place}: {name} {what}; the checkpoint is damaged")
    return manifest


def seal_manifest(
    folder: Path, commit: int, epoch: int, iteration: int, names: list[str], known: Mapping[str, Any] | None = None
) -> None:
    """Flush the files of a checkpoint and write its manifest; `known` has the entries of some of them, if any."""
    content = {"format": FORMAT, "commit": commit, "epoch": epoch, "iteration": iteration, "names": names}
    record({name: kind for name, kind in MANIFEST.items() if name != "files"}).check(content)
    seal(folder, FILE, content, _known_of_linked(folder) if known is None else known)


def _known_of_linked(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of the frozen tensors in the manifest of a checkpoint with the same file."""
    frozen = folder / FROZEN
    if frozen.exists() and frozen.stat().st_nlink > 1:
        for name in Contents.of(folder.parent).checkpoints:
            place = folder.with_name(name)
            with suppress(OSError):  # another process deletes the checkpoint
                manifest = readable_manifest(place) if frozen.samefile(place / FROZEN) else None
                if manifest is not None and FROZEN in manifest.files:
                    return {FROZEN: manifest.files[FROZEN]}
    return {}


def read_manifest(place: Path) -> Manifest:
    """Return a checkpoint's manifest; raises the errors of `verify`, but does not read the other files."""
    try:
        content, intact = read_seal(place / FILE)
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, place / FILE)
        raise StorageError(f"checkpoint {place}: {FILE} cannot be read ({reason_of(error)})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is int and version > FORMAT:
        newer = f"format {version} of {FILE} is newer than this emrun supports ({FORMAT}); update emrun"
        raise StorageError(f"checkpoint {place}: {newer}")
    if not intact:
        raise StorageError(f"checkpoint {place}: {FILE} is damaged")
    with reading(f"{place / FILE}", ANOTHER_CHECKPOINT):
        record(MANIFEST).check(content)
        manifest = Manifest(**{name: content[name] for name in MANIFEST})
    directory = place.resolve().name
    if is_directory_name(directory) and directory.split("-")[1] != f"{manifest.iteration:08d}":
        raise StorageError(f"checkpoint {place}: {FILE} belongs to another checkpoint; the checkpoint is damaged")
    return manifest


def files_to_resume(place: Path) -> list[str]:
    """Return the files of a checkpoint that a resume needs and an evaluation does not; `state.pt` is the first."""
    of_ranks = place.glob("*") if (place / SHARDS).exists() else ()
    names = [STATE, TRAINED, *sorted(file.name for file in of_ranks if _TO_RESUME_OF_RANKS.fullmatch(file.name))]
    return [name for name in names if (place / name).exists()]


def leave_out(place: Path, names: Sequence[str]) -> None:
    """Remove files of a checkpoint, which is intact afterwards, but cannot be resumed.

    Args:
        place: the checkpoint.
        names: the files; those that are not there are ignored.

    Raises:
        StorageError: the manifest is damaged, or a file cannot be removed.
        StateError: a field of the manifest has an invalid value.
    """
    manifest = read_manifest(place)
    kept = {name: entry for name, entry in manifest.files.items() if name not in names}
    if kept != manifest.files:
        write_seal(place / FILE, {**asdict(manifest), "files": kept})
    with storing(place, "remove files of"):
        for name in names:
            (place / name).unlink(missing_ok=True)
        flush_directory(place)


def is_of_earlier_version(place: Path) -> bool:
    """Return whether an earlier version of emrun made a checkpoint, so that it can be evaluated, but not resumed."""
    manifest = readable_manifest(place)
    return manifest is not None and manifest.format < FORMAT


def check_resumable(place: Path) -> None:
    """Check that a checkpoint has what a resume needs.

    Raises:
        UsageError: it has an earlier format, or `leave_out` has removed a file.
    """
    why = None
    manifest = readable_manifest(place)  # None: damaged, or deleted by a run at work
    if manifest is not None and manifest.format < FORMAT:
        last = _LAST_COMMITS[manifest.format]
        why = f"has format {manifest.format}; the last commit of emrun that resumes it is {last}"
    elif manifest is not None and STATE not in manifest.files:
        why = f"has no {STATE}, so that it cannot be resumed: `emrun prune --optimizer-states` has removed it"
    if why is not None:
        shown = from_here(place)
        raise UsageError(
            f"checkpoint {shown} {why}. The run can still be evaluated; to begin a new run with its weights, set "
            f"model.init_from: {shown}"
        )


def readable_manifest(place: Path) -> Manifest | None:
    """Return a checkpoint's manifest, None if it is damaged or missing.

    Raises:
        ReadTimeout: the file system does not return the file in time.
    """
    try:
        return read_manifest(place)
    except ReadTimeout:
        raise
    except (StorageError, StateError):
        return None


@dataclass(frozen=True, slots=True)
class Contents:
    """The names in the directory of a run's checkpoints.

    Args:
        checkpoints: the directories of checkpoints.
        others: other directories, such as `best` in a copy that followed links.
        links: name of a link -> the name of its target, which may be missing.
        asides: directories that are being written or deleted, or will be deleted.
    """

    checkpoints: list[str]
    others: list[str]
    links: dict[str, str]
    asides: list[str]

    @classmethod
    def of(cls, root: Path) -> Contents:
        """Return the names in a directory, which may be missing.

        Raises:
            StorageError: it is a link or no directory, or cannot be read.
        """
        contents = cls([], [], {}, [])
        check_no_link(root)
        with storing(root, "read"):
            try:
                entries = list(os.scandir(root))
            except FileNotFoundError:
                return contents
        for entry in entries:
            if entry.name.startswith("."):
                if entry.name.startswith(ASIDE):
                    contents.asides.append(entry.name)
            elif entry.is_symlink():
                with suppress(FileNotFoundError):  # another process removes the name
                    contents.links[entry.name] = Path(os.readlink(entry)).name  # noqa: PTH115 - may be thousands
            elif entry.is_dir():
                kind = contents.checkpoints if is_directory_name(entry.name) else contents.others
                kind.append(entry.name)
        return contents

    def manifests(self, root: Path) -> dict[str, Manifest]:
        """Return the manifests of `checkpoints` except damaged ones.

        Raises:
            ReadTimeout: the file system does not return a file in time.
        """
        manifests = {name: readable_manifest(root / name) for name in self.checkpoints}
        return {name: manifest for name, manifest in manifests.items() if manifest is not None}


def free_place(root: Path, iteration: int) -> Path:
    """Return the path for the next checkpoint of an iteration."""
    name = f"it-{iteration:08d}"
    place = root / name
    number = 1
    while place.exists():
        number += 1
        place = root / f"{name}-{number}"
    return place
