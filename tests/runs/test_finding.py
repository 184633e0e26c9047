"""Finding runs below a directory."""

import os

import pytest

from emrun.base.errors import StorageError, UsageError
from emrun.runs.finding import find_run, find_runs
from emrun.storage.run import create_evaluation


def names(directory, **options):
    return [str(run.directory.relative_to(directory)) for run in find_runs(directory, **options)]


def test_runs_are_found_by_name_and_below_only_if_asked(make_run, tmp_path):
    for where, name in (("log", "b"), ("log", "a"), ("log/sweep", "c"), ("log/.hidden", "d")):
        make_run(name, where=where)
    (tmp_path / "log" / "project").mkdir()
    (tmp_path / "log" / "project" / "config.yaml").write_text("seed: 1\n")
    assert names(tmp_path / "log") == ["a", "b"]
    assert names(tmp_path / "log", deep=True) == ["a", "b", "sweep/c"]
    assert names(tmp_path / "log" / "a") == ["."]


def test_results_of_evaluations_are_not_runs(make_run, tmp_path):
    run = make_run("a")
    create_evaluation(run.directory / "eval", "valid", "seed: 1\n")
    create_evaluation(tmp_path / "log", "test", "seed: 1\n")
    assert names(tmp_path / "log", deep=True) == ["a"]
    with pytest.raises(UsageError, match=r"is not a run directory: it has no trace\.yaml of a run"):
        find_run(tmp_path / "log" / "test-1")


def test_half_a_run_is_found(make_run, tmp_path):
    (make_run("a").directory / "trace.yaml").unlink()
    (make_run("b").directory / "config.yaml").unlink()
    assert [run.status for run in find_runs(tmp_path / "log")] == ["damaged", "finished"]


def test_links_are_not_followed(make_run, tmp_path):
    make_run("a", where="elsewhere")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "link").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "log" / "circle").symlink_to(tmp_path / "log")
    assert names(tmp_path / "log", deep=True) == []
    assert find_run(tmp_path / "log" / "link").status == "finished"


def test_what_is_not_a_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for name, message in (("file", "is a file"), ("none", "does not exist")):
        with pytest.raises(UsageError, match=message):
            names(tmp_path / name)
        with pytest.raises(UsageError, match=message):
            find_run(tmp_path / name)
    with pytest.raises(UsageError, match="is not a run directory"):
        find_run(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_cannot_be_read_is_damaged(make_run, tmp_path):
    make_run("a").directory.chmod(0)
    try:
        (run,) = find_runs(tmp_path / "log")
        assert run.status == "damaged"
        assert "Permission denied" in run.problems[0]
    finally:
        (tmp_path / "log" / "a").chmod(0o700)


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(StorageError, match=r"cannot read .*: Permission denied"):
        list(find_runs(tmp_path))
