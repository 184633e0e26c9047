"""The files of the directory `code` of a run: what the run was made from, besides its config, and its first batches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from emrun.base.fields import TEXT, choice, fitting, mapping_of, optional, record, sequence_of, whole
from emrun.storage.files import (
    append_line,
    check_no_link,
    check_owner,
    flush_directory,
    read_regular,
    storing,
    write_atomically,
    write_flushed,
)
from emrun.storage.lines import read_lines

RECORD = "record.json"
FORMAT = 1
_LARGEST = 64_000_000  # bytes of the record
KIND = record(
    {
        "format": choice(FORMAT),
        "python": TEXT,
        "repositories": sequence_of(record({"directory": TEXT, "commit": optional(TEXT), "sha256": optional(TEXT)})),
        "modules": mapping_of(record({"file": TEXT, "sha256": optional(TEXT)})),
        "packages": mapping_of(TEXT),
        "problems": sequence_of(TEXT),
    }
)
BATCHES = "batches.jsonl"
_MOST = 10_000  # entries that are read
_LINE = record({"stream": TEXT, "pass": whole(), "ranks": whole(1), "digests": mapping_of(TEXT)}, may_lack=("ranks",))

Key = tuple[str, int, int]
"""A stream, the number of the pass, 0 for an evaluation, and how many ranks share a batch; the sources are rank 0's."""


@dataclass(frozen=True, slots=True)
class Code:
    """What a run was made from.

    Args:
        record: the content of `record.json`.
        files: path in the directory `code` -> content of the other files.
    """

    record: dict[str, Any]
    files: dict[str, bytes]


def write_code(directory: Path, code: Code) -> None:
    """Write the files of a directory `code` and flush them to disk; the last, `record.json`, says that all are there.

    Raises:
        StorageError: a directory is a link, or a file cannot be written.
    """
    folders = sorted({parent for path in code.files for parent in PurePath(path).parents} | {PurePath()})
    check_owner(directory / RECORD)
    with storing(directory, "write"):
        for folder in folders:
            check_no_link(directory / folder)
            (directory / folder).mkdir(exist_ok=True)  # without parents: a run that was removed must not come back
        for path, data in code.files.items():
            (directory / path).unlink(missing_ok=True)  # it may be a link
            write_flushed(directory / path, data)
        for folder in (*folders, PurePath("..")):
            flush_directory(directory / folder)
    write_atomically(directory / RECORD, json.dumps(code.record, indent=1) + "\n")


def read_code(directory: Path) -> dict[str, Any] | None:
    """Return the content of `record.json`; None if it is missing, damaged or of another format.

    Raises:
        StorageError: it cannot be read.
    """
    with suppress(ValueError, RecursionError):
        if os.path.lexists(directory / RECORD):
            content: dict[str, Any] = json.loads(read_regular(directory / RECORD, _LARGEST, depth=2))
            return content if fitting(content, KIND) else None
    return None


def recorded_files(directory: Path) -> Iterator[PurePath]:
    """Yield the paths in a directory `code` that its record names; nothing without a readable record."""
    content = read_code(directory)
    if content is not None:
        modules = (module_path(name, module["file"]) for name, module in content["modules"].items())
        patches = (patch_path(number) for number in range(1, len(content["repositories"]) + 1))
        yield from map(PurePath, (RECORD, "packages.txt", BATCHES, *patches, *modules))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs between two contents of `record.json`, in words.

    Modules that are only in the first do not count.

    Returns:
        What a resume may be inexact by: changed modules, and other versions; and all other differences.
    """
    severe = []
    others = []
    for name, module in now["modules"].items():
        known = before["modules"].get(name)
        if known is None:
            others.append(f"module {name} is new")
        elif None not in (known["sha256"], module["sha256"]) and known["sha256"] != module["sha256"]:
            severe.append(f"module {name}")
    old = {"Python": before["python"], **before["packages"]}
    new = {"Python": now["python"], **now["packages"]}
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            differences = severe if name in old and name in new else others
            differences.append(f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}")
    if before["repositories"] != now["repositories"]:
        others.append("other git commits or uncommitted changes")
    return severe, others


def module_path(name: str, file: str) -> str:
    """Return the path in the directory `code` of the source of a module; no name leads out of it.

    Args:
        name: the name of the module.
        file: the path of its file.
    """
    inner = "/__init__" if PurePath(file).stem == "__init__" else ""
    return f"modules/{name.replace('.', '/')}{inner}.py"


def patch_path(number: int) -> str:
    """Return the path in the directory `code` of the changes in a repository: 1 for the first."""
    return "diff.patch" if number == 1 else f"diff-{number}.patch"


def sha256_of(data: bytes) -> str:
    """Return the checksum of a file as a record has it."""
    return hashlib.sha256(data).hexdigest()


def note_batch(directory: Path, key: Key, digests: Mapping[str, str]) -> list[str]:
    """Write the checksums of a stream's first batch unless they are there; return the sources that then differ.

    Args:
        directory: the directory `code` of the run.
        key: the stream, the number of the pass, and how many ranks share the batch.
        digests: name of a source -> checksum of its values.

    Raises:
        StorageError: the file cannot be read or written.
    """
    check_no_link(directory)
    stream, pass_number, ranks = key
    before = recorded_batches(directory).get(key)
    if before is None:
        shared = {"ranks": ranks} if ranks > 1 else {}
        line = {"stream": stream, "pass": pass_number, **shared, "digests": digests}
        append_line(directory / BATCHES, json.dumps(line))
        return []
    return [name for name in {**before, **digests} if before.get(name) != digests.get(name)]


def recorded_batches(directory: Path) -> dict[Key, dict[str, str]]:
    """Return the checksums that are in a directory `code`; lines of another form are left out.

    Raises:
        StorageError: the file cannot be read.
    """
    batches: dict[Key, dict[str, str]] = {}
    for line in read_lines(directory / BATCHES):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if fitting(entry, _LINE) and len(batches) < _MOST:
            batches.setdefault((entry["stream"], entry["pass"], entry.get("ranks", 1)), entry["digests"])
    return batches
