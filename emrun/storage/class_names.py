"""The file `classes.json` of a run, and of each checkpoint: the names of the dataset's classes, by their numbers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from emrun.base.errors import StateError, reason_of
from emrun.base.fields import TEXT, mapping_of, sequence_of
from emrun.base.preparations import named_classes
from emrun.storage.files import opened_regular, refuse_timeout, storing, write_atomically

_LOG = logging.getLogger(__name__)
CLASSES = "classes.json"
_CONTENT = mapping_of(sequence_of(TEXT))


def record_classes(dataset: Any, directory: Path) -> None:
    """Write the names of the classes of a dataset into a run directory, unless it has none that are not there yet.

    Raises:
        StorageError: the file cannot be written.
    """
    names = _names(dataset)
    if names and names != _recorded(directory / CLASSES):
        with storing(directory / CLASSES, "write"):
            write_atomically(directory / CLASSES, json.dumps(names, indent=1))


def check_classes(dataset: Any, directory: Path) -> None:
    """Check that the classes of a dataset have the numbers that they had when the run began.

    Raises:
        StateError: the names are others, so that labels would mean something else; or the file cannot be read.
    """
    path = directory / CLASSES
    before = _recorded(path)
    for source, names in _names(dataset).items():
        known = before.get(source, names)
        if names != known:
            raise StateError(
                f"the dataset has other classes{f' of {source!r}' if source else ''} than when the run began, so that "
                f"its labels mean something else; {path} has those of the run. Use the data of the run, or train anew; "
                "if each number means the same, delete the file"
            )


def warn_of_other_classes(dataset: Any, weights: Path) -> None:
    """Log a warning if weights that a run begins with are of as many classes as the dataset has, but of other ones.

    Args:
        dataset: the dataset.
        weights: a run directory, a checkpoint, or a file in one of these.
    """
    place = weights if weights.is_dir() else weights.parent
    with suppress(StateError):  # a file of another program
        before = _recorded(place / CLASSES)
        for source, names in _names(dataset).items():
            known = before.get(source, names)
            if names != known and len(names) == len(known):
                what = f"{weights}: the weights{f' of {source!r}' if source else ''} are of other classes than the data"
                _LOG.warning("%s, so that outputs of theirs mean something else; see %s", what, place / CLASSES)


def restore_classes(dataset: Any, directory: Path) -> None:
    """Let a dataset that finds its classes in its data number them as the run in a directory does; see `use_classes`.

    Raises:
        StateError: the file cannot be read.
    """
    use = getattr(dataset, "use_classes", None)
    if callable(use):
        use(_recorded(directory / CLASSES))


def _recorded(path: Path) -> dict[str, Any]:
    """Return what the file has; nothing if the run began without names."""
    if not os.path.lexists(path):
        return {}
    try:
        with opened_regular(path) as file:
            names: dict[str, Any] = json.load(file)
        _CONTENT.check(names)
        return names
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, path)
        raise StateError(f"{path} cannot be read: {reason_of(error)}") from error


def _names(dataset: Any) -> dict[str, list[str]]:
    """Return source -> names of its classes, with an empty name for all sources; nothing if they are not lists."""
    try:
        names = named_classes(dataset)
    except Exception:  # a hook that reads the names reports it
        return {}
    by_source = names if isinstance(names, Mapping) else {"": names}
    return {
        str(key): list(map(str, classes))
        for key, classes in by_source.items()
        if isinstance(classes, list | tuple) and classes
    }
