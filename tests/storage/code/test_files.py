"""The files of a directory `code`: what is in them, and what counts as a difference."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from emrun.base.censor import Censor
from emrun.base.errors import StorageError
from emrun.storage.code.files import (
    Code,
    Module,
    Repository,
    add_modules,
    changes,
    make_code_directory,
    read_code,
    write_code,
)
from emrun.storage.code.record import copy_code
from emrun.storage.files import LIST, listed_files, note_writes

CODE = Code(
    "3.11.2, Linux x86_64",
    {
        "net": Module("/project/net.py", b"width = 3\n"),
        "parts": Module("/project/parts/__init__.py", b""),
        "parts.fast": Module("/project/parts/fast.so", None, "ab" * 32),
        "huge": Module("/project/huge.py", None),
    },
    {"mine": "1.0  # file:///project", "torch": "2.13.0"},
    [Repository("/project", "c" * 40, b"+width = 3\n", ["log/"])],
    ["module huge is left out"],
)


def written(tmp_path, code=CODE):
    write_code(tmp_path, code, 0)()
    return read_code(tmp_path)


def test_the_files_show_sources_patch_and_packages(tmp_path):
    write_code(tmp_path, CODE, 12)()
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "record.json",
        "packages.txt",
        "diff.patch",
        "modules/net.py",
        "modules/parts/__init__.py",
    }
    assert (tmp_path / "modules/net.py").read_bytes() == b"width = 3\n"
    assert (tmp_path / "packages.txt").read_text() == "mine==1.0  # file:///project\ntorch==2.13.0\n"
    content = json.loads((tmp_path / "record.json").read_text())
    assert (content["format"], content["iterations_done"], content["problems"]) == (1, 12, ["module huge is left out"])
    assert content["modules"]["parts.fast"] == {"file": "/project/parts/fast.so", "sha256": "ab" * 32}
    (repository,) = content["repositories"]
    assert (repository["commit"], repository["diff"], repository["untracked"]) == ("c" * 40, "diff.patch", ["log/"])


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, '{"format": 2}', '{"format": 1, "modules": 3}'], ids=str)
def test_a_record_that_is_damaged_or_of_another_format_is_unknown(tmp_path, text):
    write_code(tmp_path, CODE, 0)()
    (tmp_path / "record.json").write_text(text)
    assert read_code(tmp_path) is None


def test_the_same_code_has_no_changes(tmp_path):
    assert changes(written(tmp_path), CODE.record()) == ([], [])


def with_(**changed):
    return Code(**{**{name: getattr(CODE, name) for name in Code.__slots__}, **changed})


@pytest.mark.parametrize(
    ("code", "severe", "others"),
    [
        (with_(modules={"net": Module("/elsewhere/net.py", b"width = 4\n")}), ["module net"], []),
        (with_(modules={"huge": Module("/project/huge.py", b"1"), "new": Module("/n.py", b"")}), [], []),
        (
            with_(packages={"torch": "2.14.0", "numpy": "2.0"}),
            ["torch 2.13.0 -> 2.14.0"],
            ["mine is not installed any more", "numpy is installed"],
        ),
        (with_(python="3.12.0, Linux x86_64"), ["Python 3.11.2, Linux x86_64 -> 3.12.0, Linux x86_64"], []),
        (
            with_(repositories=[Repository("/project", "d" * 40, b"")]),
            [],
            ["git commit cccccccccc -> dddddddddd"],
        ),
        (with_(repositories=[Repository("/project", "c" * 40, b"")]), [], ["uncommitted changes"]),
        (with_(repositories=[Repository("/project", "c" * 40, None)]), [], []),  # git took too long
        (with_(repositories=[Repository("/other", "c" * 40, b"")]), [], ["another git repository"]),
        (with_(repositories=[]), [], []),
    ],
)
def test_changes_are_named(tmp_path, code, severe, others):
    assert changes(written(tmp_path), code.record()) == (severe, others)


def test_modules_that_are_imported_later_are_added(tmp_path):
    before = written(tmp_path)
    late = {"parts.late": Module("/project/parts/late.py", b"x = 1\n"), "net": Module("/project/net.py", b"other")}
    assert add_modules(tmp_path, before, Code("", late, problems=["p", "module huge is left out"])) == ["p"]
    after = read_code(tmp_path)
    assert after["modules"].keys() - before["modules"].keys() == {"parts.late"}
    assert (tmp_path / "modules/parts/late.py").read_bytes() == b"x = 1\n"
    assert after["problems"] == ["module huge is left out", "p"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "cp1251", "utf-16"])
def test_values_of_the_environment_are_replaced_in_any_encoding(tmp_path, encoding):
    value = {"cp1251": "пароль-и-ключ", "utf-16": "just-ascii"}.get(encoding, "Größe-und-Schlüssel")
    source = f"# coding: {encoding}\ntoken = '{value}'\n".encode("utf-8" if encoding == "utf-16" else encoding)
    code = Code(
        "3",
        {"net": Module(f"/{value}/net.py", source)},
        {"mine": f"1  # https://{value}@host"},
        [Repository(f"/{value}", None, f"+token = '{value}'\n".encode(), [f"{value}.txt"])],
        [f"no {value}"],
    ).censored(Censor([(value, "${env:TOKEN}")]))
    write_code(tmp_path, code, 0)()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    for path in files:
        content = path.read_bytes()
        assert b"${env:TOKEN}" in content, path
        assert value.encode(encoding) not in content
        assert value.encode() not in content
        assert json.dumps(value)[1:-1].encode() not in content


def test_a_module_whose_name_is_a_value_of_the_environment_is_left_out():
    code = Code("3", {"hunter22": Module("/hunter22.py", b"")}).censored(Censor([("hunter22", "${env:TOKEN}")]))
    assert code.modules == {}
    assert code.problems == ["the name of the module ${env:TOKEN} contains a value of the environment"]


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").symlink_to("elsewhere")
    with pytest.raises(StorageError, match=r"code is a link"):
        make_code_directory(tmp_path / "code")


@pytest.mark.parametrize("name", ["modules", "modules/parts", "modules/net.py", "packages.txt"])
def test_a_link_in_the_directory_is_not_written_through(tmp_path, name):
    outside, code = tmp_path / "outside", tmp_path / "code"
    (code / name).parent.mkdir(parents=True)
    if "." in name:
        outside.write_text("mine")
    else:
        outside.mkdir()
    (code / name).symlink_to(outside)
    with suppress(StorageError):
        write_code(code, CODE, 0)()
    recorded = {**Code("").record(), "iterations_done": 0}
    with suppress(StorageError):
        add_modules(code, recorded, CODE)
    assert outside.read_text() == "mine" if "." in name else not list(outside.iterdir())


def test_a_run_directory_that_was_removed_does_not_come_back(tmp_path):
    with pytest.raises(StorageError, match=r"cannot create .*code: No such file or directory"):
        make_code_directory(tmp_path / "run/code")
    with pytest.raises(StorageError, match="No such file or directory"):
        write_code(tmp_path / "run/code", CODE, 0)()
    assert not (tmp_path / "run").exists()


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "record.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*record.json: it is not a regular file"):
        read_code(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which file a descriptor is of")
def test_a_run_lists_the_files_on_the_disk_before_they_are_there(tmp_path, monkeypatch):
    run, copy = tmp_path / "run", tmp_path / "copy"
    listed, real = {run: [[]], copy: [[]]}, os.fsync

    def fsync(descriptor):
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == LIST:
            listed[path.parent].append(listed_files(path.parent))
        for place, lists in listed.items():
            there = {each.relative_to(place) for each in place.glob("code/**/*") if each.is_file()}
            assert {each for each in there if each.suffix != ".tmp"} <= {*map(Path, lists[-1])}

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("emrun.storage.files._WRITTEN", {})
    for place in listed:
        place.mkdir()
        note_writes(place, ["config.yaml"])
    make_code_directory(run / "code")
    write_code(run / "code", CODE, 0)()
    copy_code(run, copy)
    assert [len(each) for each in listed[run]] == [
        0,
        1,
        3,
        7,
    ]  # one flush for the record and the batches, one for all other files
    assert [len(each) for each in listed[copy]] == [0, 1, 6]
