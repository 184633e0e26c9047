"""Compares what two runs were made from: the newest of the directories `code`, `code-2`, ... of each."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from emrun.errors import StorageError
from emrun.fields import fitting
from emrun.storage.code import KIND, RECORD
from emrun.storage.code_record import code_records
from emrun.storage.files import read_regular

_LARGEST_RECORD = 20_000_000  # bytes
_LARGEST_SOURCE = 1_000_000
_MOST_LINES = 5_000  # of a source that is compared line by line
_MOST = 1_000  # modules or packages that differ
_MOST_DIFFED = 200  # modules
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def compare_code(a: Path, b: Path) -> dict[str, Any]:
    """Return the parts `modules`, `packages`, `python` and `repositories` of a comparison; see `compare`.

    Raises:
        StorageError: a run has no readable record of its code.
    """
    (one, first), (other, second) = (newest_code(directory) for directory in (a, b))
    left, right = one["packages"], other["packages"]
    python = [each["python"] for each in (one, other)]
    repositories = [[_repository(each) for each in record["repositories"]] for record in (one, other)]
    states = [[(each["commit"], each["changes"]) for each in side] for side in repositories]
    return {
        "modules": _modules(one["modules"], other["modules"], first, second),
        "packages": [
            {"name": name, "a": left.get(name), "b": right.get(name)}
            for name in {**left, **right}
            if left.get(name) != right.get(name)
        ][:_MOST],
        "python": None if python[0] == python[1] else {"a": python[0], "b": python[1]},
        "repositories": None if states[0] == states[1] else {"a": repositories[0], "b": repositories[1]},
    }


def newest_code(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the content of the newest record of the code of a run, and the directory of the record.

    Raises:
        StorageError: the run has no record, or it cannot be read.
    """
    for _, place in reversed(code_records(directory)):
        if (place / RECORD).is_file():
            with suppress(ValueError, RecursionError):
                content = json.loads(read_regular(place / RECORD, _LARGEST_RECORD))
                if fitting(content, KIND):
                    return content, place
            raise StorageError(0, f"{place / RECORD} is damaged, or a newer emrun wrote it")
    raise StorageError(0, f"the code of {directory} is not recorded")


def _repository(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"directory": entry["directory"], "commit": entry["commit"], "changes": entry["sha256"]}


def _modules(a: Mapping[str, Any], b: Mapping[str, Any], first: Path, second: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in {**a, **b}:
        if name in a and name in b and a[name]["sha256"] == b[name]["sha256"]:
            continue
        change = "changed" if name in a and name in b else "only in a" if name in a else "only in b"
        is_diffed = change == "changed" and len(found) < _MOST_DIFFED
        found.append({"name": name, "change": change, "diff": _diff(name, first, second) if is_diffed else None})
    return found[:_MOST]


def _diff(name: str, first: Path, second: Path) -> str | None:
    """Return a unified diff of a module; None if one of the sources is missing or too large."""
    sources = [_source(place, name) for place in (first, second)]
    if None in sources:
        return None
    lines = [source.splitlines() for source in sources if source is not None]
    if any(len(each) > _MOST_LINES for each in lines):
        return None
    return "\n".join(difflib.unified_diff(lines[0], lines[1], f"a/{name}", f"b/{name}", lineterm="", n=2))


def _source(place: Path, name: str) -> str | None:
    if not _NAME.fullmatch(name):
        return None
    home = place / "modules"
    path = home / PurePath(*name.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        with suppress(StorageError):
            if file.resolve() == home.parent.resolve() / file.relative_to(home.parent):  # not behind a link
                return read_regular(file, _LARGEST_SOURCE).decode(errors="backslashreplace")
    return None
