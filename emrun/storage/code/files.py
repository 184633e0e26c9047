"""The files of the directory `code` of a run: what the run was made from, besides its config, and its first batches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
        "modules": mapping_of(record({"sha256": optional(TEXT)})),
        "packages": mapping_of(TEXT),
        "problems": sequence_of(TEXT),
    }
)
BATCHES = "batches.jsonl"
_MOST = 10_000  # entries that are read
_LINE = record(
    {"stream": TEXT, "pass": whole(), "ranks": whole(1), "sources": mapping_of(optional(TEXT))}, may_lack=("ranks",)
)

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
    if content is None:
        return
    yield from map(PurePath, (RECORD, "packages.txt", "batches.jsonl"))
    yield from (PurePath(patch_path(number)) for number in range(1, len(content["repositories"]) + 1))
    for name in content["modules"]:
        path = PurePath("modules", *name.split("."))
        if ".." not in path.parts and not PurePath(name).is_absolute():
            yield from (path.with_name(f"{path.name}.py"), path / "__init__.py")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs between two contents of `record.json`, in words.

    Modules that are only in the first do not count.

    Returns:
        What a resume may be inexact by: changed modules, and other versions; and all other differences.
    """
    severe = []
    others = []
    for name, module in now["modules"].items():
        known = before["modules"].get(name, {"sha256": None})
        if name not in before["modules"]:
            others.append(f"module {name} is new")
        elif None not in (known["sha256"], module["sha256"]) and known["sha256"] != module["sha256"]:
            severe.append(f"module {name}")
    if before["python"] != now["python"]:
        severe.append(f"Python {before['python']} -> {now['python']}")
    old = before["packages"]
    new = now["packages"]
    severe += [f"{name} {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]
    others += [f"{name} is not installed any more" for name in old if name not in new]
    others += [f"{name} is installed" for name in new if name not in old]
    return severe, [*others, *_changed_repositories(before["repositories"], now["repositories"])]


def _changed_repositories(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = {each["directory"]: each for each in before}
    there = [(known[each["directory"]], each) for each in now if each["directory"] in known]
    if before and now and not there:
        yield "another git repository"
    for one, other in there:
        if one["commit"] != other["commit"]:
            yield f"git commit {str(one['commit'])[:10]} -> {str(other['commit'])[:10]}"
        elif None not in (one["sha256"], other["sha256"]) and one["sha256"] != other["sha256"]:
            yield "uncommitted changes"


def module_path(name: str, file: str) -> str:
    """Return the path in the directory `code` of the source of a module, whose file has a path of its own."""
    inner = "/__init__" if PurePath(file).stem == "__init__" else ""
    return f"modules/{name.replace('.', '/')}{inner}.py"


def patch_path(number: int) -> str:
    """Return the path in the directory `code` of the changes in a repository: 1 for the first."""
    return "diff.patch" if number == 1 else f"diff-{number}.patch"


def sha256_of(data: bytes) -> str:
    """Return the checksum of a file as a record has it."""
    return hashlib.sha256(data).hexdigest()


def note_batch(directory: Path, key: Key, sources: Mapping[str, str | None]) -> list[str]:
    """Write the checksums of a stream's first batch unless they are there; return the sources that then differ.

    Args:
        directory: the directory `code` of the run.
        key: the stream, the number of the pass, and how many ranks share the batch.
        sources: name of a source -> checksum of its values; None for values that have none.

    Raises:
        StorageError: the file cannot be read or written.
    """
    check_no_link(directory)
    stream, pass_number, ranks = key
    before = recorded_batches(directory).get(key)
    if before is None:
        several = {"ranks": ranks} if ranks > 1 else {}
        line = {"stream": stream, "pass": pass_number, **several, "sources": sources}
        append_line(directory / BATCHES, json.dumps(line))
        return []
    return [name for name in {**before, **sources} if before.get(name) != sources.get(name)]


def recorded_batches(directory: Path) -> dict[Key, dict[str, str | None]]:
    """Return the checksums that are in a directory `code`; lines of another form are left out.

    Raises:
        StorageError: the file cannot be read.
    """
    found: dict[Key, dict[str, str | None]] = {}
    for line in read_lines(directory / BATCHES):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if fitting(entry, _LINE) and len(found) < _MOST:
            found.setdefault((entry["stream"], entry["pass"], entry.get("ranks", 1)), entry["sources"])
    return found
