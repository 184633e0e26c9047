"""The base class of datasets whose files are downloaded."""

from __future__ import annotations

import importlib
import logging
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from emrun.base.arguments import check_flag, check_seconds, expanded, safe_component
from emrun.base.errors import ArgumentError, DownloadError, StreamError, needing, reason_of
from emrun.dataset import AbstractDataset
from emrun.storage.files import flush_directory, flush_file, storing, written_aside
from emrun.storage.sealed import describe

_LOG = logging.getLogger(__name__)
_ENDINGS = (".tar.gz", ".tgz", ".tar", ".zip")
_MARKER = ".emrun_sha256"  # in a folder that was unpacked completely: a file with the checksum of the archive
_CHUNK = 2**18
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_ALLOWED = re.compile(r"https://[^/]|http://([^/@]*@)?(localhost|127\.0\.0\.1|\[::1\])(:\d+)?/")
_SECRET = re.compile(r"(?<=//)[^/]*@|[?#].*")  # user and password, and the query


class DownloadableDataset(AbstractDataset):
    """The base class for your own datasets whose files are downloaded; the subclass defines the streams.

        dataset:
          class: my_data.Flowers                      # derived from emrun.datasets.DownloadableDataset
          data_root: data/flowers
          unpack: true
          files:
            images.zip:
              url: https://example.com/images.zip
              sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855

    `emrun dataset download CONFIG` downloads the missing files. A subclass may pass `files` to this constructor itself.
    Its streams find a file, or the folder of an unpacked archive, with `self.path_of(name)`. The constructor of the
    subclass must not read the files, because the dataset is built before its files are downloaded.

    A file gets its name only when it is complete and its checksum is right; the checksum of an existing file is
    compared too. The folder of an archive gets its name only when it is complete. A tar archive with links, devices or
    paths that lead out of its folder is refused; in a zip archive, such parts of paths are left out.

    Needs pooch (`pip install 'emrun[download]'`).

    Args:
        data_root: the folder for the files; `~` is the home directory.
        files: file name -> its `url`, https (http only from this machine), and the `sha256` of its content.
        unpack: unpack archives (zip, tar, tar.gz, tgz), each to a folder with its name without the ending.
        timeout: how many seconds to wait for the server to answer or to send more data.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    def __init__(
        self, data_root: str, files: dict[str, dict[str, str]], unpack: bool = False, timeout: float = 30.0
    ) -> None:
        check_flag("unpack", unpack)
        check_seconds("timeout", timeout)
        self._root = expanded(data_root)
        self._files = _checked(files)
        self._unpack = unpack
        self._timeout = timeout

    def download(self) -> str:
        """Download the missing files and unpack archives; return one line per file.

        Raises:
            DownloadError: a server does not send a file, a checksum is wrong, or an archive is refused.
            StorageError: the files cannot be written.
            MissingExtra: pooch is not installed.
        """
        lines = []
        for name, (url, sha256) in self._files.items():
            path = self._root / name
            done = "already there"
            with storing(path, "write"):
                if not path.is_file() or describe(path)["sha256"] != sha256:
                    self._fetch(path, url, sha256)
                    done = "downloaded"
            folder = self._folder_of(path)
            if folder is not None and not _is_unpacked(folder, sha256):
                _unpack(path, folder, sha256)
                done += ", unpacked"
            lines.append(f"{path}: {done}")
        return "\n".join(lines)

    def path_of(self, name: str) -> Path:
        """Return the path of a file of `files`, or of the folder of an unpacked archive.

        Raises:
            KeyError: there is no such name in `files`.
            StreamError: the file was not downloaded or not unpacked.
            DownloadError: the folder of an archive holds something else.
        """
        _, sha256 = self._files[name]
        path = self._root / name
        folder = self._folder_of(path)
        is_there = path.is_file() if folder is None else _is_unpacked(folder, sha256)
        if not is_there:
            done = "unpacked" if path.is_file() else "downloaded"
            raise StreamError(f"{path} was not {done}; run `emrun dataset download CONFIG`", first_batch=True)
        return path if folder is None else folder

    def _folder_of(self, path: Path) -> Path | None:
        """Return the folder that a file is unpacked to: its path without the ending; None if it is not unpacked."""
        for ending in _ENDINGS:
            if self._unpack and path.name.lower().endswith(ending):
                return path.with_name(path.name[: -len(ending)])
        return None

    def _fetch(self, path: Path, url: str, sha256: str) -> None:
        with needing(type(self).__name__, "pooch", "download"):
            pooch = importlib.import_module("pooch")
        requests = importlib.import_module("requests")  # pooch needs it
        pooch.get_logger().setLevel(logging.WARNING)  # its messages are not in a log of emrun
        request = pooch.HTTPDownloader(
            chunk_size=_CHUNK,
            timeout=self._timeout,
            headers={"Accept-Encoding": "identity"},
            hooks={"response": _check_redirect},
        )

        def download(url: str, output: str, _: Any) -> None:
            Path(output).unlink()  # pooch's file is for this user only; a new file follows the umask
            request(url, output, None)

        _LOG.info("downloading %s", _shown(url))
        try:
            pooch.retrieve(url, f"sha256:{sha256}", path.name, self._root, downloader=download)
        except requests.RequestException as error:
            answer = error.response
            reason = type(error).__name__ if answer is None else f"{answer.status_code} {answer.reason}"
            raise DownloadError(f"{_shown(url)} cannot be downloaded: {reason}") from error
        except ValueError as error:  # the checksum is wrong
            raise DownloadError(f"{_shown(url)}: {error}") from error
        flush_file(path)
        flush_directory(self._root)


def _checked(files: object) -> dict[str, tuple[str, str]]:
    """Return file name -> its URL and sha256."""
    if not isinstance(files, Mapping) or not files:
        raise ArgumentError("files", f"{files!r} is not a mapping of file names to url and sha256")
    found = {}
    for name, entry in files.items():
        if not isinstance(name, str) or safe_component("files", name) != name:
            raise ArgumentError("files", f"{name!r} is not a file name; use letters, digits, '.', '_' and '-'")
        if not isinstance(entry, Mapping) or set(entry) != {"url", "sha256"}:
            raise ArgumentError("files", f"{name!r} needs the keys url and sha256, and no others")
        url = str(entry["url"])
        sha256 = str(entry["sha256"]).lower()
        if not _ALLOWED.match(url):
            raise ArgumentError("files", f"{name!r}: {_shown(url)} is not an address that begins with https://")
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ArgumentError("files", f"{name!r}: {sha256!r} is not a sha256, which has 64 hexadecimal digits")
        found[name] = url, sha256
    return found


def _check_redirect(answer: Any, **_: Any) -> None:
    """Check the address to which a server redirects, before it is asked.

    Raises:
        DownloadError: the address does not begin with https://, and is not one of this machine.
    """
    url = urljoin(answer.url, answer.headers.get("location", ""))
    if not _ALLOWED.match(url):
        raise DownloadError(f"{_shown(answer.url)} redirects to {_shown(url)}, which is not https")


def _shown(url: str) -> str:
    return _SECRET.sub("", url)


def _is_unpacked(folder: Path, sha256: str) -> bool:
    """Return whether an archive with this checksum was unpacked to a folder.

    Raises:
        DownloadError: the folder holds something else.
    """
    if not folder.exists():
        return False
    mark = folder / _MARKER
    if not mark.is_file() or mark.read_bytes() != sha256.encode():
        raise DownloadError(f"{folder} was not unpacked from the archive of 'files'; move it away")
    return True


def _unpack(archive: Path, folder: Path, sha256: str) -> None:
    """Unpack an archive to a temporary folder, and rename the folder when it is complete.

    Raises:
        DownloadError: the archive is damaged, or refused.
        StorageError: the folder cannot be written.
    """
    with storing(folder, "write"), written_aside(folder) as aside:
        aside.mkdir()
        try:
            if archive.suffix.lower() == ".zip":
                with zipfile.ZipFile(archive) as members:
                    members.extractall(aside)
            else:
                with tarfile.open(archive) as members:
                    members.extractall(aside, filter=_without_links)
        except _DAMAGE as error:
            raise DownloadError(f"{archive} cannot be unpacked: {reason_of(error)}") from error
        (aside / _MARKER).write_bytes(sha256.encode())
        os.sync()  # one call for all files


def _without_links(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Refuse links and devices: with links, the data filter of Python 3.11.4 to 3.11.12 can be bypassed."""
    if not member.isreg() and not member.isdir():
        raise tarfile.TarError(f"{member.name!r} is a link or a device")
    return tarfile.data_filter(member, folder)
