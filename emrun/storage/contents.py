"""What lies in the directory of a run's checkpoints."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from emrun.storage.manifest import FILE, Manifest, is_directory_name, readable_manifest

ASIDE = ".tmp-"  # how the names begin of directories that are being written or deleted, or are to be


@dataclass(frozen=True, slots=True)
class Contents:
    """The names in the directory of a run's checkpoints.

    Args:
        own: the directories of checkpoints.
        named: checkpoints that lie under a name themselves, in a copy that followed links.
        links: name -> the name of what it points at, which may not be there.
        asides: directories that are being written or deleted, or are to be.
    """

    own: list[str]
    named: list[str]
    links: dict[str, str]
    asides: list[str]

    @classmethod
    def of(cls, root: Path) -> Contents:
        """Look into a directory, which may not be there."""
        found = cls([], [], {}, [])
        try:
            entries = list(os.scandir(root))
        except FileNotFoundError:
            return found
        for each in entries:
            if each.name.startswith("."):
                found.asides.extend([each.name] if each.name.startswith(ASIDE) else [])
            elif each.is_symlink():
                with suppress(FileNotFoundError):  # somebody gives the name up
                    found.links[each.name] = Path(os.readlink(each)).name  # noqa: PTH115 - of thousands
            elif each.is_dir() and is_directory_name(each.name):
                found.own.append(each.name)
            elif each.is_dir() and Path(each, FILE).exists():
                found.named.append(each.name)
        return found

    def manifests(self, root: Path) -> dict[str, Manifest]:
        """Return the manifests of all checkpoints but those that are damaged; own ones first.

        Raises:
            ReadTimeout: the file system does not give one in time.
        """
        found = {name: readable_manifest(root / name) for name in (*self.own, *self.named)}
        return {name: manifest for name, manifest in found.items() if manifest is not None}


def free_place(root: Path, iteration: int) -> Path:
    """Return where the next checkpoint of an iteration will lie."""
    place = root / f"it-{iteration:08d}"
    number = 1
    while place.exists():
        number += 1
        place = root / f"it-{iteration:08d}-{number}"
    return place
