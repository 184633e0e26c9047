"""DownloadableDataset: what is downloaded and unpacked, what is refused, and that nothing half is left."""

import contextlib
import functools
import hashlib
import http.server
import io
import os
import ssl
import sys
import tarfile
import threading
import zipfile

import pytest
import trustme

from emrun.base.errors import ArgumentError, DownloadError, MissingExtra, StorageError, StreamError
from emrun.datasets import DownloadableDataset

CONTENT = bytes(range(256)) * 1000
# after an error, pooch leaves the connection to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from the server's `answers`: path -> bytes, or a function of the handler."""

    def do_GET(self):
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path)
        if callable(answer):
            answer(self)
        elif answer is None:
            self.send_error(404, "Not Found")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(monkeypatch, certificate=None):
    """Run a server on this machine, by https if it has a certificate."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            certificate.configure_cert(context)
            found.socket = context.wrap_socket(found.socket, server_side=True)
        found.answers, found.asked, found.released = {}, [], threading.Event()
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.released.set()
        found.shutdown()
        thread.join()


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secure(monkeypatch, authority):
    """Run a server whose certificate is of the authority, which is not trusted yet."""
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    with serving(monkeypatch, authority.issue_cert("127.0.0.1")) as found:
        found.answers["/data.bin"] = CONTENT
        yield found


@pytest.fixture
def offered(server, tmp_path):
    """Offer a file, and return the dataset that downloads it."""

    def offer(content=CONTENT, name="data.bin", answer=None, **arguments):
        server.answers[f"/{name}"] = content if answer is None else answer
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        files = {name: {"url": url, "sha256": arguments.pop("sha256", sha256(content))}}
        return DownloadableDataset(str(tmp_path / "root"), files, **arguments)

    return offer


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


def tar_of(members, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def zip_of(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def special(name, kind, target="/etc/passwd"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_a_file_is_downloaded_once(offered, server, tmp_path):
    dataset = offered()
    with pytest.raises(StreamError, match=r"data\.bin was not downloaded; run `emrun dataset download CONFIG`"):
        dataset.path_of("data.bin")
    path = tmp_path / "root" / "data.bin"
    assert dataset.download() == f"{path}: downloaded"
    assert dataset.path_of("data.bin") == path
    assert path.read_bytes() == CONTENT
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert dataset.download() == f"{path}: already there"
    assert server.asked == ["/data.bin"]
    assert names_in(tmp_path / "root") == ["data.bin"]


@pytest.mark.parametrize("before", [CONTENT[:1000], b"", b"something else"])
def test_half_a_file_is_not_already_there(offered, tmp_path, before):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "data.bin").write_bytes(before)
    assert offered().download().endswith("data.bin: downloaded")
    assert (tmp_path / "root" / "data.bin").read_bytes() == CONTENT


def test_a_broken_connection_leaves_nothing(offered, tmp_path):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[: len(CONTENT) // 2])

    with pytest.raises(DownloadError, match=r"data\.bin cannot be downloaded"):
        offered(answer=answer).download()
    assert names_in(tmp_path / "root") == []


def test_a_broken_connection_that_nobody_notices_leaves_nothing(offered, tmp_path):
    def answer(handler):
        handler.send_response(200)  # without a length, so that the end of the connection is the end of the file
        handler.end_headers()
        handler.wfile.write(CONTENT[: len(CONTENT) // 2])

    with pytest.raises(
        DownloadError, match=r"data\.bin: SHA256 hash .* does not match the known hash: expected sha256:.* Deleted"
    ):
        offered(answer=answer).download()
    assert names_in(tmp_path / "root") == []


def test_a_wrong_checksum_keeps_what_was_there(offered, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "data.bin").write_bytes(b"mine")
    with pytest.raises(DownloadError, match="does not match the known hash"):
        offered(sha256="0" * 64).download()
    assert (tmp_path / "root" / "data.bin").read_bytes() == b"mine"
    assert names_in(tmp_path / "root") == ["data.bin"]


@pytest.mark.parametrize("begins", [False, True])
def test_a_silent_server_is_given_up(offered, server, tmp_path, begins):
    def answer(handler):
        if begins:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b"begin")
            handler.wfile.flush()
        server.released.wait(60)

    with pytest.raises(DownloadError, match=r"cannot be downloaded: (ReadTimeout|ConnectionError)"):
        offered(answer=answer, timeout=0.1).download()
    assert names_in(tmp_path / "root") == []


def test_the_checksum_is_of_the_file_not_of_what_a_server_packs_on_the_way(offered, server):
    def answer(handler):
        handler.send_response(200)
        if "gzip" in handler.headers.get("Accept-Encoding", ""):
            handler.send_header("Content-Encoding", "gzip")  # as some do for files that are packed themselves
        handler.end_headers()
        handler.wfile.write(content)

    content = tar_of(MEMBERS, "w:gz")
    assert offered(content, "data.tgz", answer=answer).download().endswith("downloaded")


def redirect(handler, to):
    handler.send_response(302)
    handler.send_header("Location", to)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def test_a_redirect_is_followed(offered, server):
    server.answers["/there"] = CONTENT
    assert offered(answer=functools.partial(redirect, to="/there")).download().endswith("downloaded")
    assert server.asked == ["/data.bin", "/there"]


@pytest.mark.parametrize("to", ["http://example.com/data", "ftp://example.com/data", "file:///etc/passwd", "//[bad"])
def test_a_redirect_to_anything_but_https_is_refused(offered, server, to):
    with pytest.raises(DownloadError, match=r"which is not https|Invalid IPv6 URL"):
        offered(answer=functools.partial(redirect, to=to)).download()
    assert server.asked == ["/data.bin"]


def by_https(server, folder):
    url = f"https://127.0.0.1:{server.server_port}/data.bin"
    return DownloadableDataset(str(folder), {"data.bin": {"url": url, "sha256": sha256(CONTENT)}})


def test_a_file_comes_by_https_from_a_server_whose_certificate_is_trusted(secure, authority, tmp_path, monkeypatch):
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "authority.pem"))
    by_https(secure, tmp_path / "root").download()
    assert (tmp_path / "root" / "data.bin").read_bytes() == CONTENT


def test_a_server_whose_certificate_is_not_trusted_is_refused(secure, tmp_path):
    with pytest.raises(DownloadError, match="cannot be downloaded: SSLError"):
        by_https(secure, tmp_path / "root").download()
    assert secure.asked == []
    assert names_in(tmp_path / "root") == []


def test_redirects_in_a_circle_end(offered, server):
    with pytest.raises(DownloadError, match="cannot be downloaded: 302 "):
        offered(answer=functools.partial(redirect, to="/data.bin")).download()


def test_a_missing_file_is_reported_without_the_secrets_in_its_address(server, tmp_path):
    url = f"http://me:secret@127.0.0.1:{server.server_port}/no?token=secret"
    dataset = DownloadableDataset(str(tmp_path), {"a": {"url": url, "sha256": "0" * 64}})
    with pytest.raises(DownloadError, match="/no cannot be downloaded: 404 Not Found") as caught:
        dataset.download()
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_exist_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/a"
    with pytest.raises(DownloadError, match="/a cannot be downloaded: ConnectionError"):
        DownloadableDataset(str(tmp_path), {"a": {"url": url, "sha256": "0" * 64}}).download()


def test_a_folder_that_cannot_be_written_is_reported(offered, tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        offered().download()


MEMBERS = [("cats/0.txt", b"cat"), ("cats/deep/1.txt", b""), ("./dogs/2.txt", b"dog" * 1000)]
ARCHIVES = {
    "data.zip": lambda members: zip_of(members),
    "data.tar": lambda members: tar_of(members),
    "data.tar.gz": lambda members: tar_of(members, "w:gz"),
    "data.tgz": lambda members: tar_of(members, "w:gz"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_unpacked_once(offered, server, tmp_path, name):
    dataset = offered(ARCHIVES[name](MEMBERS), name, unpack=True)
    assert dataset.download().endswith(f"{name}: downloaded, unpacked")
    folder = dataset.path_of(name)
    assert folder == tmp_path / "root" / "data"
    assert [(folder / each).read_bytes() for each, _ in MEMBERS] == [content for _, content in MEMBERS]
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"data", name}
    assert folder.stat().st_mode == (tmp_path / "root").stat().st_mode
    (folder / "cats/0.txt").write_text("mine")
    assert dataset.download().endswith(f"{name}: already there")
    assert (folder / "cats/0.txt").read_text() == "mine"
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["Data.ZIP", "Data.TAR", "Data.Tar.GZ"])
def test_the_ending_of_an_archive_may_be_in_capital_letters(offered, tmp_path, name):
    dataset = offered(ARCHIVES[name.lower()](MEMBERS), name, unpack=True)
    assert dataset.download().endswith(f"{name}: downloaded, unpacked")
    assert dataset.path_of(name) == tmp_path / "root" / "Data"
    assert (dataset.path_of(name) / "cats/0.txt").read_bytes() == b"cat"


def test_an_archive_stays_packed_unless_it_is_to_be_unpacked(offered, tmp_path):
    dataset = offered(zip_of(MEMBERS), "data.zip")
    dataset.download()
    assert dataset.path_of("data.zip") == tmp_path / "root" / "data.zip"
    assert names_in(tmp_path / "root") == ["data.zip"]


def test_an_interrupted_unpacking_is_not_taken_for_done(offered, monkeypatch, tmp_path):
    dataset = offered(zip_of(MEMBERS), "data.zip", unpack=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sync", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            dataset.download()
    assert names_in(tmp_path / "root") == ["data.zip"]
    with pytest.raises(StreamError, match=r"data\.zip was not unpacked"):
        dataset.path_of("data.zip")
    assert dataset.download().endswith("already there, unpacked")


@pytest.mark.parametrize("marked", [True, False])
def test_a_folder_that_holds_something_else_is_left_alone(offered, tmp_path, marked):
    dataset = offered(zip_of(MEMBERS), "data.zip", unpack=True)
    if marked:
        dataset.download()
        dataset = offered(zip_of(MEMBERS[:1]), "data.zip", unpack=True)
    else:
        (tmp_path / "root" / "data").mkdir(parents=True)
        (tmp_path / "root" / "data" / "mine.txt").touch()
    before = names_in(tmp_path / "root" / "data")
    with pytest.raises(DownloadError, match=r"root/data was not unpacked from the archive of 'files'; move it away"):
        dataset.download()
    assert names_in(tmp_path / "root" / "data") == before


BAD = {
    "symbolic link": ("data.tar", tar_of([(special("a", tarfile.SYMTYPE), b"")]), "'a' is a link or a device"),
    "hard link": ("data.tar.gz", tar_of([(special("a", tarfile.LNKTYPE), b"")], "w:gz"), "'a' is a link or a device"),
    "pipe": ("data.tar", tar_of([(special("a", tarfile.FIFOTYPE), b"")]), "'a' is a link or a device"),
    "parent": ("data.tar", tar_of([("../b", b"x")]), "outside the destination"),
    "no zip": ("data.zip", b"PK no", "not a zip file"),
    "no tar": ("data.tar", b"x" * 2000, "could not be opened"),
    "gzip cut off": ("data.tgz", tar_of([("a", os.urandom(9999))], "w:gz")[:5000], "ended before the end"),
    "damage in a zip": ("data.zip", zip_of([("a", b"cat" * 9)]).replace(b"a\x4b", b"a\xff", 1), "invalid"),
}


@pytest.mark.parametrize("case", BAD)
def test_archives_that_are_damaged_or_made_to_do_harm_leave_nothing(offered, tmp_path, case):
    name, content, reason = BAD[case]
    with pytest.raises(DownloadError, match=rf"root/{name} cannot be unpacked: .*{reason}"):
        offered(content, name, unpack=True).download()
    assert names_in(tmp_path) == ["root", f"root/{name}"]


@pytest.mark.parametrize("name", ["../../b", "/b"])
def test_a_path_in_a_zip_archive_leads_nowhere_else(offered, tmp_path, name):
    dataset = offered(zip_of([(name, b"x")]), "data.zip", unpack=True)
    dataset.download()
    assert (dataset.path_of("data.zip") / "b").read_bytes() == b"x"
    assert names_in(tmp_path) == ["root", "root/data", "root/data.zip", "root/data/.emrun_sha256", "root/data/b"]


def test_the_command_downloads_for_a_subclass(offered, server, tmp_path, emrun_here):
    url = f"http://127.0.0.1:{server.server_port}/data.bin"
    offered()
    (tmp_path / "my_data.py").write_text(
        "from emrun.datasets import DownloadableDataset\n\n\n"
        "class Flowers(DownloadableDataset):\n"
        "    def train_stream(self):\n"
        "        yield {'x': list(self.path_of('data.bin').read_bytes()[:4])}\n"
    )
    dataset = (
        f"{{class: my_data.Flowers, data_root: data, files: {{data.bin: {{url: '{url}', sha256: {sha256(CONTENT)}}}}}}}"
    )
    (tmp_path / "config.yaml").write_text(f"dataset: {dataset}\n")
    done = emrun_here("dataset", "stream_info", "config.yaml")
    assert done.returncode == 2
    assert "data/data.bin was not downloaded; run `emrun dataset download CONFIG`" in done.stderr
    done = emrun_here("dataset", "download", "config.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "data/data.bin: downloaded\n", f"downloading {url}\n")
    assert emrun_here("dataset", "download", "config.yaml").stdout == "data/data.bin: already there\n"
    assert "0 to 3" in emrun_here("dataset", "stream_info", "config.yaml").stdout


FILE = {"url": "https://example.com/a", "sha256": "0" * 64}


def test_the_folder_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = DownloadableDataset("~/data", {"a.bin": FILE})
    with pytest.raises(StreamError, match=f"^{tmp_path}/data/a.bin was not downloaded"):
        dataset.path_of("a.bin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": {}}, "files: {} is not a mapping"),
        ({"files": ["a"]}, "files: ['a'] is not a mapping"),
        ({"files": {"../a": FILE}}, "files: '../a' is not a file name"),
        ({"files": {"a/b": FILE}}, "files: 'a/b' is not a file name"),
        ({"files": {".a": FILE}}, "files: '.a' is not a file name"),
        ({"files": {"a": {"url": FILE["url"]}}}, "files: 'a' needs the keys url and sha256"),
        ({"files": {"a": {**FILE, "md5": ""}}}, "files: 'a' needs the keys url and sha256"),
        ({"files": {"a": {**FILE, "sha256": "12"}}}, "files: 'a': '12' is not a sha256"),
        (
            {"files": {"a": {**FILE, "url": "http://example.com/a"}}},
            "files: 'a': http://example.com/a is not an address",
        ),
        ({"files": {"a": {**FILE, "url": "http://127.0.0.1.example.com/a"}}}, "files: 'a': http://127.0.0.1.example"),
        (
            {"files": {"a": {**FILE, "url": "http://localhost@example.com/a"}}},
            "files: 'a': http://example.com/a is not",
        ),
        ({"files": {"a": {**FILE, "url": "file:///etc/passwd"}}}, "files: 'a': "),
        ({"files": {"a": {**FILE, "url": "https://"}}}, "files: 'a': "),
        ({"unpack": "yes"}, "unpack: 'yes' is neither true nor false"),
        ({"timeout": 0}, "timeout: must be a positive number of seconds, not 0"),
        ({"timeout": float("inf")}, "timeout: must be a positive number of seconds, not inf"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        DownloadableDataset(**{"data_root": "data", "files": {"a": FILE}, **arguments})
    assert str(caught.value).startswith(message)


def test_a_name_that_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        DownloadableDataset("data", {"a": FILE}).path_of("b")


def test_without_pooch_the_message_has_the_command(offered, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtra, match=r"DownloadableDataset needs pooch.*pip install 'emrun\[download\]'"):
        offered().download()
