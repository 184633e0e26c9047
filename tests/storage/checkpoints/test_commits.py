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
from campaign import thinned
from storage.committing import FILES, commit_at, give_names, links_in, names_in, save, sealed

from emrun.base.errors import StateError, StorageError, exit_status
from emrun.storage.checkpoints.commits import Names, commit, go_back_to
from emrun.storage.checkpoints.finding import find
from emrun.storage.checkpoints.manifest import FILE, FORMAT, verify
from emrun.storage.files import read_regular


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
    give_names(first, "best")
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


FULL, BROKEN = (errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")
FAILURES = [(function, *error) for function in ("fsync", "rename", "symlink") for error in (FULL, BROKEN)]


@pytest.mark.parametrize(
    ("function", "code", "message"), thinned(FAILURES, [("fsync", *FULL), ("rename", *BROKEN), ("symlink", *FULL)])
)
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


MOMENTS = [("fsync", 1), ("fsync", 3), ("rename", 1), ("symlink", 1), ("rename", 2), ("rename", 3), ("rmtree", 3)]


@pytest.mark.parametrize(("function", "nth"), thinned(MOMENTS, [("fsync", 3), ("rename", 2), ("rmtree", 3)]))
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


def unlinked(root, *names):
    for name in names or [path.name for path in root.iterdir() if path.is_symlink()]:
        (root / name).unlink()


def test_names_that_are_missing_come_back_as_they_were_recorded(root):
    commit_at(root, 1, "best", "epoch-1")
    place = commit_at(root, 2, "latest")
    unlinked(root)
    go_back_to(place, {"best": "it-00000001", "latest": "it-00000002"})
    assert links_in(root) == {"best": "it-00000001", "latest": "it-00000002"}  # epoch-1 had been given up


def test_names_without_a_record_come_back_from_the_manifests_that_are_not_later(root):
    commit_at(root, 1, "best", "epoch-1", "latest")
    place = commit_at(root, 2, "latest", "epoch-2")
    commit_at(root, 3, "best", "epoch-3")
    unlinked(root)
    go_back_to(place)
    expected = {"best": "it-00000001", "epoch-1": "it-00000001", "latest": "it-00000002", "epoch-2": "it-00000002"}
    assert links_in(root) == expected
    assert (root / "it-00000003").is_dir()  # it never had a name that this process saw


def test_a_recorded_name_whose_checkpoint_is_gone_comes_back_from_the_manifests(root):
    commit_at(root, 1, "best", "latest")
    place = commit_at(root, 2, "latest")
    unlinked(root)
    go_back_to(place, {"best": "it-00000007", "latest": "it-00000002"})
    assert links_in(root) == {"best": "it-00000001", "latest": "it-00000002"}


def test_a_checkpoint_that_lost_its_name_outside_of_this_process_is_not_deleted(root):
    commit_at(root, 1, "best")
    place = commit_at(root, 2, "latest")
    shutil.copytree(place, root / "it-00000002-5")
    unlinked(root, "best")
    commit_at(root, 3, "latest")
    assert names_in(root) == ["it-00000001", "it-00000002-5", "it-00000003", "latest"]


def test_a_name_that_a_killed_process_had_to_remove_is_removed(root):
    commit_at(root, 1, "epoch-1")
    place = commit_at(root, 2, "epoch-2", "latest")
    (root / "mine").symlink_to("it-00000002")
    go_back_to(place, {"epoch-2": "it-00000002", "latest": "it-00000002"})
    assert names_in(root) == ["epoch-2", "it-00000002", "latest", "mine"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_not_a_link_is_not_replaced_by_one(root, kind):
    commit_at(root, 1, "latest")
    if kind == "file":
        (root / "best").write_text("mine")
    else:
        (root / "best").mkdir()
    with pytest.raises(StorageError, match=r"best: it is not a link; move it elsewhere"):
        commit_at(root, 2, "best")
    assert (root / "best").exists() and not (root / "best").is_symlink()
    assert verify(find(root, "latest")).iteration == 1


def test_a_file_that_the_user_has_put_into_a_checkpoint_is_not_deleted_with_it(root):
    notes = commit_at(root, 1, "latest") / "notes"
    notes.write_text("mine")
    commit_at(root, 2, "latest")
    assert [path.name for path in notes.parent.iterdir()] == ["notes"]


def test_a_link_that_another_process_made_keeps_a_checkpoint(root):
    known = Names(root)
    for iteration in (1, 2):
        commit(root, save, epoch=0, iteration=iteration, names=["latest"], known=known)
        (root / f"mine-{iteration}").symlink_to(f"it-{iteration:08d}")
    commit(root, save, epoch=0, iteration=3, names=["latest"], known=known)
    assert names_in(root) == [*(f"it-{n:08d}" for n in (1, 2, 3)), "latest", "mine-1", "mine-2"]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_or_link_with_the_name_of_a_file_stays_when_its_checkpoint_is_deleted(root, kind, tmp_path):
    place = commit_at(root, 1, "latest")
    name = next(each.name for each in place.iterdir() if each.name != FILE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (place / name).unlink()
    if kind == "folder":
        (tmp_path / "mine").rename(place / name)
    else:
        (place / name).symlink_to(tmp_path / "mine")
    commit_at(root, 2, "latest")
    assert (place / name / "notes.txt").read_text() == "mine"


def test_a_file_in_the_place_of_the_checkpoints_is_an_error_of_storage(root):
    root.parent.mkdir(exist_ok=True)
    root.write_text("mine")
    with pytest.raises(StorageError, match="Not a directory"):
        find(root)
