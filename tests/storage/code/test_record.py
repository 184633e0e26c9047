"""The record of the code: when it is written, what a resume adds, and that it never ends a run."""

import errno
import json
import logging
import sys
import threading
from types import ModuleType

import pytest

from emrun.base.censor import Censor
from emrun.storage.code import files
from emrun.storage.code.files import Code, Module
from emrun.storage.code.record import CodeRecord, copy_code
from emrun.storage.files import note_writes


def code_of(problems=(), packages=None, **sources):
    modules = {name: Module(f"/project/{name}.py", source.encode()) for name, source in sources.items()}
    return Code("3.11.2", modules, {"torch": "2.13.0"} if packages is None else packages, problems=list(problems))


def recorded(directory, code, late=None, iterations_done=0, is_gathered=True):
    """Record the code of a run; return the names of the directories of its records."""

    def gather(modules, everything):
        return code if everything else late or Code("3.11.2")

    record = CodeRecord(directory, Censor(), gather, lambda seconds: is_gathered)
    record.begin(iterations_done)
    record.begin(iterations_done)
    sys.modules["late"] = ModuleType("late")
    record.end()
    del sys.modules["late"]
    return sorted(path.name for path in directory.iterdir())


def test_a_run_records_its_code_once(tmp_path, caplog):
    assert recorded(tmp_path, code_of(net="width = 3")) == ["code"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert recorded(tmp_path, code_of(net="width = 3"), iterations_done=50) == ["code"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert caplog.text == ""


def test_what_is_gathered_in_time_is_written_before_the_first_batch_and_complete_when_it_is_flushed(
    tmp_path, monkeypatch
):
    may_flush = threading.Event()
    flush_file = files.flush_file
    monkeypatch.setattr(files, "flush_file", lambda path: (may_flush.wait(60), flush_file(path)))
    record = CodeRecord(tmp_path, Censor(), lambda modules, everything: code_of(net="width = 3"), lambda seconds: True)
    done = []
    record.begin(0)
    record.later(lambda: done.append((tmp_path / "code/record.json").exists()))
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["net.py", "packages.txt"]
    may_flush.set()
    record.end()
    assert done == [True]


def test_what_is_gathered_late_is_written_by_the_thread(tmp_path):
    assert recorded(tmp_path, code_of(net="width = 3"), is_gathered=False) == ["code"]
    assert (tmp_path / "code/record.json").exists()


def test_a_resume_with_other_code_adds_a_record_and_names_what_differs(tmp_path, caplog):
    recorded(tmp_path, code_of(net="width = 3", data=""))
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert recorded(tmp_path, code_of(net="width = 4", data=""), iterations_done=50) == ["code", "code-2"]
    assert {path: path.read_bytes() for path in first} == first
    assert (tmp_path / "code-2/modules/net.py").read_text() == "width = 4"
    assert json.loads((tmp_path / "code-2/record.json").read_text())["iterations_done"] == 50
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        f"the code has changed since the run began or was resumed: module net; see {tmp_path / 'code-2'}"
    )
    assert recorded(tmp_path, code_of(net="width = 4", data="")) == ["code", "code-2"]
    assert recorded(tmp_path, code_of(net="width = 3", data="")) == ["code", "code-2", "code-3"]


def test_values_of_the_environment_are_in_no_record(tmp_path, monkeypatch):
    codes = [code_of(net="token = 'hunter22'"), code_of(late="token = 'hunter22'")]
    record = CodeRecord(tmp_path, Censor([("hunter22", "${env:TOKEN}")]), lambda modules, everything: codes.pop(0))
    record.begin(0)
    monkeypatch.setitem(sys.modules, "late", ModuleType("late"))
    record.end()
    for name in ("net", "late"):
        assert (tmp_path / f"code/modules/{name}.py").read_text() == "token = '${env:TOKEN}'"


def test_packages_that_are_installed_meanwhile_are_not_a_warning(tmp_path, caplog):
    caplog.set_level("INFO")
    recorded(tmp_path, code_of())
    recorded(tmp_path, code_of(packages={"torch": "2.13.0", **{f"p{i}": "1" for i in range(9)}}))
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "p3 is installed, p4 is installed, 4 more; see" in line.getMessage()


def test_modules_that_are_imported_during_the_run_or_after_a_resume_are_added(tmp_path):
    assert recorded(tmp_path, code_of(net=""), late=code_of(late="x = 1")) == ["code"]
    assert recorded(tmp_path, code_of(net="", new="y = 2")) == ["code"]
    assert sorted(path.name for path in (tmp_path / "code/modules").iterdir()) == ["late.py", "net.py", "new.py"]


def test_what_is_missing_is_in_the_record_and_in_one_warning(tmp_path, caplog):
    recorded(tmp_path, code_of(["git took more than 5 seconds", "module x cannot be read"]))
    expected = f"{tmp_path / 'code'} is not complete: git took more than 5 seconds; module x cannot be read"
    assert [line.getMessage() for line in caplog.records] == [expected]
    assert len(json.loads((tmp_path / "code/record.json").read_text())["problems"]) == 2


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_a_record_that_cannot_be_read_is_not_written_over(tmp_path, text):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/record.json").write_text(text)
    assert recorded(tmp_path, code_of()) == ["code", "code-2"]
    assert (tmp_path / "code/record.json").read_text() == text


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
    monkeypatch.setattr("emrun.storage.code.record._LONGEST_WAIT", 0.0)
    answers, is_over = threading.Event(), threading.Event()

    def gather(modules, everything):
        answers.wait(60)
        threading.current_thread().ended = is_over
        return code_of()

    record = CodeRecord(tmp_path, Censor(), gather)
    record.begin(0)
    record.end()
    assert "the file system does not answer" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "emrun-code":
            thread.join(60)
    assert list(tmp_path.rglob("*")) == []  # the run may belong to another process by now


def test_a_foreign_file_in_the_way_is_told_and_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("emrun.storage.files._WRITTEN", {})
    (tmp_path / "code").mkdir()
    (tmp_path / "code/batches.jsonl").write_text("notes")
    note_writes(tmp_path, [])
    record = CodeRecord(tmp_path, Censor(), lambda modules, everything: code_of())
    record.begin(0)
    record.end()
    assert "the code of the run is not recorded completely: the run has not written" in caplog.text
    assert (tmp_path / "code/batches.jsonl").read_text() == "notes"


def test_a_copy_has_the_records_without_temporary_files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    recorded(source, code_of(net="1"))
    recorded(source, code_of(net="2"))
    (source / "code/.record.json.tmp").touch()
    (source / "code-x").mkdir()
    copy_code(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["code", "code-2"]
    assert sorted(path.name for path in (target / "code").iterdir()) == ["modules", "packages.txt", "record.json"]
    assert recorded(target, code_of(net="2")) == ["code", "code-2"]
