"""Removing runs or parts of them: only what was shown, and never a run that is in use or what is not a run."""

import json
import os
import shutil
from pathlib import Path

import pytest

from emrun.errors import RunInUse, StorageError, UsageError
from emrun.runs import pruning
from emrun.runs.columns import column, rows_of
from emrun.runs.pruning import Removal, better, without_best
from emrun.runs.search import find_runs
from emrun.runs.stored_run import StoredRun, size_below
from emrun.storage import checkpoints
from emrun.storage.lock import RunLock
from emrun.storage.manifest import STATE, TO_RESUME, TRAINED, check_resumable, verify
from emrun.storage.state_file import FILE as STATE_FILE


@pytest.fixture
def directory(make_run):
    """Return the directory of a run with two checkpoints and files of hooks."""
    place = make_run("a", (0.1, 0.7)).directory

    def save(folder):
        for name in ("model.safetensors", STATE, TRAINED):
            (folder / name).write_bytes(b"x" * 1000)

    for iteration, name in ((10, "best"), (20, "latest")):
        checkpoints.commit(place / "checkpoints", save, epoch=1, iteration=iteration, names=[name])
    (place / "plots").mkdir()
    (place / "plots" / "a.png").write_bytes(b"png")
    return place


def test_a_whole_run_is_removed(directory):
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.size == size_below(directory)
    assert removal.refusal() is None
    removal.carry_out()
    assert not directory.exists()
    assert directory.parent.is_dir()


def test_only_the_checkpoints_are_removed(directory):
    removal = Removal.of(StoredRun(directory), "checkpoints")
    assert 6000 < removal.size < size_below(directory)
    removal.carry_out()
    assert not (directory / "checkpoints").exists()
    assert StoredRun(directory).status == "finished"
    assert Removal.of(StoredRun(directory), "checkpoints").size == 0


def test_without_optimizer_states_checkpoints_are_intact_but_not_resumable(directory):
    removal = Removal.of(StoredRun(directory), "optimizer states")
    assert removal.size == 4000
    removal.carry_out()
    for name in ("best", "latest"):
        place = checkpoints.find(directory / "checkpoints", name)
        assert list(verify(place).files) == ["model.safetensors"]
        with pytest.raises(UsageError, match=r"has no state\.pt, so that it cannot be resumed"):
            check_resumable(place)
    assert Removal.of(StoredRun(directory), "optimizer states").size == 0
    assert TO_RESUME[0] == STATE_FILE


def test_what_an_interrupt_leaves_is_removed_the_next_time(directory, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    for what, name in (("checkpoints", "rmtree"), ("runs", "rmtree")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shutil, name, stop)
            Removal.of(StoredRun(directory), what).carry_out()
        assert StoredRun(directory).status == "finished"  # it is still a run
    removal = Removal.of(StoredRun(directory), "checkpoints")
    assert removal.size > 6000
    removal.carry_out()
    Removal.of(StoredRun(directory), "runs").carry_out()
    assert not directory.exists()


def test_a_manifest_is_changed_before_its_files_go(directory, monkeypatch):
    def fail(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    places = [path for path in (directory / "checkpoints").iterdir() if not path.is_symlink()]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(StorageError, match="cannot remove files of"):
            Removal.of(StoredRun(directory), "optimizer states").carry_out()
    (place,) = (each for each in places if list(verify(each).files) == ["model.safetensors"])
    assert (place / STATE).exists()
    Removal.of(StoredRun(directory), "optimizer states").carry_out()
    assert not any((each / STATE).exists() for each in places)


def test_a_checkpoint_of_a_newer_emrun_is_left_alone(directory):
    place = checkpoints.find(directory / "checkpoints", "best")
    content = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**content, "format": 2}))
    with pytest.raises(StorageError, match="is newer than this emrun supports"):
        Removal.of(StoredRun(directory), "optimizer states").carry_out()
    assert (place / STATE).exists()


def test_a_run_that_is_in_use_is_refused(make_run):
    run = make_run("a", (0.1,), status="running")
    removal = Removal.of(StoredRun(run.directory), "runs")
    assert removal.refusal() == f"is in use by process {os.getpid()}"
    with pytest.raises(RunInUse):
        removal.carry_out()
    run.release()


def test_a_finished_run_that_is_being_resumed_is_refused(directory):
    lock = RunLock(directory)
    assert Removal.of(StoredRun(directory), "runs").refusal() == f"is in use by process {os.getpid()}"
    lock.release()


def test_a_run_that_a_process_of_another_host_has_not_released_is_refused(make_run):
    directory = make_run("a", (0.1,), status="killed").directory
    (directory / ".owner.json").write_text(json.dumps({"pid": 12, "started": 1, "host": "elsewhere"}))
    assert "may be in use by process 12 on elsewhere" in Removal.of(StoredRun(directory), "runs").refusal()


def test_a_run_that_has_changed_since_it_was_shown_is_left_alone(directory):
    removal = Removal.of(StoredRun(directory), "runs")
    _ = removal.run.trace
    (directory / "trace.yaml").write_text("status: interrupted\nseed: 1\n")
    with pytest.raises(UsageError, match="has changed since it was shown"):
        removal.carry_out()
    assert (directory / "checkpoints").is_dir()


def test_a_link_and_a_damaged_run_are_refused(directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    assert "is a link" in Removal.of(StoredRun(tmp_path / "link"), "runs").refusal()
    (directory / "trace.yaml").write_text("")
    assert "is damaged" in Removal.of(StoredRun(directory), "runs").refusal()


def test_links_in_a_run_are_removed_and_not_followed(directory, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("kept")
    (directory / "data").symlink_to(tmp_path / "data")
    (directory / "plots" / "more").symlink_to(tmp_path / "data")
    Removal.of(StoredRun(directory), "runs").carry_out()
    assert not directory.exists()
    assert (tmp_path / "data" / "kept").read_text() == "kept"


def test_checkpoints_behind_a_link_are_refused(directory, tmp_path):
    (directory / "checkpoints").rename(tmp_path / "elsewhere")
    (directory / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert "links are not followed" in Removal.of(StoredRun(directory), "checkpoints").refusal()


@pytest.mark.parametrize(("make", "found"), [
    (lambda place: (place / "my_model.py").write_text(""), "my_model.py"),
    (lambda place: (place / ".git").mkdir(), ".git"),
    (lambda place: shutil.copytree(place.parent / "b", place / "more" / "b"), "another run, more/b"),
    (lambda place: os.chdir(place / "plots"), "the current directory"),
])  # fmt: skip
def test_a_directory_that_is_more_than_a_run_is_refused(directory, make_run, monkeypatch, make, found):
    make_run("b")
    monkeypatch.chdir(Path.cwd())
    make(directory)
    assert f"it has {found}; remove it by hand" in Removal.of(StoredRun(directory), "runs").refusal()
    assert Removal.of(StoredRun(directory), "checkpoints").refusal() is None


def test_the_best_runs_are_left_out(make_run, tmp_path):
    for name, accuracy in (("a", 0.5), ("b", 0.9), ("c", 0.7), ("d", float("nan"))):
        make_run(name, (accuracy,))
    rows = rows_of(find_runs(tmp_path / "log"), tmp_path / "log", [column("best"), column("valid/loss")])
    assert [row.name for row in without_best(rows, 2, column("best"), better(rows, None)[1])] == ["a", "d"]
    assert [row.name for row in without_best(rows, 1, column("min:valid/loss"), "min")] == ["a", "c", "d"]
    assert better(rows, "valid/accuracy") == ("valid/accuracy/mean", "max")
    assert better(rows, "max:valid/loss") == ("valid/loss", "max")
    for by, message in (("valid/loss", "which value is better"), ("epochs", "'epochs' is not a statistic")):
        with pytest.raises(UsageError, match=message):
            better(rows, by)
    make_run("e", config="seed: 1\n")
    with pytest.raises(UsageError, match="the runs have different statistics"):
        better(rows_of(find_runs(tmp_path / "log"), tmp_path / "log", []), None)


def test_what_is_raised_about_one_run_does_not_stop_the_others():
    assert {RunInUse, StorageError, UsageError} <= set(pruning.ERRORS)
