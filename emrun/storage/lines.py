"""Files that grow line by line. Checkpoints store their length and digest, so that a resume detects changes."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from emrun.storage.files import append_line, opened_regular, storing, truncate, write_atomically

_LOG = logging.getLogger(__name__)


LONGEST = 50_000_000
"""The most bytes of a line that is read."""


def read_lines(path: Path, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, one after another; b"" stands for a line that is too long.

    A missing file has no lines.

    Args:
        path: the file.
        longest: the most bytes of a line.

    Raises:
        StorageError: the file cannot be read.
    """
    with storing(path, "read"):
        if not path.exists():
            return
    with opened_regular(path) as file:
        while line := file.readline(longest + 1):
            is_complete = len(line) <= longest or line.endswith(b"\n")
            while not is_complete:
                rest = file.readline(longest)
                is_complete = not rest or rest.endswith(b"\n")
                line = b""
            yield line


class Lines:
    """A file that one process appends lines to, with its length and a running digest.

    A change that other code makes to the file is noticed at the next line, by the file's length.

    Args:
        path: the file; if it exists already, call `go_back_to` first, so that its content is counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        self.lines = 0
        """How many complete lines the file has."""
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the file's content."""
        return self._digest.hexdigest()

    def append(self, line: str) -> None:
        """Append a line after the last complete one, completely or not at all; see `append_line`."""
        self.look()
        append_line(self.path, line)
        self._count(f"{line}\n".encode())

    def look(self) -> None:
        """If other code changed the file, log a warning, and remove an incomplete line at its end."""
        size = 0
        with storing(self.path, "read"), suppress(FileNotFoundError):
            size = self.path.stat().st_size
        if size == self.length:
            return
        change = "deleted" if not self.path.exists() else f"changed from {self.length} to {size} bytes"
        _LOG.warning("%s was %s while the run writes it; the run continues to append to it", self.path, change)
        content = self._content()
        self._keep(content, content[: content.rfind(b"\n") + 1])

    def go_back_to(self, length: int, digest: str | None = None, *, is_wanted: Callable[[bytes], bool]) -> bool:
        """Cut the file down to the content that it had at some time, such as a checkpoint.

        Args:
            length: the file's length at that time, in bytes.
            digest: the file's SHA-256 at that time, None if it is not known.
            is_wanted: whether a line is complete and older; called if lines were lost or changed. Only such lines are
                kept then.

        Returns:
            Whether the file has the same content.
        """
        content = self._content()
        kept = content[:length]
        is_whole = len(kept) == length and digest in (None, hashlib.sha256(kept).hexdigest())
        if not is_whole:
            lines = [line.removesuffix(b"\n") for line in io.BytesIO(content) if is_wanted(line)]
            kept = b"".join(line + b"\n" for line in lines)
        self._keep(content, kept)
        return is_whole

    def _content(self) -> bytes:
        if not os.path.lexists(self.path):
            return b""
        with opened_regular(self.path) as file:
            return file.read()

    def _keep(self, content: bytes, kept: bytes) -> None:
        """Replace the file's content by the part that is kept."""
        if content.startswith(kept):
            truncate(self.path, len(kept))
        elif content != kept:
            write_atomically(self.path, kept)
        self.length = 0
        self.lines = 0
        self._digest = hashlib.sha256()
        self._count(kept)

    def _count(self, data: bytes) -> None:
        self.length += len(data)
        self.lines += data.count(b"\n")
        self._digest.update(data)
