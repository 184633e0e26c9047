"""Files that grow line by line. Checkpoints store their length and digest, so that a resume detects changes."""

from __future__ import annotations

import enum
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator
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


class Change(enum.Enum):
    """How a file has changed since a checkpoint."""

    NONE = "none"  # except for later lines, which are removed
    EDITED = "edited"  # the length is the same, the content differs
    LOST = "lost"  # lines were lost or changed; the complete lines are kept
    REBUILT = "rebuilt"  # lines were lost or changed, but the file was rebuilt completely


class Lines:
    """A file that one process appends lines to, with its length and a running digest.

    A change that other code makes to the file is noticed at the next line, by the file's length.

    Args:
        path: the file; if it exists already, call `go_back_to` first, so that its content is counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
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
        """Log a warning if other code changed the file, and remove an incomplete line at its end."""
        with storing(self.path, "read"):
            size = self.path.stat().st_size if self.path.exists() else 0
        if size == self.length:
            return
        found = "deleted" if not self.path.exists() else f"changed from {self.length} to {size} bytes"
        _LOG.warning("%s was %s while the run writes it; the run continues to append to it", self.path, found)
        content = self._content()
        self._keep(content, content[: content.rfind(b"\n") + 1])

    def go_back_to(
        self,
        length: int,
        digest: str | None = None,
        *,
        is_wanted: Callable[[bytes], bool] = lambda line: True,
        rebuilt: Callable[[], bytes | None] = lambda: None,
    ) -> Change:
        """Restore the content that the file had at a checkpoint, as far as possible.

        Args:
            length: the file's length at the checkpoint, in bytes.
            digest: the file's SHA-256 at the checkpoint, None if it is not known.
            is_wanted: whether a line is complete and older than the checkpoint; called if lines were lost or changed.
            rebuilt: returns the content, made from another source, or None; used only if length and digest match.
        """

        def is_it(content: bytes) -> bool:
            return len(content) == length and digest in (None, hashlib.sha256(content).hexdigest())

        content = self._content()
        if is_it(content[:length]):
            self._keep(content, content[:length])
            return Change.NONE
        made = rebuilt() if len(content) != length else None
        if made is not None and is_it(made):
            self._keep(content, made)
            return Change.REBUILT
        kept = [line.removesuffix(b"\n") for line in io.BytesIO(content) if is_wanted(line)]
        self._keep(content, b"".join(line + b"\n" for line in kept))
        return Change.EDITED if len(content) == length else Change.LOST

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
        self.length, self._digest = 0, hashlib.sha256()
        self._count(kept)

    def _count(self, data: bytes) -> None:
        self.length += len(data)
        self._digest.update(data)
