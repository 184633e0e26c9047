"""Tar archives that may be damaged, or made to do harm: the rules for whoever reads or unpacks their members.

`extractall` is not used: its data filter has been passed by (CVE-2025-4517), and Python 3.11.7 has the fault.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

_MAX_EXTENDED = 2**20  # bytes of a long name or of extended attributes, which are read into memory
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)
"""What `tarfile` raises about archives that are none, or damaged."""


class Member(tarfile.TarInfo):
    """A member whose header is refused where `tarfile` would read without bound, or take damage for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        """Return the member of a header.

        Raises:
            ValueError: it is damaged, or its sizes make no sense.
            HeaderError: it is no header but the mark of the end.
        """
        if bytes(buf) == bytes(tarfile.BLOCKSIZE):
            return super().frombuf(buf, encoding, errors)
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise ValueError(f"neither a file nor the end of the archive ({error})") from error
        if found.size < 0 or (found.type in _EXTENDED and found.size > _MAX_EXTENDED):
            raise ValueError(f"a header with {found.size} bytes of {found.type!r} makes no sense")
        return found


def is_plain_file(member: tarfile.TarInfo) -> bool:
    """Tell whether a member is a file whose content lies in the archive in one piece: no link, device or hole."""
    return member.isreg() and not member.issparse()


def members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive one after the other; they do not stay in memory.

    Raises:
        ValueError: a size makes no sense, or the headers run in a circle.
    """
    offset = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]
        if member.size < 0:
            raise ValueError(f"{member.name!r} has a size of {member.size}")
        if archive.offset <= offset:
            raise ValueError("its headers run in a circle")
        yield member
        offset = archive.offset
