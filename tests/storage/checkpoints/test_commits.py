"""Checkpoints: how they are committed, verified, named and found."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from storage.committing import FILES, commit_at, names_in, save, sealed

from emrun.base.errors import ReadTimeout, StateError, StorageError, UsageError, exit_status
from emrun.storage.checkpoints.commits import commit, find, note_intact
from emrun.storage.checkpoints.manifest import FORMAT, verify
from emrun.storage.checkpoints.names import Names
from emrun.storage.files import read_regular


def name(place, *names):
    known = Names(place.parent)
    known.look()
    known.move(dict.fromkeys(names, place.name))


def tree(directory):
    """Return everything below a directory: path -> content, or the target of a link."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def test_a_checkpoint_holds_its_files_and_a_manifest_with_their_sha256_and_size(root):
    place = commit_at(root, 120, epoch=3)
    assert place == root / "it-00000120"
    assert names_in(place) == ["empty", "manifest.json", "model.safetensors", "state.pt"]
    assert all((place / name).read_bytes() == content for name, content in FILES.items())
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["format"] == FORMAT
    assert (manifest["commit"], manifest["epoch"], manifest["iteration"]) == (1, 3, 120)
    assert manifest["files"] == {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)} for name, content in FILES.items()
    }


def test_equal_states_give_equal_bytes(tmp_path):
    trees = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        commit_at(tmp_path / name / "checkpoints", 5)
        trees.append(tree(tmp_path / name))
    assert trees[0] == trees[1]


def test_names_are_relative_links(root):
    commit_at(root, 7, "latest", "best", "epoch-1")
    assert {name: str((root / name).readlink()) for name in ("latest", "best", "epoch-1")} == {
        "latest": "it-00000007",
        "best": "it-00000007",
        "epoch-1": "it-00000007",
    }
    root.rename(root.with_name("moved"))  # a run directory may be moved
    assert verify(find(root.with_name("moved"), "best")).iteration == 7


def test_commits_are_counted(root):
    commit_at(root, 9, "a")
    commit_at(root, 3, "b")  # the counter, not the iteration, tells which is newest
    place = commit_at(root, 5, "c")
    assert [verify((root / name).resolve()).commit for name in "abc"] == [1, 2, 3]
    assert verify(place).commit == 3


def test_what_no_name_points_at_is_deleted(root):
    commit_at(root, 1, "latest", "best")
    commit_at(root, 2, "latest")
    assert names_in(root) == ["best", "it-00000001", "it-00000002", "latest"]
    commit_at(root, 3, "latest")
    assert names_in(root) == ["best", "it-00000001", "it-00000003", "latest"]
    commit_at(root, 4, "latest", "best")
    assert names_in(root) == ["best", "it-00000004", "latest"]


def test_nothing_but_checkpoints_is_deleted(root):
    commit_at(root, 1)
    (root / "notes").mkdir()
    (root / "it-notes").mkdir()
    (root / "it-1").write_text("mine")
    commit_at(root, 2)
    assert names_in(root) == ["it-00000002", "it-1", "it-notes", "latest", "notes"]


def test_a_second_state_at_an_iteration_gets_a_number(root):
    first = commit_at(root, 5, "before")
    second = commit_at(root, 5, "after")
    third = commit_at(root, 5, "later")
    assert [place.name for place in (first, second, third)] == ["it-00000005", "it-00000005-2", "it-00000005-3"]
    assert [verify(find(root, name)).commit for name in ("before", "after", "later")] == [1, 2, 3]
    commit_at(root, 6, "before", "after", "later")
    assert names_in(root) == ["after", "before", "it-00000006", "later"]


def test_iterations_of_more_than_eight_digits_are_checkpoints_too(root):
    commit_at(root, 123_456_789_012)
    commit_at(root, 123_456_789_013)
    assert names_in(root) == ["it-123456789013", "latest"]


def test_moving_a_name_deletes_what_lost_its_last_one(root):
    first = commit_at(root, 1, "latest")
    commit_at(root, 2, "best")
    name(first, "best")
    assert names_in(root) == ["best", "it-00000001", "latest"]


def test_each_file_is_flushed_then_the_manifest_then_the_directory_renamed(root, monkeypatch):
    steps = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        steps.append("flush " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(source, target, **options):
        steps.append("rename " + Path(target).name)
        rename(source, target, **options)

    root.mkdir()
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    commit_at(root, 1)
    aside = f".tmp-{os.getpid()}"
    assert steps == [
        *(f"flush {name}" for name in sorted(FILES)),
        "flush manifest.json",
        f"flush {aside}",
        "rename it-00000001",
        "flush checkpoints",  # the checkpoint has its place for good
        "rename latest",
        "flush checkpoints",  # and then latest
    ]


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=repr)
def test_a_save_that_raises_leaves_nothing_behind_and_the_older_checkpoint_untouched(root, error):
    commit_at(root, 1, "latest", "best")
    before = tree(root)

    def fails(directory):
        save(directory)
        raise error

    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        commit_at(root, 2, save=fails)
    assert tree(root) == before
    assert verify(find(root, "latest")).iteration == 1


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
@pytest.mark.parametrize("function", ["fsync", "rename", "symlink"])
def test_a_commit_that_fails_at_any_step_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch, function, code, message
):
    original, calls, outcomes = getattr(os, function), [], []
    for nth in range(1, 20):
        root = tmp_path / str(nth)
        commit_at(root, 1, "latest")
        calls.clear()

        def fails(*arguments, nth=nth, **options):
            calls.append(arguments)
            if len(calls) == nth:
                raise OSError(code, os.strerror(code))
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, fails)
            try:
                commit_at(root, 2, "latest")
            except StorageError as error:
                assert message in str(error)
        outcomes.append(verify(find(root)).iteration)
        assert not (root / f".tmp-{os.getpid()}").exists()
        commit_at(root, 3, "latest")  # and the next one works
        assert names_in(root) == ["it-00000003", "latest"]
        if len(calls) < nth:  # it did not fail any more
            break
    assert len(outcomes) > 1
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] == 2


def test_a_commit_reads_no_manifest_again_however_many_there_are(root, monkeypatch):
    read = []
    note = lambda path, *more: read.append(path) or read_regular(path, *more)  # noqa: E731
    monkeypatch.setattr("emrun.storage.sealed.read_regular", note)
    for iteration in range(1, 9):
        commit_at(root, iteration, f"epoch-{iteration}")
    manifests = [path for path in read if path.name == "manifest.json"]  # a lock of another test may be forgotten here
    assert len(manifests) == len(set(manifests)) == 7  # each by the one after it


def test_a_run_whose_checkpoints_were_replaced_counts_from_what_is_there(root):
    for iteration in (1, 2, 3):
        commit_at(root, iteration, "latest")
    shutil.rmtree(root)
    assert [verify(commit_at(root, iteration, "latest")).commit for iteration in (3, 4)] == [1, 2]


def test_a_run_that_was_removed_does_not_come_back_as_its_checkpoints(tmp_path):
    with pytest.raises(StorageError):
        commit(tmp_path / "gone" / "checkpoints", lambda place: None, epoch=0, iteration=0, names=["latest"])
    assert not (tmp_path / "gone").exists()


def test_a_full_disk_is_reported_with_the_place(root, monkeypatch):
    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"cannot write a checkpoint in .*checkpoints: the disk is full") as raised:
        commit_at(root, 1, save=full)
    assert exit_status(raised.value) == 74


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from emrun.storage.checkpoints import commits as checkpoint
root, iteration, function, nth = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
module = shutil if function == 'rmtree' else os
original, calls = getattr(module, function), []

def kill(*arguments, **options):
    calls.append(arguments)
    if len(calls) == nth:
        if function == 'rmtree' and Path(arguments[0]).is_dir():
            next(Path(arguments[0]).iterdir()).unlink()  # half of it is gone
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)

setattr(module, function, kill)

def save(directory):
    (directory / 'model.safetensors').write_bytes(b'new')
    (directory / 'state.pt').write_bytes(b'state')

checkpoint.commit(root, save, epoch=0, iteration=iteration, names=['latest'])
"""


@pytest.mark.parametrize(
    ("function", "nth"),
    [("fsync", 1), ("fsync", 3), ("rename", 1), ("symlink", 1), ("rename", 2), ("rename", 3), ("rmtree", 3)],
)
def test_a_process_that_is_killed_leaves_a_complete_checkpoint_and_its_leftovers_are_deleted(root, function, nth):
    commit_at(root, 1, "latest")
    child = subprocess.run([sys.executable, "-c", KILLED, root, "2", function, str(nth)], check=False, timeout=60)
    assert child.returncode == -9
    assert verify(find(root)).iteration in (1, 2)
    commit_at(root, 1, "best")  # also at the same iteration, whose directory may be half deleted
    commit_at(root, 3, "latest", "best")
    assert names_in(root) == ["best", "it-00000003", "latest"]


def test_what_a_killed_process_left_half_deleted_does_not_keep_its_name_from_being_deleted(root):
    """A directory of an earlier process stood in the way of the rename: every later commit failed."""
    commit_at(root, 1, "latest")
    shutil.copytree(root / "it-00000001", root / ".tmp-it-00000001")
    shutil.copytree(root / "it-00000001", root / ".tmp-1")
    commit_at(root, 2, "latest")
    assert names_in(root) == ["it-00000002", "latest"]


def test_a_damaged_checkpoint_does_not_keep_a_new_one_from_being_saved(root):
    commit_at(root, 1, "latest", "best")
    commit_at(root, 2, "latest")
    (root / "it-00000001" / "manifest.json").write_text("{")
    place = commit_at(root, 3, "latest")
    assert verify(place).commit == 3


@pytest.fixture
def named(root):
    commit_at(root, 1, "epoch-1")
    commit_at(root, 2, "latest")
    return root


def test_a_checkpoint_is_found_by_its_name_or_directory(named):
    assert find(named, "epoch-1") == find(named, "it-00000001") == named / "it-00000001"


def test_the_default_is_best_or_else_latest(named):
    assert find(named) == named / "it-00000002"
    name(named / "it-00000001", "best")
    assert find(named) == named / "it-00000001"
    assert find(named, "latest") == named / "it-00000002"


def test_in_a_copy_without_links_names_are_those_of_the_manifests(named):
    commit_at(named, 3, "latest", "best")
    for path in [path for path in named.iterdir() if path.is_symlink()]:
        path.unlink()
    assert find(named) == find(named, "best") == find(named, "latest") == named / "it-00000003"
    assert find(named, "epoch-1") == named / "it-00000001"
    with pytest.raises(UsageError, match="no checkpoint 'epoch-2'"):
        find(named, "epoch-2")


def test_a_name_that_points_at_nothing_is_not_found(named):
    (named / "best").symlink_to("it-00000099")
    assert find(named) == named / "it-00000002"
    with pytest.raises(UsageError):
        find(named, "best")


def test_an_unknown_name_lists_what_there_is(named):
    with pytest.raises(UsageError) as raised:
        find(named, "bset")
    there = "epoch-1, it-00000001, it-00000002, latest"
    assert str(raised.value) == f"{named}: no checkpoint 'bset'; available: {there}"
    assert exit_status(raised.value) == 2
    with pytest.raises(UsageError, match=r"no checkpoint 'lastest'; did you mean 'latest'\? available: epoch-1, "):
        find(named, "lastest")


@pytest.mark.parametrize("exists", [False, True])
def test_without_any_checkpoint_there_is_nothing(root, exists):
    if exists:
        root.mkdir()
    with pytest.raises(UsageError, match="no checkpoint; available: nothing"):
        find(root)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../checkpoints", "../checkpoints/latest", "it-00000001/", "./latest", "latest/..", ".tmp-1", "{root}"],
)
def test_a_name_is_not_a_path(named, name):
    (named / ".tmp-1").mkdir()
    with pytest.raises(UsageError, match="no checkpoint"):
        find(named, name.format(root=named / "latest"))


def test_a_manifest_with_a_wrong_field_does_not_keep_a_new_checkpoint_from_being_saved(root, place):
    sealed(place, names=["../x"])
    assert verify(commit_at(root, 130)).commit == 1


def test_a_name_that_could_not_be_read_again_is_never_written(root):
    with pytest.raises(StateError, match=r"names\[0\] is '../x'"):
        commit_at(root, 120, "../x")
    assert names_in(root) == []


def test_a_commit_looks_at_no_other_checkpoint(root, monkeypatch):
    """One epoch took ten times as long when thousands of checkpoints were kept."""
    known, calls = Names(root), []
    for name in ("readlink", "stat", "lstat", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, **more: calls.append(args) or real(*args, **more))
    counts = []
    for iteration in range(1, 20):
        calls.clear()
        names = ["latest", f"epoch-{iteration}"]
        commit(root, save, epoch=0, iteration=iteration, names=names, known=known)
        counts.append(len(calls))
    assert len(set(counts[2:])) == 1, counts


def test_what_is_intact_is_not_looked_for_where_files_cannot_be_read_in_time(tmp_path):
    commit(tmp_path, lambda place: (place / "state.pt").touch(), epoch=1, iteration=2, names=("best",))
    late, damaged = ReadTimeout("no answer"), StorageError("damaged")
    note_intact(late, tmp_path)
    note_intact(damaged, tmp_path)
    assert not hasattr(late, "__notes__")
    assert damaged.__notes__ == ["intact checkpoints: best"]
