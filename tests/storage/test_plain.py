"""The content of a YAML file beside it: it is read while the file has the same text, and never instead of another."""

import os
import signal
from pathlib import Path

import pytest

from emrun.base.errors import StorageError
from emrun.storage.plain import plain_file, plain_of, write_with_plain

TEXT, PLAIN = "a: 1 # one\nb: [x, null]\n", {"a": 1, "b": ["x", None]}


@pytest.fixture
def file(tmp_path):
    write_with_plain(tmp_path / "config.yaml", TEXT, PLAIN)
    return tmp_path / "config.yaml"


def test_the_content_is_read_only_with_the_text_it_was_written_with(file):
    assert file.read_text() == TEXT
    assert plain_of(file, TEXT) == PLAIN
    assert plain_of(file, TEXT.replace("1", "2")) is None


@pytest.mark.parametrize("content", [b"", b"[", b"\xff", b"3", b'["0", {"a": 2}]', b"[]", b"[" * 100_000])
def test_a_damaged_content_is_not_read(file, content):
    plain_file(file).write_bytes(content)
    assert plain_of(file, TEXT) is None
    plain_file(file).unlink()
    assert plain_of(file, TEXT) is None


@pytest.mark.parametrize("plain", [{1: "x"}, {"a": float("nan")}, {"a": {3}}])
def test_what_json_would_change_is_left_to_the_parser(file, plain):
    write_with_plain(file, "other", plain)
    assert file.read_text() == "other"
    assert plain_of(file, "other") is None
    assert not plain_file(file).exists()


def test_the_content_as_it_was_written_outlives_an_edit_and_not_a_newer_file(file):
    file.write_text("edited")
    assert plain_of(file, None) == PLAIN
    file.unlink()
    file.mkdir()
    with pytest.raises(StorageError):
        write_with_plain(file, "newer", {"a": 2})
    assert plain_of(file, None) is None


@pytest.mark.parametrize(("owner", "function", "left"), [(os, "rename", []), (Path, "open", [".config.yaml.json"])])
def test_what_a_process_that_was_killed_in_a_write_leaves_is_replaced_by_the_next(tmp_path, owner, function, left):
    place = tmp_path / "new" / "config.yaml"
    place.parent.mkdir()
    child = os.fork()
    if child == 0:
        real = getattr(owner, function)

        def killed(*arguments, **keywords):
            if function == "open":
                real(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, function, killed)
        write_with_plain(place, TEXT, PLAIN)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [each.name for each in place.parent.glob(".*.json")] == left
    assert plain_of(place, TEXT) is None
    write_with_plain(place, TEXT, PLAIN)
    assert {each.name for each in place.parent.iterdir()} == {"config.yaml", ".config.yaml.json"}
    assert plain_of(place, TEXT) == PLAIN
