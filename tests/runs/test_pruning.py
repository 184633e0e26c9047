"""Removing runs or parts of them: only what was shown, and never a run that is in use or what is not a run."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from campaign import thinned
from storage.committing import tree

from emrun.base.errors import RunInUse, StorageError, UsageError
from emrun.runs import pruning, run_files
from emrun.runs.columns import column, rows_of
from emrun.runs.finding import find_runs
from emrun.runs.pruning import Removal, better, without_best
from emrun.runs.stored_run import StoredRun, size_below
from emrun.storage.checkpoints import commits, finding
from emrun.storage.checkpoints.manifest import STATE, TRAINED, check_resumable, files_to_resume, verify
from emrun.storage.checkpoints.state_file import FILE as STATE_FILE
from emrun.storage.files import write_atomically
from emrun.storage.lock import RunLock


@pytest.fixture
def directory(make_run):
    """Return the directory of a run with two checkpoints and files of hooks."""
    place = make_run("a", (0.1, 0.7), files=("training.csv", "tensorboard/", "plots_*/a.png", "wandb/")).directory

    def save(folder):
        for name in ("model.safetensors", STATE, TRAINED):
            (folder / name).write_bytes(b"x" * 1000)

    for iteration, name in ((10, "best"), (20, "latest")):
        commits.commit(place / "checkpoints", save, epoch=1, iteration=iteration, names=[name])
    write_atomically(place / "training.csv", "epoch")
    return place


def test_a_run_whose_process_has_ended_since_it_was_read_stays(directory):
    run = StoredRun(directory)
    run.status = "running"  # as it was read while the process lived
    assert Removal.of(run, "runs").refusal() == "is in use by a process that has just ended"


def test_a_whole_run_is_removed(directory):
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.size == size_below(directory) - (directory / ".lock").stat().st_size
    assert (removal.refusal(), removal.others) == (None, [])
    removal.carry_out()
    assert not directory.exists()
    assert directory.parent.is_dir()


def test_what_a_process_that_was_killed_in_a_write_has_left_goes_with_the_run(directory):
    (directory / "code" / "modules").mkdir(parents=True)
    code = ("code/packages.txt", "code/modules/my_code.py", "code/.record.json.tmp")  # the record is written last
    for name in (".config.yaml.tmp", "..trace.yaml.json.tmp", ".training.csv.tmp", *code):
        (directory / name).touch()
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.others == []
    removal.carry_out()
    assert not directory.exists()


@pytest.mark.parametrize("what", ["runs", "checkpoints"])
def test_a_removal_that_is_killed_leaves_no_folder_in_which_nothing_is(directory, monkeypatch, what):
    left, unlink = directory / "checkpoints/.tmp-it-00000030", Path.unlink
    left.mkdir()  # by one that was killed before it had removed the folder

    def look(self, missing_ok=False):
        assert {each for each in directory.rglob("*") if each.is_dir() and not any(each.iterdir())} <= {left}
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", look)
    Removal.of(StoredRun(directory), what).carry_out()
    assert not (directory if what == "runs" else directory / "checkpoints").exists()


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
        place = finding.find(directory / "checkpoints", name)
        assert list(verify(place).files) == ["model.safetensors"]
        with pytest.raises(UsageError, match=r"has no state\.pt, so that it cannot be resumed"):
            check_resumable(place)
    assert Removal.of(StoredRun(directory), "optimizer states").size == 0


def test_the_files_of_ranks_go_with_those_of_one_process_and_the_state_first(tmp_path):
    of_ranks = ["state-0.safetensors", "state-12.safetensors", "training-1.safetensors"]
    others = ["model-0.safetensors", "shards.json", "manifest.json", "state-x.safetensors"]
    for name in (STATE_FILE, "training.safetensors", *of_ranks, *others):
        (tmp_path / name).touch()
    assert files_to_resume(tmp_path) == [STATE_FILE, "training.safetensors", *of_ranks]
    (tmp_path / "shards.json").unlink()  # a model of one's own may have files of such names
    assert files_to_resume(tmp_path) == [STATE_FILE, "training.safetensors"]
    assert files_to_resume(tmp_path / "missing") == []


def test_what_an_interrupt_leaves_is_removed_the_next_time(directory, monkeypatch):
    unlink = Path.unlink
    for what, most in (("checkpoints", 3), ("runs", 5)):
        left = iter(range(most))

        def stop(self, missing_ok=False, left=left):
            if not self.name.startswith(".") and next(left, None) is None:
                raise KeyboardInterrupt
            unlink(self, missing_ok=missing_ok)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", stop)
            Removal.of(StoredRun(directory), what).carry_out()
        assert StoredRun(directory).status == "finished"  # it is still a run
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
    place = finding.find(directory / "checkpoints", "best")
    content = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**content, "format": content["format"] + 1}))
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


def test_checkpoints_behind_a_link_are_refused(directory, tmp_path):
    (directory / "checkpoints").rename(tmp_path / "elsewhere")
    (directory / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert "links are not followed" in Removal.of(StoredRun(directory), "checkpoints").refusal()


OTHERS = [
    *("src/model.py", "notes.txt", "metrics.sqlite", "config-mine.yaml", "train-old.log", "checkpoints/pretrained.pt"),
    *("checkpoints/it-00000010/mine", "eval/mine/x", "failures/1/x", "code/main.py", "plots/a.png", "plots_1/b.png"),
    *("mine/", "plots_1/more/", "code-2/record.json"),
]


def test_a_directory_in_which_something_else_lies_is_refused_with_its_name(directory):
    for number, name in enumerate(OTHERS):
        copy = shutil.copytree(directory, directory.with_name(f"copy-{number}"), symlinks=True)
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text("mine")
        before = tree(copy)
        removal = Removal.of(StoredRun(copy), "runs")
        shown = next(each for each in (path, *path.parents) if each in removal.others).relative_to(copy)
        assert f"has 1 name that the run does not write: {shown}; move or delete what is yours" in removal.refusal()
        with pytest.raises(UsageError, match="nothing was removed: "):
            removal.carry_out()
        assert tree(copy) == before


NAMES = ["link", "checkpoints/mine", "training.csv", "tensorboard", "tensorboard/x", "eval"]


@pytest.mark.parametrize("name", thinned(NAMES, ["checkpoints/mine", "training.csv", "tensorboard"]))
def test_a_link_or_a_pipe_is_something_else_and_what_it_leads_to_stays(directory, tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("kept")
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    for make in (lambda: path.symlink_to(tmp_path / "data"), lambda: os.mkfifo(path)):
        path.unlink(missing_ok=True)
        make()
        removal = Removal.of(StoredRun(directory), "runs")
        assert removal.others == [path]
        with pytest.raises(UsageError, match="nothing was removed"):
            removal.carry_out()
    assert (tmp_path / "data" / "kept").read_text() == "kept"
    assert (directory / "metrics.jsonl").exists()


def test_another_run_in_the_directory_is_something_else(directory, make_run):
    shutil.copytree(make_run("b").directory, directory / "b")
    shutil.copytree(make_run("c").directory, directory / "eval" / "c")
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.others == [directory / "b", directory / "eval" / "c"]


def test_a_file_that_appears_after_the_look_keeps_everything(directory):
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.refusal() is None
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"nothing was removed: .*notes\.txt"):
        removal.carry_out()
    assert (directory / "metrics.jsonl").exists()


def test_a_file_that_appears_during_the_removal_stays_with_its_directory(directory, monkeypatch):
    unlink = Path.unlink

    def appear(self, missing_ok=False):
        if self.name == "metrics.jsonl":
            (directory / "notes.txt").write_text("mine")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", appear)
    Removal.of(StoredRun(directory), "runs").carry_out()
    assert [path for path in directory.rglob("*") if path.is_file()] == [directory / "notes.txt"]


def test_names_that_hooks_have_declared_go_with_the_run(directory):
    for name in ("tensorboard/events.1", "plots_7/a.png", "wandb/run-1/files/x.json", ".training.csv.tmp"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("")
    (directory / "tensorboard" / "empty").mkdir()
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.refusal() is None
    removal.carry_out()
    assert not directory.exists()


def test_hidden_names_are_neither_removed_nor_a_reason_to_refuse(directory):
    for name in (".git/HEAD", ".notes", "checkpoints/.DS_Store", "lost+found/x"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")
    before = {path for path in directory.rglob("*") if path.is_file() and path.read_bytes() == b"mine"}
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.refusal() is None
    removal.carry_out()
    assert {path for path in directory.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_read_is_something_else(directory, monkeypatch):
    scandir = os.scandir

    def refused(path):
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert Removal.of(StoredRun(directory), "runs").others == [directory / "checkpoints"]


def test_a_checkpoint_whose_manifest_cannot_be_read_in_time_is_not_removed_in_part(directory, monkeypatch):
    opened = os.open

    def timing_out(path, *arguments, **keywords):
        if path == "manifest.json":
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", timing_out)
    with pytest.raises(StorageError, match=r"cannot read .*manifest.json: timed out"):
        Removal.of(StoredRun(directory), "checkpoints").carry_out()
    assert len(list(directory.glob("checkpoints/it-*/*"))) == 8


@pytest.mark.parametrize("names", thinned([["../kept"], ["/"], ["out/"], ["*"], [".."], [""]], [["../kept"], ["out/"]]))
def test_declared_names_do_not_lead_out_of_the_directory(make_run, tmp_path, names):
    (tmp_path / "log" / "kept").mkdir(parents=True)
    (tmp_path / "log" / "kept" / "x").write_text("")
    directory = make_run("a").directory
    (directory / "out").symlink_to(tmp_path / "log" / "kept")
    text = (directory / "trace.yaml").read_text().replace("files: []", f"files: {json.dumps(names)}")
    (directory / "trace.yaml").write_text(text)
    assert StoredRun(directory).trace["files"] == names
    with pytest.raises(UsageError, match=r"nothing was removed: .*: out;"):
        Removal.of(StoredRun(directory), "runs").carry_out()
    (directory / "out").unlink()
    Removal.of(StoredRun(directory), "runs").carry_out()
    assert (tmp_path / "log" / "kept" / "x").exists()


def test_a_mount_point_is_something_else(directory, monkeypatch, tmp_path):
    (directory / "eval x").mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 98:0 / {directory}/eval\\040x rw - ext4 /dev/sda1 rw\n36 35 98:0 / {directory}/training.csv rw -"
    )
    monkeypatch.setattr(run_files, "_MOUNTS", mounts)
    removal = Removal.of(StoredRun(directory), "runs")
    assert removal.others == [directory / "eval x", directory / "training.csv"]


def test_a_run_in_the_current_directory_is_refused(directory, monkeypatch):
    monkeypatch.chdir(directory)
    assert "the current directory" in Removal.of(StoredRun(directory), "runs").refusal()
    assert Removal.of(StoredRun(directory), "checkpoints").refusal() is None


def test_a_process_that_is_only_in_the_trace_is_asked_for(make_run):
    run = make_run("a", (0.1,), status="running")
    run.release()
    for name in (".lock", ".owner.json"):
        (run.directory / name).unlink(missing_ok=True)
    refusal = Removal.of(StoredRun(run.directory), "runs").refusal()
    assert f"may be in use by process {os.getpid()} on" in refusal


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
