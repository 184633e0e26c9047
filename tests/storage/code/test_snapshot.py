"""The record of the code: when it is written, and that it never ends a run."""

import errno
import json
import logging
import threading

import pytest

from emrun.storage.code import files
from emrun.storage.code.files import FORMAT, Code, sha256_of
from emrun.storage.code.snapshot import CodeSnapshot


def code_of(problems=(), packages=None, **sources):
    record = {
        "format": FORMAT,
        "python": "3.11.2",
        "repositories": [],
        "modules": {
            name: {"file": f"/project/{name}.py", "sha256": sha256_of(source.encode())}
            for name, source in sources.items()
        },
        "packages": {"torch": "2.13.0"} if packages is None else packages,
        "problems": list(problems),
    }
    return Code(record, {f"modules/{name}.py": source.encode() for name, source in sources.items()})


def recorded(directory, code):
    """Record the code of a run; return the names of the directories of its records."""
    record = CodeSnapshot(directory, lambda: code)
    record.begin()
    record.begin()
    record.end()
    return sorted(path.name for path in directory.iterdir())


def test_a_run_records_its_code_once(tmp_path, caplog):
    assert recorded(tmp_path, code_of(net="width = 3")) == ["code"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert recorded(tmp_path, code_of(net="width = 3")) == ["code"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert caplog.text == ""


def test_tasks_are_done_one_after_another(tmp_path, monkeypatch):
    may_write, done = threading.Event(), []
    write_atomically = files.write_atomically
    monkeypatch.setattr(files, "write_atomically", lambda *each: (may_write.wait(60), write_atomically(*each)))
    record = CodeSnapshot(tmp_path, lambda: (done.append("gathered"), code_of(net="width = 3"))[1])
    record.begin()
    record.later(lambda: done.append((tmp_path / "code/record.json").exists()))
    may_write.set()
    record.end()
    assert done == ["gathered", True]


def test_a_resume_with_other_code_adds_a_record_and_names_what_differs(tmp_path, caplog):
    recorded(tmp_path, code_of(net="width = 3", data=""))
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert recorded(tmp_path, code_of(net="width = 4", data="")) == ["code", "code-2"]
    assert {path: path.read_bytes() for path in first} == first
    assert (tmp_path / "code-2/modules/net.py").read_text() == "width = 4"
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        f"the code has changed since the run began or was resumed: module net; see {tmp_path / 'code-2'}"
    )
    assert recorded(tmp_path, code_of(net="width = 4", data="")) == ["code", "code-2"]
    assert recorded(tmp_path, code_of(net="width = 3", data="")) == ["code", "code-2", "code-3"]


def test_packages_that_are_installed_meanwhile_are_not_a_warning(tmp_path, caplog):
    caplog.set_level("INFO")
    recorded(tmp_path, code_of())
    recorded(tmp_path, code_of(packages={"torch": "2.13.0", **{f"p{i}": "1" for i in range(9)}}))
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "p3 none -> 1, p4 none -> 1, p5 none -> 1" in line.getMessage()


def test_what_is_missing_is_in_the_record_and_in_one_warning(tmp_path, caplog):
    recorded(tmp_path, code_of(["git took more than 5 seconds", "module x cannot be read"]))
    expected = f"{tmp_path / 'code'} is not complete: git took more than 5 seconds, module x cannot be read"
    assert [line.getMessage() for line in caplog.records] == [expected]
    assert len(json.loads((tmp_path / "code/record.json").read_text())["problems"]) == 2


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_a_record_that_cannot_be_read_is_not_written_over(tmp_path, text):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/record.json").write_text(text)
    assert recorded(tmp_path, code_of()) == ["code", "code-2"]
    assert (tmp_path / "code/record.json").read_text() == text


def test_a_record_that_a_killed_process_has_begun_is_written_again(tmp_path):
    recorded(tmp_path, code_of(net="1"))
    (tmp_path / "code/record.json").rename(tmp_path / "code/.record.json.tmp")
    assert recorded(tmp_path, code_of(net="1")) == ["code"]
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["modules", "record.json"]


def test_beside_a_record_that_cannot_be_read_in_time_nothing_is_written(tmp_path, caplog, monkeypatch):
    recorded(tmp_path, code_of(net="1"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def fail(path, *_):
        raise TimeoutError(errno.ETIMEDOUT, "timed out", str(path))

    monkeypatch.setattr("emrun.storage.files._open_regular", fail)
    assert recorded(tmp_path, code_of(net="2")) == ["code"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "is not recorded completely: cannot read" in caplog.text


def test_an_error_is_a_warning(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").symlink_to("elsewhere")
    recorded(tmp_path, code_of())
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert "code is a link, and links in a run are not followed" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_system_that_does_not_answer_ends_neither_the_run_nor_its_wait(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("emrun.storage.code.snapshot._LONGEST_WAIT", 0.0)
    answers, done = threading.Event(), []

    def gather():
        answers.wait(60)
        return code_of()

    record = CodeSnapshot(tmp_path, gather)
    record.begin()
    record.later(lambda: done.append("a batch"))
    record.end()
    assert "the file system does not answer" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "emrun-code":
            thread.join(60)
    assert list(tmp_path.rglob("*")) == done == []  # the run may belong to another process by now
