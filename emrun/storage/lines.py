"""Files that grow by lines: a checkpoint knows their length and digest, so that a resume finds what was changed."""

from __future__ import annotations

import enum
import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path

from emrun.storage.files import append_line, storing, truncate, write_atomically

_LOG = logging.getLogger(__name__)


class Change(enum.Enum):
    """What became of a file since a checkpoint."""

    NONE = "none"  # but for later lines, which are cut off
    EDITED = "edited"  # the length is the same, the content is not
    LOST = "lost"  # lines were lost or changed; those that are whole are kept
    REBUILT = "rebuilt"  # likewise, but now the file is what it was


class Lines:
    """A file that one process appends lines to, with its length and a running digest.

    What somebody else does to the file meanwhile is noticed with the next line, by its length.

    Args:
        path: the file; what it holds already counts after `go_back_to`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return self._digest.hexdigest()

    def append(self, line: str) -> None:
        """Append a line, whole or not at all, behind whole lines; see `append_line`."""
        self.look()
        append_line(self.path, line)
        self._count(f"{line}\n".encode())

    def look(self) -> None:
        """Warn of a file that is not as it was left; half a line at its end is cut off."""
        with storing(self.path, "read"):
            size = self.path.stat().st_size if self.path.exists() else 0
        if size == self.length:
            return
        found = "deleted" if not self.path.exists() else f"changed: it had {self.length} bytes and has {size}"
        _LOG.warning("%s was %s while the run writes it; the next line is appended to what is there", self.path, found)
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
        """Bring the file to what it held at a checkpoint, as far as that is possible.

        Args:
            length: its length in bytes then.
            digest: its SHA-256 then, None when that is not known.
            is_wanted: whether a line is whole and of that time; asked where lines were lost or changed.
            rebuilt: makes the content again, if it can; it is used where it has that length and digest.
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
        with storing(self.path, "read"):
            return self.path.read_bytes() if self.path.exists() else b""

    def _keep(self, content: bytes, kept: bytes) -> None:
        """Replace what is there by what is to be kept."""
        if content.startswith(kept):
            truncate(self.path, len(kept))
        elif content != kept:
            write_atomically(self.path, kept)
        self.length, self._digest = 0, hashlib.sha256()
        self._count(kept)

    def _count(self, data: bytes) -> None:
        self.length += len(data)
        self._digest.update(data)
