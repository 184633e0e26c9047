"""Archives that are unpacked completely or not at all, under strict rules; those for headers of tar are in `_tar`."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from emrun.base.errors import DownloadError, reason_of
from emrun.datasets._tar import DAMAGE, Member, is_plain_file, members_of
from emrun.storage.files import storing, written_aside

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
_MARKER = ".emrun_unpacked.json"
_MAX_FILES = 2**20
_MAX_RATIO = 250  # size of the content to that of the archive; text compresses to a tenth, a bomb to a thousandth
_ALWAYS_ALLOWED = 2**20  # bytes of content; small files of zeros compress well
_CHUNK = 2**20
_DAMAGE = (
    *DAMAGE,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    NotImplementedError,  # a compression method that the library does not support
    RuntimeError,
)


def folder_of(archive: Path) -> Path:
    """Return the folder that an archive is unpacked to: the path of the archive without its ending."""
    ending = next(ending for ending in sorted(ENDINGS, key=len, reverse=True) if archive.name.lower().endswith(ending))
    return archive.with_name(archive.name[: -len(ending)])


def is_unpacked(archive: Path, sha256: str) -> bool:
    """Return whether an archive was unpacked completely.

    Raises:
        DownloadError: the folder exists, but holds something else.
    """
    folder = folder_of(archive)
    try:
        found = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists():
            raise DownloadError(f"{folder} exists, but was not unpacked from {archive.name}; move it away") from None
        return False
    except (OSError, ValueError) as error:
        raise DownloadError(f"{folder / _MARKER} cannot be read: {reason_of(error)}; move {folder} away") from error
    if found != {"sha256": sha256}:
        raise DownloadError(f"{folder} was unpacked from another version of {archive.name}; move it away")
    return True


def unpack(archive: Path, sha256: str, max_bytes: int) -> Path:
    """Unpack an archive to a temporary folder, rename the folder when it is complete, and return its path.

    Args:
        archive: the file; its ending says which kind of archive it is.
        sha256: the checksum of the archive, which is stored in the folder.
        max_bytes: the largest size of the content.

    Raises:
        DownloadError: the archive is damaged, or has something that an archive of data does not need: links, devices,
            absolute paths or paths that lead out of the folder, two files with the same name, too much content.
        StorageError: the folder cannot be written.
    """
    folder = folder_of(archive)
    with storing(folder, "write"), written_aside(folder) as aside:
        aside.mkdir()
        try:
            _Extraction(archive, aside, max_bytes).run()
        except _DAMAGE as error:
            raise DownloadError(f"archive {archive} is damaged and was not unpacked: {reason_of(error)}") from error
        (aside / _MARKER).write_text(json.dumps({"sha256": sha256}), encoding="utf-8")
        os.sync()  # one call for all files
    return folder


class _Extraction:
    def __init__(self, archive: Path, folder: Path, max_bytes: int) -> None:
        self._archive = archive
        self._folder = folder
        self._max_bytes = max_bytes
        self._from_archive = max(_MAX_RATIO * archive.stat().st_size, _ALWAYS_ALLOWED)
        self._written = self._inflated = self._files = 0

    def run(self) -> None:
        members = self._zip_members if self._archive.name.lower().endswith(".zip") else self._tar_members
        for name, content in members():
            self._files += 1
            if self._files > _MAX_FILES:
                raise self._refused(f"it has more than {_MAX_FILES} files")
            self._write(name, self._place(name), content)

    def _zip_members(self) -> Iterator[tuple[str, IO[bytes] | None]]:
        with zipfile.ZipFile(self._archive) as archive:
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise self._refused(f"{member.filename!r} is a link or a device")
                if member.flag_bits & 1:
                    raise self._refused(f"{member.filename!r} is encrypted")
                if member.is_dir():
                    yield member.filename, None
                else:
                    with archive.open(member) as content:
                        yield member.filename, content

    def _tar_members(self) -> Iterator[tuple[str, IO[bytes] | None]]:
        plain = self._archive.name.lower().endswith(".tar")
        with (
            self._archive.open("rb") if plain else gzip.open(self._archive) as file,
            tarfile.open(fileobj=_Watched(file, self._note_inflated), mode="r|", tarinfo=Member) as archive,
        ):
            for member in members_of(archive):
                if not member.isdir() and not is_plain_file(member):
                    raise self._refused(f"{member.name!r} is a link or a device")
                yield member.name, None if member.isdir() else archive.extractfile(member)

    def _place(self, name: str) -> Path:
        parts = [part for part in name.rstrip("/").split("/") if part != "."]
        absolute = name.startswith("/") or re.match(r"[A-Za-z]:", name)
        if absolute or ".." in parts or "" in parts or "\\" in name or "\0" in name or parts[:1] == [_MARKER]:
            raise self._refused(f"{name!r} leads out of the folder")
        return self._folder.joinpath(*parts)

    def _write(self, name: str, path: Path, content: IO[bytes] | None) -> None:
        try:
            (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if content is None:
                return
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise self._refused(f"{name!r} is at the place of another file") from error
        with file:
            while chunk := content.read(_CHUNK):
                self._written += len(chunk)
                if self._written > self._max_bytes:
                    raise self._refused(f"its content has more than {self._max_bytes} bytes (max_bytes)")
                if self._written > self._from_archive:
                    raise self._too_dense()
                file.write(chunk)

    def _note_inflated(self, count: int) -> None:
        self._inflated += count
        if self._inflated > self._from_archive:
            raise self._too_dense()

    def _too_dense(self) -> DownloadError:
        return self._refused(f"its content has more than {_MAX_RATIO} times its size")

    def _refused(self, reason: str) -> DownloadError:
        return DownloadError(f"archive {self._archive} is refused and was not unpacked: {reason}")


class _Watched(io.RawIOBase):
    """A file that reports how many bytes are read from it."""

    def __init__(self, file: Any, note: Any) -> None:
        self._file = file
        self._note = note

    def read(self, size: int = -1) -> bytes:
        found: bytes = self._file.read(size)
        self._note(len(found))
        return found
