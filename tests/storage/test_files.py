"""Files that are complete or absent, and names that are safe."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from emrun.base.errors import StorageError, exit_status
from emrun.storage.files import (
    append_line,
    flush_directory,
    flush_file,
    flush_lines,
    link_atomically,
    make_directory,
    opened_regular,
    read_regular,
    storing,
    truncate,
    write_atomically,
    write_flushed,
    written_aside,
)

LONG = "x" * 100_000


def entries(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def small_files_only():
    """Let writes beyond 50,000 bytes of a file fail halfway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def flushed(monkeypatch):
    """The files and directories that are flushed, in this order."""
    flush_lines()
    found = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return found


def failing(code, calls=None):
    def fail(*arguments):
        if calls is not None:
            calls.append(arguments)
        raise OSError(code, os.strerror(code))

    return fail


# Errors


def test_an_error_of_the_operating_system_says_what_could_not_be_done(tmp_path):
    with pytest.raises(StorageError) as raised, storing(tmp_path, "write"):
        failing(errno.EACCES)()
    assert str(raised.value) == f"cannot write {tmp_path}: Permission denied"
    assert raised.value.errno == errno.EACCES
    assert exit_status(raised.value) == 74
    assert isinstance(raised.value.__cause__, PermissionError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_called_so(tmp_path, code):
    with pytest.raises(StorageError, match=r"cannot write .*: the disk is full") as raised, storing(tmp_path, "write"):
        failing(code)()
    assert raised.value.errno == code


def test_an_error_without_a_number_is_an_input_output_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot read .*: odd") as raised, storing(tmp_path, "read"):
        raise OSError("odd")
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("error", [StorageError(errno.EIO, "inner"), KeyError("x")], ids=repr)
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(type(error)) as raised, storing(tmp_path, "write"):
        raise error
    assert raised.value is error


# Whole files


@pytest.mark.parametrize("text", ["", "a\n", "häß 漢字 😀\n", LONG])
def test_a_file_is_written_as_it_is(tmp_path, text):
    path = tmp_path / "trace.yaml"
    for _ in range(2):
        write_atomically(path, text)
        assert path.read_bytes() == text.encode()
    assert entries(tmp_path) == ["trace.yaml"]


def test_a_file_is_flushed_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    steps = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append(("flush", path.name, path.stat().st_size if path.is_file() else None))
        fsync(descriptor)

    def note_rename(source, target):
        steps.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    write_atomically(tmp_path / "trace.yaml", "text")
    assert steps == [("flush", ".trace.yaml.tmp", 4), ("rename", "trace.yaml"), ("flush", tmp_path.name, None)]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.usefixtures("small_files_only")
def test_a_write_that_fails_midway_leaves_the_old_file_or_none(tmp_path, exists):
    path = tmp_path / "trace.yaml"
    if exists:
        path.write_text("old")
    with pytest.raises(StorageError, match=r"cannot write .*trace.yaml: File too large"):
        write_atomically(path, LONG)
    assert entries(tmp_path) == (["trace.yaml"] if exists else [])
    assert not exists or path.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_write_to_a_disk_that_is_full_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "trace.yaml"
    path.write_text("old")

    def write_to_full_disk(aside, content):
        aside.symlink_to("/dev/full")
        write_flushed(aside, content)

    monkeypatch.setattr("emrun.storage.files.write_flushed", write_to_full_disk)
    with pytest.raises(StorageError, match="the disk is full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert entries(tmp_path) == ["trace.yaml"]


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_step_of_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, function):
    path = tmp_path / "trace.yaml"
    path.write_text("old")
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(errno.ENOSPC, calls))
        with pytest.raises(StorageError, match="the disk is full"):
            write_atomically(path, "new")
    assert len(calls) == 1
    assert path.read_text() == "old"
    assert entries(tmp_path) == ["trace.yaml"]


def test_a_failure_after_the_rename_leaves_the_new_file(tmp_path, monkeypatch):
    path = tmp_path / "trace.yaml"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("emrun.storage.files.flush_directory", failing(errno.EIO))
        with pytest.raises(StorageError):
            write_atomically(path, "new")
    assert path.read_text() == "new"


def test_a_write_works_after_a_process_was_killed_in_the_same_write(tmp_path):
    (tmp_path / ".trace.yaml.tmp").write_text("half of a fi")
    write_atomically(tmp_path / "trace.yaml", "new")
    assert entries(tmp_path) == ["trace.yaml"]


def test_a_process_that_is_killed_in_a_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "trace.yaml"
    path.write_text("old")
    code = (
        "import os, signal, sys, pathlib; from emrun.storage.files import write_atomically\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(pathlib.Path(sys.argv[1]), 'new')"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False, timeout=60).returncode == -9
    assert path.read_text() == "old"


def test_writing_into_a_directory_that_is_gone_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*/gone/trace.yaml: No such file or directory"):
        write_atomically(tmp_path / "gone" / "trace.yaml", "new")


# New files


# Lines


def test_lines_are_appended_at_once_and_flushed_together_with_the_name_of_a_new_file(tmp_path, flushed):
    for line in ("a", "häß"):
        append_line(tmp_path / "metrics.jsonl", line)
    assert (tmp_path / "metrics.jsonl").read_bytes() == "a\nhäß\n".encode()
    assert flushed == []
    flush_lines()
    assert sorted(flushed) == sorted([tmp_path, tmp_path / "metrics.jsonl"])
    append_line(tmp_path / "metrics.jsonl", "c")
    flush_lines()
    flush_lines()
    assert flushed[2:] == [tmp_path / "metrics.jsonl"]


def test_lines_of_a_file_that_was_deleted_need_no_flush(tmp_path, flushed):
    append_line(tmp_path / "gone.csv", "a")
    append_line(tmp_path / "there.csv", "a")
    (tmp_path / "gone.csv").unlink()
    flush_lines()
    assert sorted(flushed) == sorted([tmp_path, tmp_path / "there.csv"])


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_a_process_that_was_killed_left_aside_is_replaced(tmp_path, is_folder):
    left = tmp_path / "left"
    left.mkdir() if is_folder else left.symlink_to("elsewhere")
    with written_aside(tmp_path / "place", left) as aside:
        assert not os.path.lexists(aside)
        aside.mkdir()
    assert entries(tmp_path) == ["place"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_fails_leaves_nothing_aside_and_nothing_in_its_place(tmp_path, is_folder):
    with pytest.raises(KeyboardInterrupt), written_aside(tmp_path / "place") as aside:
        assert aside.parent == tmp_path
        (aside / "sub").mkdir(parents=True) if is_folder else aside.write_text("half")
        raise KeyboardInterrupt
    assert entries(tmp_path) == []


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.usefixtures("small_files_only")
def test_a_line_that_cannot_be_written_whole_is_taken_back(tmp_path, exists):
    path = tmp_path / "metrics.jsonl"
    if exists:
        append_line(path, "first")
    with pytest.raises(StorageError, match=r"cannot write .*metrics.jsonl: File too large"):
        append_line(path, LONG)
    append_line(path, "next")
    assert path.read_text() == ("first\nnext\n" if exists else "next\n")


@pytest.mark.usefixtures("small_files_only")
def test_a_line_that_cannot_be_removed_again_is_reported_with_the_first_reason(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "truncate", fail)
    with pytest.raises(StorageError, match=r"cannot write .*metrics.jsonl: File too large"):
        append_line(tmp_path / "metrics.jsonl", LONG)


def test_lines_that_cannot_be_flushed_are_reported_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_line(path, "first")
    flush_lines()
    append_line(path, "second")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"cannot write .*metrics.jsonl: the disk is full"):
            flush_lines()
        flush_lines()
    assert path.read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("length", "left"), [(0, ""), (6, "first\n"), (13, "first\nsecond\n"), (20, "first\nsecond\n")]
)
def test_a_file_is_cut_and_flushed_when_it_is_longer(tmp_path, flushed, length, left):
    path = tmp_path / "metrics.jsonl"
    path.write_text("first\nsecond\n")
    truncate(path, length)
    assert path.read_text() == left
    assert flushed == ([path] if length < 13 else [])


def test_a_file_that_is_not_there_needs_no_cut(tmp_path):
    truncate(tmp_path / "gone", 5)
    assert entries(tmp_path) == []


# Links


def test_a_link_is_relative_and_replaced(tmp_path):
    for target in ("it-1", "it-2"):
        (tmp_path / target).mkdir()
        link_atomically(tmp_path / "latest", target)
        assert str((tmp_path / "latest").readlink()) == target
        assert (tmp_path / "latest").resolve() == tmp_path / target
    assert entries(tmp_path) == ["it-1", "it-2", "latest"]


@pytest.mark.parametrize("function", ["symlink", "rename"])
def test_a_link_that_cannot_be_moved_stays_where_it_is(tmp_path, monkeypatch, function):
    link_atomically(tmp_path / "latest", "it-1")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"cannot write .*latest: the disk is full"):
            link_atomically(tmp_path / "latest", "it-2")
    assert str((tmp_path / "latest").readlink()) == "it-1"
    assert entries(tmp_path) == ["latest"]


def test_a_link_does_not_replace_a_directory(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        link_atomically(tmp_path / "latest", "it-1")
    assert entries(tmp_path) == ["latest"]


def test_a_link_is_made_after_a_process_was_killed_while_making_it(tmp_path):
    (tmp_path / ".latest.tmp").symlink_to("it-1")
    link_atomically(tmp_path / "latest", "it-2")
    assert str((tmp_path / "latest").readlink()) == "it-2"
    assert entries(tmp_path) == ["latest"]


def test_flushing_what_is_not_there_is_an_error(tmp_path):
    flush_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush_file(tmp_path / "gone")


# Names


def test_a_new_directory_is_flushed_with_those_above_it(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    make_directory(tmp_path / "a" / "b")
    assert flushed == [tmp_path / "a", tmp_path]
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b", exist_ok=True)
    assert len(flushed) == 2


def test_only_a_regular_file_of_a_limited_size_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file", 100) == b"x" * 100
    with opened_regular(tmp_path / "file") as file:
        assert file.read(2) == b"xx"
    for name, message in (
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("none", "No such file"),
        ("link", "a link"),
    ):
        with pytest.raises(StorageError, match=message):
            read_regular(tmp_path / name, 100)
        with pytest.raises(StorageError, match=message), opened_regular(tmp_path / name):
            pass
    with pytest.raises(StorageError, match="it is larger than 99 B"):
        read_regular(tmp_path / "file", 99)
