"""Folders that are sealed: a file that is written last names all the others with their checksums, and its own.

A checkpoint and a capsule are committed by one protocol: `written_aside` of `files` gives a path aside; the files are
written there; `seal` flushes and describes them; one rename puts all in its place; what fails leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emrun.storage.files import flush_directory, flush_file, storing

_CHUNK = 2**24  # large: between two of them a writer in a thread waits for the interpreter lock


def seal(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Flush the files of a folder to disk, then write what it says of itself.

    Args:
        folder: the folder, which has no name of its own yet.
        name: the name of the file that says it.
        content: what it says beside `files` and its own `sha256`.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        flush_file(path)
        files[path.name] = describe(path)
    said = {**content, "files": files}
    text = json.dumps({**said, "sha256": json_digest(said)}, indent=2) + "\n"
    (folder / name).write_text(text, encoding="utf-8")
    flush_file(folder / name)
    flush_directory(folder)


def read_seal(path: Path) -> tuple[Any, bool]:
    """Return what a folder says of itself, without the checksum, and whether that is what was written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON.
        RecursionError: likewise.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    return content, isinstance(content, dict) and content.pop("sha256", None) == json_digest(content)


def damaged_file(folder: Path, files: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the first file that is not as a seal says and whether it is there; None when all are intact.

    Raises:
        StorageError: one cannot be read.
    """
    for name, expected in files.items():
        path = folder / name
        with storing(path, "read"):
            is_there = path.is_file()
            if not is_there or describe(path) != expected:
                return name, is_there
    return None


def describe(path: Path) -> dict[str, Any]:
    """Return what tells a file from a damaged one: `{"sha256": ..., "size": bytes}`."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return {"sha256": found.hexdigest(), "size": path.stat().st_size}


def json_digest(content: Mapping[str, Any]) -> str:
    """Return the checksum of what a JSON file holds, the order of its keys aside."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
