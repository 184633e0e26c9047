"""The files of a directory `code`: what is in them, and what counts as a difference."""

import json
from contextlib import suppress

import pytest

from emrun.base.errors import StorageError
from emrun.storage.code.files import FORMAT, Code, changes, module_path, patch_path, read_code, write_code

RECORD = {
    "format": FORMAT,
    "python": "3.11.2, Linux x86_64",
    "repositories": [{"directory": "/project", "commit": "c" * 40, "sha256": "ef" * 32}],
    "modules": {
        "net": {"file": "/project/net.py", "sha256": "cd" * 32},
        "parts": {"file": "/project/parts/__init__.py", "sha256": "12" * 32},
        "parts.fast": {"file": "/project/parts/fast.so", "sha256": "ab" * 32},
        "huge": {"file": "/project/huge.py", "sha256": None},
    },
    "packages": {"mine": "1.0", "torch": "2.13.0"},
    "problems": ["module huge is left out"],
}
FILES = {
    "modules/net.py": b"width = 3\n",
    "modules/parts/__init__.py": b"",
    "diff.patch": b"+width = 3\n",
    "packages.txt": b"mine==1.0\ntorch==2.13.0\n",
}
CODE = Code(RECORD, FILES)


def test_the_files_and_the_record_are_written(tmp_path):
    write_code(tmp_path, CODE)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert json.loads(found.pop("record.json")) == RECORD == read_code(tmp_path)
    assert found == FILES


def test_paths_are_those_from_which_the_modules_can_be_imported():
    files = {"net": "/a/net.py", "parts": "/a/parts/__init__.py", "parts.other": "/a/parts/other.py", "../out": "/b.py"}
    found = [module_path(name, file) for name, file in files.items()]
    assert found == ["modules/net.py", "modules/parts/__init__.py", "modules/parts/other.py", "modules////out.py"]
    assert [patch_path(number) for number in (1, 2)] == ["diff.patch", "diff-2.patch"]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, '{"format": 2}', '{"format": 1, "modules": 3}'], ids=str)
def test_a_record_that_is_damaged_or_of_another_format_is_unknown(tmp_path, text):
    write_code(tmp_path, CODE)
    (tmp_path / "record.json").write_text(text)
    assert read_code(tmp_path) is None


GIT = "other git commits or uncommitted changes"


def repository(**changed):
    return {"repositories": [{**RECORD["repositories"][0], **changed}]}


def modules(**changed):
    return {"modules": {name: {"file": f"/elsewhere/{name}.py", "sha256": sha} for name, sha in changed.items()}}


@pytest.mark.parametrize(
    ("changed", "severe", "others"),
    [
        ({}, [], []),
        (modules(net="34" * 32), ["module net"], []),
        (modules(net=None, huge="56" * 32), [], []),
        (modules(new="56" * 32), [], ["module new is new"]),
        (
            {"packages": {"torch": "2.14.0", "numpy": "2.0"}},
            ["torch 2.13.0 -> 2.14.0"],
            ["mine 1.0 -> none", "numpy none -> 2.0"],
        ),
        ({"python": "3.12.0, Linux x86_64"}, ["Python 3.11.2, Linux x86_64 -> 3.12.0, Linux x86_64"], []),
        *((repository(**each), [], [GIT]) for each in ({"commit": "d" * 40}, {"sha256": "78" * 32})),
        ({"repositories": []}, [], [GIT]),
    ],
)
def test_changes_are_named(changed, severe, others):
    assert changes(RECORD, {**RECORD, **changed}) == (severe, others)


@pytest.mark.parametrize("name", ["", "modules", "modules/parts", "modules/net.py", "packages.txt"])
def test_a_link_is_not_written_through(tmp_path, name):
    outside, code = tmp_path / "outside", tmp_path / "code"
    (code / name).parent.mkdir(parents=True, exist_ok=True)
    if "." in name:
        outside.write_text("mine")
    else:
        outside.mkdir()
    (code / name).symlink_to(outside)
    with suppress(StorageError):
        write_code(code, CODE)
    assert outside.read_text() == "mine" if "." in name else not list(outside.iterdir())


def test_a_run_directory_that_was_removed_does_not_come_back(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*code: No such file or directory"):
        write_code(tmp_path / "run/code", CODE)
    assert not (tmp_path / "run").exists()


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "record.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*record.json: it is not a regular file"):
        read_code(tmp_path)
