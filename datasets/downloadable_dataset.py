"""A base of datasets whose files are downloaded."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from emrun.arguments import check_count, check_flag, expanded, safe_component
from emrun.dataset import AbstractDataset
from emrun.datasets._archives import ENDINGS, folder_of, is_unpacked, unpack
from emrun.errors import ArgumentError, DownloadError, MissingExtra, StreamError
from emrun.storage.files import flush_directory, flush_file, storing
from emrun.storage.sealed import describe
from emrun.wording import listed

_LOG = logging.getLogger(__name__)
_MAX_REDIRECTS = 5
_CHUNK = 2**18


class _File(NamedTuple):
    url: str
    sha256: str


class DownloadableDataset(AbstractDataset):
    """The base of a dataset of yours whose files are downloaded; it has no streams itself.

        dataset:
          class: my_data.Flowers                      # derived from emrun.datasets.DownloadableDataset
          data_root: data/flowers
          unpack: true
          files:
            images.zip:
              url: https://example.com/images.zip
              sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855

    `emrun dataset download CONFIG` downloads what is not there yet. A subclass may give `files` itself; its streams
    find a file, or the folder that an archive was unpacked to, by `self.path_of(name)`. Its constructor must not need
    the files, because nothing could be downloaded then.

    A file is written aside and gets its name when its checksum is right; one that is there is checked too. An archive
    with links, devices, paths that lead out of its folder or far more content than its size is refused. What is
    unpacked gets its name when it is complete; files that are left of an interrupted attempt begin with `tmp` or a dot.

    Needs pooch (`pip install 'emrun[download]'`).

    Args:
        data_root: the folder of the files; `~` is the home directory.
        files: name of each file -> its `url`, https (http only from this machine), and the `sha256` of its content.
        unpack: unpack archives (zip, tar, tar.gz, tgz), each to a folder of its name without the ending.
        max_bytes: a download that is larger is given up, and so is an archive out of which more comes.
        timeout: how many seconds a server may take to answer, or to go on.

    Raises:
        ArgumentError: an argument is wrong.
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
            raise ArgumentError("timeout", f"{timeout!r} is no number of seconds above 0")
        self._root = expanded(data_root)
        self._files = _checked(files)
        self._unpack = unpack
        self._check_folders()
        self._max_bytes = max_bytes
        self._timeout = timeout

    def download(self) -> str:
        """Download the files that are not there, and unpack archives; return a line for each.

        Raises:
            DownloadError: a server does not give a file, or not the right one, or an archive is refused.
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
        """Return a file of `files`, or the folder that it was unpacked to.

        Raises:
            KeyError: there is no such name in `files`.
            StreamError: it was not downloaded, or not unpacked.
            DownloadError: the folder of an archive holds something else.
        """
        file = self._files[name]
        path = self._root / name
        is_there = is_unpacked(path, file.sha256) if self._is_archive(name) else path.is_file()
        if not is_there:
            done = "unpacked" if path.is_file() else "downloaded"
            raise StreamError(f"{path} was not {done}; `emrun dataset download CONFIG` does it", first_batch=True)
        return folder_of(path) if self._is_archive(name) else path

    def _is_archive(self, name: str) -> bool:
        return self._unpack and name.lower().endswith(ENDINGS)

    def _check_folders(self) -> None:
        """Raise ArgumentError if an archive is unpacked to where another file or folder of `files` is."""
        taken = {name.lower(): name for name in self._files}
        for name in filter(self._is_archive, self._files):
            folder = folder_of(Path(name)).name
            other = taken.setdefault(folder.lower(), name)
            if other != name:
                raise ArgumentError(
                    "files", f"{name!r} is unpacked to the folder {folder!r}, where {other!r} is too; rename one"
                )

    def _fetch(self, name: str, file: _File) -> None:
        try:
            pooch = importlib.import_module("pooch")
        except ImportError as error:
            raise MissingExtra(type(self).__name__, "pooch", "download") from error
        _LOG.info("downloading %s", _shown(file.url))
        try:
            with _quiet(pooch.get_logger()):
                found = pooch.retrieve(
                    file.url, f"sha256:{file.sha256}", fname=name, path=self._root, downloader=self._download_to
                )
        except ValueError as error:
            raise DownloadError(f"{_shown(file.url)} does not have the sha256 of 'files'; it is not kept") from error
        flush_file(Path(found))
        flush_directory(self._root)

    def _download_to(self, url: str, output: str, _: Any) -> None:
        """Write what a server gives to a file, which pooch renames when its checksum is right."""
        requests = importlib.import_module("requests")
        shown = _shown(url)
        Path(output).unlink(missing_ok=True)  # pooch makes it for this user alone; a new one is for whom the umask lets
        try:
            with requests.Session() as session, Path(output).open("xb") as file:
                size = 0
                for chunk in self._chunks(session, url):
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise DownloadError(f"{shown} has more than {self._max_bytes} bytes (max_bytes)")
                    file.write(chunk)
        except requests.Timeout as error:
            raise DownloadError(f"{shown}: the server was silent for {self._timeout:g} seconds (timeout)") from error
        except requests.exceptions.SSLError as error:
            raise DownloadError(
                f"{shown}: the connection is not safe, the server's certificate was not accepted; if you trust it, let "
                "the environment variable REQUESTS_CA_BUNDLE name the file of its authority"
            ) from error
        except requests.RequestException as error:
            raise DownloadError(f"{shown} cannot be downloaded: {type(error).__name__}") from error
        except ValueError as error:
            raise DownloadError(f"{shown}: the server's answer makes no sense: {error}") from error

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
                        raise DownloadError(f"{_shown(begin)} leads to {_shown(url)}, which is not https")
                    continue
                if answer.status_code != 200:
                    raise DownloadError(f"{_shown(url)}: the server says {answer.status_code} {answer.reason}")
                if int(answer.headers.get("content-length", "0")) > self._max_bytes:
                    raise DownloadError(f"{_shown(url)} has more than {self._max_bytes} bytes (max_bytes)")
                yield from answer.iter_content(_CHUNK)
                return
        raise DownloadError(f"{_shown(begin)} leads on more than {_MAX_REDIRECTS} times")


def _checked(files: object) -> dict[str, _File]:
    if not isinstance(files, Mapping) or not files:
        raise ArgumentError("files", f"{files!r} is no mapping of names to url and sha256")
    found = {}
    for name, entry in files.items():
        if not isinstance(name, str) or safe_component("files", name) != name:
            raise ArgumentError("files", f"{name!r} cannot name a file: letters, digits, '_', '-' and '.' can")
        if not isinstance(entry, Mapping) or set(entry) != {"url", "sha256"}:
            raise ArgumentError("files", f"{name!r} needs url and sha256, and nothing else")
        url, sha256 = str(entry["url"]), str(entry["sha256"]).lower()
        if not _is_allowed(url):
            raise ArgumentError("files", f"{name!r}: {_shown(url)} is no address that begins with https://")
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ArgumentError("files", f"{name!r}: {sha256!r} is no sha256, which has 64 digits from 0 to f")
        found[name] = _File(url, sha256)
    folded = [name.lower() for name in found]
    if len(set(folded)) < len(folded):
        raise ArgumentError("files", f"{listed([*found])} differ in capital letters only")
    return found


def _is_https(url: str) -> bool:
    return urlsplit(url).scheme == "https"


def _is_allowed(url: str) -> bool:
    """Tell whether a file may come from an address: by https, or by http from this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(host)
    return parts.scheme == "http" and host is not None and _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(url: str) -> str:
    """Return an address without what may be secret: user, password, query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "its url"  # which may hold a password, so it is not shown
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else repr(url)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
