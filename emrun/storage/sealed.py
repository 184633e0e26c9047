"""Sealed folders: a file that is written last lists all other files with their checksums, and its own checksum.

Checkpoints and capsules are committed in the same way: `files.written_aside` provides a temporary path; the files are
written there; `seal` flushes and lists them; one rename moves the folder to its place; a failure leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emrun.base.fields import FILES, fitting
from emrun.storage.files import (
    flush_directory,
    opened_regular,
    read_regular,
    refuse_timeout,
    storing,
    write_atomically,
    write_flushed,
)

_LARGEST = 64_000_000  # bytes of the file that describes a folder
_DEPTH = 3  # a folder is in another one in the run directory: see `opened_regular`
_CHUNK = 2**24  # bytes; large, because a thread waits for the interpreter lock between two chunks


def seal(folder: Path, name: str, content: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> None:
    """Flush the files of a folder to disk, then write the file that describes the folder.

    Args:
        folder: the folder, under its temporary path.
        name: the name of the file that is written.
        content: the content of this file, besides `files` and its own `sha256`.
        known: the entries of files that have been flushed and described before; see `describe`.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = (known or {}).get(path.name) or describe(path, flushes=True)
    write_flushed(folder / name, _text_of({**content, "files": files}).encode())
    flush_directory(folder)


def write_seal(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file that describes a folder.

    Args:
        path: the file.
        content: its content, with `files`, besides its own `sha256`.

    Raises:
        StorageError: it cannot be written.
    """
    write_atomically(path, _text_of(content))


def _text_of(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "sha256": json_digest(content)}, indent=2) + "\n"


def read_seal(path: Path) -> tuple[Any, bool]:
    """Return the content of the file that describes a folder, without the checksum, and whether the checksum matches.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON.
        RecursionError: the file is JSON that is nested too deeply.
    """
    content = json.loads(read_regular(path, _LARGEST, _DEPTH))
    return content, isinstance(content, dict) and content.pop("sha256", None) == json_digest(content)


def files_of(path: Path) -> list[str]:
    """Return the names of the files of a folder, with that of the file that describes them; none if it is damaged.

    Raises:
        ReadTimeout: the file system does not return the file in time.
    """
    try:
        content, _ = read_seal(path)
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, path)
        return []
    files: Any = content.get("files") if isinstance(content, dict) else None
    return [path.name, *files] if fitting(files, FILES) else [path.name]


def damaged_file(folder: Path, files: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the first file that is missing or differs from its entry, and whether it exists; None if all are intact.

    Raises:
        StorageError: a file cannot be read.
    """
    for name, expected in files.items():
        path = folder / name
        with storing(path, "read"):
            is_there = path.is_file()
            if not is_there or describe(path) != expected:
                return name, is_there
    return None


def describe(path: Path, *, flushes: bool = False) -> dict[str, Any]:
    """Return the checksum and the size of a file: `{"sha256": ..., "size": bytes}`.

    Args:
        path: the file.
        flushes: whether to flush the file to disk first.
    """
    digest = hashlib.sha256()
    size = 0
    with opened_regular(path, 1 if flushes else _DEPTH) as file:  # a folder that this process has just made is no link
        if flushes:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"sha256": digest.hexdigest(), "size": size}


def json_digest(content: Mapping[str, Any]) -> str:
    """Return the checksum of the content of a JSON file, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
