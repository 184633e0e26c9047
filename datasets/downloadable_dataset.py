"""The base class of datasets whose files are downloaded."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from emrun.base.arguments import check_count, check_flag, expanded, safe_component
from emrun.base.errors import ArgumentError, DownloadError, StreamError, needing
from emrun.base.wording import listed
from emrun.dataset import AbstractDataset
from emrun.datasets._archives import ENDINGS, folder_of, is_unpacked, unpack
from emrun.storage.files import flush_directory, flush_file, storing
from emrun.storage.sealed import describe

_LOG = logging.getLogger(__name__)
_MAX_REDIRECTS = 5
_CHUNK = 2**18


class _File(NamedTuple):
    url: str
    sha256: str


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
    compared too. An archive is refused if it has links, devices, paths that lead out of its folder, or far more content
    than its size. The folder of an archive gets its name only when it is complete. Files that remain from an
    interrupted attempt begin with `tmp` or a dot.

    Needs pooch (`pip install 'emrun[download]'`).

    Args:
        data_root: the folder for the files; `~` is the home directory.
        files: file name -> its `url`, https (http only from this machine), and the `sha256` of its content.
        unpack: unpack archives (zip, tar, tar.gz, tgz), each to a folder with its name without the ending.
        max_bytes: the largest size of a download and of the content of an archive, in bytes.
        timeout: how many seconds to wait for the server to answer or to send more data.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        data_root: str,
        files: dict[str, dict[str, str]],
        unpack: bool = False,
        max_bytes: int = 64_000_000_000,
        timeout: float = 30.0,
    ) -> None:
        check_flag("unpack", unpack)
        check_count("max_bytes", max_bytes, minimum=1)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
            raise ArgumentError("timeout", f"must be a positive number of seconds, not {timeout!r}")
        self._root = expanded(data_root)
        self._files = _checked(files)
        self._unpack = unpack
        self._check_folders()
        self._max_bytes = max_bytes
        self._timeout = timeout

    def download(self) -> str:
        """Download the missing files and unpack archives; return one line per file.

        Raises:
            DownloadError: a server does not send a file, a checksum is wrong, or an archive is refused.
            StorageError: the files cannot be written.
            MissingExtra: pooch is not installed.
        """
        lines = []
        for name, file in self._files.items():
            path = self._root / name
            with storing(path, "write"):
                self._root.mkdir(parents=True, exist_ok=True)
                is_there = path.is_file() and describe(path)["sha256"] == file.sha256
                if not is_there:
                    self._fetch(name, file)
            words = ["already there" if is_there else "downloaded"]
            if self._is_archive(name) and not is_unpacked(path, file.sha256):
                unpack(path, file.sha256, self._max_bytes)
                words.append("unpacked")
            lines.append(f"{path}: {', '.join(words)}")
        return "\n".join(lines)

    def path_of(self, name: str) -> Path:
        """Return the path of a file of `files`, or of the folder of an unpacked archive.

        Raises:
            KeyError: there is no such name in `files`.
            StreamError: the file was not downloaded or not unpacked.
            DownloadError: the folder of an archive holds something else.
        """
        file = self._files[name]
        path = self._root / name
        is_there = is_unpacked(path, file.sha256) if self._is_archive(name) else path.is_file()
        if not is_there:
            done = "unpacked" if path.is_file() else "downloaded"
            raise StreamError(f"{path} was not {done}; run `emrun dataset download CONFIG`", first_batch=True)
        return folder_of(path) if self._is_archive(name) else path

    def _is_archive(self, name: str) -> bool:
        return self._unpack and name.lower().endswith(ENDINGS)

    def _check_folders(self) -> None:
        """Raise ArgumentError if an archive would be unpacked to the place of another file or folder of `files`."""
        taken = {name.lower(): name for name in self._files}
        for name in filter(self._is_archive, self._files):
            folder = folder_of(Path(name)).name
            other = taken.setdefault(folder.lower(), name)
            if other != name:
                raise ArgumentError(
                    "files", f"{name!r} is unpacked to {folder!r}, which is also the place of {other!r}; rename one"
                )

    def _fetch(self, name: str, file: _File) -> None:
        with needing(type(self).__name__, "pooch", "download"):
            pooch = importlib.import_module("pooch")
        pooch.get_logger().setLevel(logging.WARNING)  # its messages are not in a log of emrun
        _LOG.info("downloading %s", _shown(file.url))
        try:
            found = pooch.retrieve(
                file.url, f"sha256:{file.sha256}", fname=name, path=self._root, downloader=self._download_to
            )
        except ValueError as error:
            raise DownloadError(
                f"{_shown(file.url)} does not have the sha256 of 'files'; the download was deleted"
            ) from error
        flush_file(Path(found))
        flush_directory(self._root)

    def _download_to(self, url: str, output: str, _: Any) -> None:
        """Download to a file, which pooch renames if its checksum is right."""
        requests = importlib.import_module("requests")
        shown = _shown(url)
        Path(output).unlink(missing_ok=True)  # pooch's file is for this user only; a new file follows the umask
        try:
            with requests.Session() as session, Path(output).open("xb") as file:
                size = 0
                for chunk in self._chunks(session, url):
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise DownloadError(f"{shown} has more than {self._max_bytes} bytes (max_bytes)")
                    file.write(chunk)
        except requests.Timeout as error:
            raise DownloadError(f"{shown}: the server sent nothing for {self._timeout:g} seconds (timeout)") from error
        except requests.exceptions.SSLError as error:
            raise DownloadError(
                f"{shown}: the server's certificate was not accepted; if you trust the server, set the environment "
                "variable REQUESTS_CA_BUNDLE to the file of its certificate authority"
            ) from error
        except requests.RequestException as error:
            raise DownloadError(f"{shown} cannot be downloaded: {type(error).__name__}") from error
        except ValueError as error:
            raise DownloadError(f"{shown}: the server's answer is not valid: {error}") from error

    def _chunks(self, session: Any, url: str) -> Iterator[bytes]:
        begin = url
        for _ in range(_MAX_REDIRECTS + 1):
            with session.get(
                url,
                stream=True,
                allow_redirects=False,
                timeout=self._timeout,
                headers={"Accept-Encoding": "identity"},
            ) as answer:
                if answer.is_redirect:
                    url = urljoin(url, answer.headers["location"])
                    if not _is_allowed(url) or (_is_https(begin) and not _is_https(url)):
                        raise DownloadError(f"{_shown(begin)} redirects to {_shown(url)}, which is not https")
                    continue
                if answer.status_code != 200:
                    raise DownloadError(f"{_shown(url)}: the server answered {answer.status_code} {answer.reason}")
                yield from answer.iter_content(_CHUNK)
                return
        raise DownloadError(f"{_shown(begin)} redirects more than {_MAX_REDIRECTS} times")


def _checked(files: object) -> dict[str, _File]:
    if not isinstance(files, Mapping) or not files:
        raise ArgumentError("files", f"{files!r} is not a mapping of file names to url and sha256")
    found = {}
    for name, entry in files.items():
        if not isinstance(name, str) or safe_component("files", name) != name:
            raise ArgumentError("files", f"{name!r} is not a file name; use letters, digits, '.', '_' and '-'")
        if not isinstance(entry, Mapping) or set(entry) != {"url", "sha256"}:
            raise ArgumentError("files", f"{name!r} needs the keys url and sha256, and no others")
        url, sha256 = str(entry["url"]), str(entry["sha256"]).lower()
        if not _is_allowed(url):
            raise ArgumentError("files", f"{name!r}: {_shown(url)} is not an address that begins with https://")
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ArgumentError("files", f"{name!r}: {sha256!r} is not a sha256, which has 64 hexadecimal digits")
        found[name] = _File(url, sha256)
    folded = [name.lower() for name in found]
    if len(set(folded)) < len(folded):
        raise ArgumentError("files", f"two of the names {listed([*found])} differ only in capital letters; rename one")
    return found


def _is_https(url: str) -> bool:
    return urlsplit(url).scheme == "https"


def _is_allowed(url: str) -> bool:
    """Return whether a file may be downloaded from an address: by https, or by http from this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(host)
    return parts.scheme == "http" and host in ("localhost", "127.0.0.1", "::1")


def _shown(url: str) -> str:
    """Return an address without the parts that may be secret: user, password, query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "its url"  # not shown, because it may contain a password
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else repr(url)
