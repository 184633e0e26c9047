"""The content of a YAML file of a run as JSON, in a hidden file beside it: JSON is read a hundred times faster."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from emrun.base.errors import StorageError
from emrun.storage.files import check_owner, read_regular, storing, write_atomically


def plain_file(path: Path) -> Path:
    """Return the file beside a YAML file that has its text and its content as JSON."""
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
    with storing(path, "write"):
        place.unlink(missing_ok=True)  # a kill leaves no content that is older than the file
    write_atomically(path, text)
    with suppress(TypeError, ValueError), storing(path, "write"):
        content = json.dumps([text, plain])
        if json.loads(content) == [text, plain]:
            with place.open("x", encoding="utf-8") as file:
                file.write(content)  # not flushed: without it, or with a part of it, the YAML file is read


def read_plain(path: Path, most: int) -> Any:
    """Return the content of a YAML file of a run in plain types.

    Args:
        path: the file.
        most: the largest size in bytes.

    Raises:
        StorageError: it cannot be read.
        Exception: it is not YAML; the library raises several errors.
    """
    text = read_regular(path, most).decode()
    content = plain_of(path, text)
    return YAML(typ="safe", pure=True).load(text) if content is None else content


def plain_of(path: Path, text: str | None) -> Any:
    """Return the content of a YAML file as it was written beside it; None if the file was changed since, or by itself.

    Args:
        path: the file.
        text: its text; None for the content also of a file that was changed since.
    """
    with suppress(StorageError, ValueError, TypeError, RecursionError):
        written, plain = json.loads(read_regular(plain_file(path), 4_000_000))
        if text in (None, written):
            return plain
    return None
