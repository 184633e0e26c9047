"""The content of a YAML file of a run as JSON, in a hidden file beside it: JSON is read a hundred times faster."""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from emrun.base.errors import StorageError
from emrun.storage.files import check_owner, read_regular, storing, write_atomically

_MOST_BRACKETS = 200  # recursion can follow this many levels; of more mappings and lists, the YAML file is read


def plain_file(path: Path) -> Path:
    """Return the file beside a YAML file that has its content as JSON."""
    return path.with_name(f".{path.name}.json")


def write_with_plain(path: Path, text: str, plain: Any) -> None:
    """Write a YAML file, and its content beside it.

    Args:
        path: the file.
        text: the text to write.
        plain: the content of the text in plain types; what JSON would change is left out.
    """
    check_owner(path)
    place = plain_file(path)
    with suppress(OSError):
        place.unlink()  # a kill leaves no content that is older than the file
    write_atomically(path, text)
    with suppress(TypeError, ValueError):
        found = json.dumps([_digest(text), plain])
        if json.loads(found)[1] == plain:
            with storing(path, "write"), place.open("x", encoding="utf-8") as file:
                file.write(found)  # not flushed: without it, or with a part of it, the YAML file is read


def plain_of(path: Path, text: str | None) -> Any:
    """Return the content of a YAML file as it was written beside it; None if the file was changed since, or by itself.

    Args:
        path: the file.
        text: its text; None for the content also of a file that was changed since.
    """
    with suppress(StorageError, ValueError, IndexError, RecursionError):
        content = read_regular(plain_file(path), 4_000_000)
        found = json.loads(content) if content.count(b"[") + content.count(b"{") <= _MOST_BRACKETS else None
        if isinstance(found, list) and (text is None or found[0] == _digest(text)):
            return found[1]
    return None


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()
