"""The file `preparation.json` of a run, and of each checkpoint: what its datasets have learnt from the train rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

from emrun.base.errors import StateError, reason_of
from emrun.base.preparations import Preparations
from emrun.base.types import Json
from emrun.storage.files import opened_regular, refuse_timeout, storing, write_atomically

PREPARATION_FILE = "preparation.json"
_FORMAT = 1
_LATEST = Path("checkpoints", "latest")


def read_preparation(directory: Path) -> Preparations:
    """Return what the datasets had learnt when the run began; nothing if the run began without.

    If the run directory has lost the file, that of the newest checkpoint is read.

    Raises:
        StateError: the file is damaged, or has another format.
    """
    for path in (directory / PREPARATION_FILE, (directory / _LATEST).resolve() / PREPARATION_FILE):
        if os.path.lexists(path):
            return _read(path)
    return Preparations()


def _read(path: Path) -> Preparations:
    try:
        with opened_regular(path) as file:
            found = json.load(file)
        version = found["format"]
        datasets: dict[str, Json] = {key: dict(each) for key, each in found["datasets"].items()}
        numbers = {name: int(each) for name, each in found.get("numbers", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse_timeout(error, path)
        advice = "copy that of a checkpoint of the run, checkpoints/*/preparation.json, over it"
        raise StateError(f"{path} is damaged or cut off ({reason_of(error)}); {advice}") from error
    if version != _FORMAT:
        raise StateError(
            f"{path} has format {version!r}, but this version of emrun reads format {_FORMAT}; use the version of "
            "emrun that has made the run, or train anew"
        )
    return Preparations(datasets, numbers)


def record_preparation(prepared: Preparations, directory: Path) -> None:
    """Write what datasets have learnt into a run directory, unless that is nothing.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / PREPARATION_FILE
    kept: Json = {"datasets": prepared.made, "numbers": prepared.numbers}
    if any(kept.values()):
        kept = {key: each for key, each in kept.items() if each or key == "datasets"}
        with storing(path, "write"):
            write_atomically(path, json.dumps({"format": _FORMAT, **kept}, indent=1))


def copy_preparation(directory: Path | None, target: Path) -> None:
    """Copy the file of a run directory, if it has one, into a checkpoint that is being written."""
    if directory is not None and os.path.lexists(directory / PREPARATION_FILE):
        record_preparation(_read(directory / PREPARATION_FILE), target)
