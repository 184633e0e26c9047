"""Rules for reading the members of tar archives, which may be damaged or malicious."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

_MAX_EXTENDED = 2**14  # bytes of a long name or of extended attributes; tarfile takes the square of them in time
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)
"""The errors that `tarfile` raises for files that are damaged or not tar archives."""


class Member(tarfile.TarInfo):
    """A member that refuses headers for which `tarfile` would read without limit, or take damage for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        """Return the member of a header.

        Raises:
            ValueError: the header is damaged, or has an impossible size.
            HeaderError: the block is not a header, but marks the end of the archive.
        """
        if bytes(buf) == bytes(tarfile.BLOCKSIZE):
            return super().frombuf(buf, encoding, errors)
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise ValueError(f"neither a file nor the end of the archive ({error})") from error
        if found.size < 0 or (found.type in _EXTENDED and found.size > _MAX_EXTENDED):
            raise ValueError(f"a header of type {found.type!r} has an impossible size of {found.size} bytes")
        return found


def is_plain_file(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a file whose content is in the archive in one piece: no link, device or hole."""
    return member.isreg() and not member.issparse()


def members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive one after the other; they do not stay in memory.

    Raises:
        ValueError: a size is negative, or the headers form a cycle.
    """
    offset = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]
        if member.size < 0:
            raise ValueError(f"{member.name!r} has a size of {member.size}")
        if archive.offset <= offset:
            raise ValueError("its headers form a cycle")
        yield member
        offset = archive.offset
