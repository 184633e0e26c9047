"""Folders that are sealed."""

import json
import os
from pathlib import Path

import pytest

from emrun.storage.sealed import damaged_file, describe, json_digest, read_seal, seal


def test_a_file_is_described_by_its_checksum_and_size(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert describe(tmp_path / "a") == {"sha256": expected, "size": 3}


def test_the_digest_of_json_does_not_depend_on_the_order_of_its_keys():
    assert json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1}) != json_digest({"a": 1, "b": 3})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"")
    seal(tmp_path, "facts.json", {"format": 1})
    return tmp_path


def test_a_seal_has_what_is_said_the_files_and_a_checksum_and_is_flushed_last(folder, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    (folder / "facts.json").unlink()
    seal(folder, "facts.json", {"format": 1})
    assert flushed == [folder / "a", folder / "b", folder / "facts.json", folder]
    content = json.loads((folder / "facts.json").read_text())
    assert list(content) == ["format", "files", "sha256"]
    assert content["files"] == {name: describe(folder / name) for name in ("a", "b")}
    found, is_intact = read_seal(folder / "facts.json")
    assert is_intact
    assert found == {"format": 1, "files": content["files"]}
    assert damaged_file(folder, found["files"]) is None


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 2, "sha256": "0"}'])
def test_a_seal_that_was_changed_is_not_intact(folder, text):
    (folder / "facts.json").write_text(text)
    assert not read_seal(folder / "facts.json")[1]


def test_the_first_file_that_is_damaged_is_named_and_whether_it_is_there(folder):
    files = read_seal(folder / "facts.json")[0]["files"]
    (folder / "b").write_bytes(b"x")
    assert damaged_file(folder, files) == ("b", True)
    (folder / "a").unlink()
    assert damaged_file(folder, files) == ("a", False)
