"""Names of checkpoints: missing ones, directories under names, what is deleted."""

import shutil
import subprocess

import pytest
from storage.committing import commit_at, names_in, save

from emrun.base.errors import StorageError, UsageError
from emrun.storage.checkpoints.commits import check_names, commit, find, newest
from emrun.storage.checkpoints.manifest import FILE, verify
from emrun.storage.checkpoints.names import Names, go_back_to


def unlinked(root, *names):
    for name in names or [path.name for path in root.iterdir() if path.is_symlink()]:
        (root / name).unlink()


def links_in(root):
    return {path.name: path.readlink().name for path in root.iterdir() if path.is_symlink()}


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


def copied(root, *names):
    """Put copies of checkpoints in the places of links."""
    for name in names:
        target = (root / name).resolve()
        (root / name).unlink()
        shutil.copytree(target, root / name)


@pytest.fixture
def followed(root):
    commit_at(root, 1, "best", "epoch-1")
    commit_at(root, 2, "latest")
    copied(root, "best", "epoch-1", "latest")
    return root


@pytest.mark.parametrize("name", ["best", "latest"])
def test_a_directory_under_a_name_is_the_checkpoint_of_that_name_for_an_evaluation(followed, name):
    assert verify(find(followed, name)).names == (["latest"] if name == "latest" else ["best", "epoch-1"])
    assert newest(followed).name == "it-00000002"


def told(root):
    """Return the commands that the error of `check_names` tells."""
    with pytest.raises(UsageError, match=r"evaluated, but not resumed\. Copy the run again with `cp -a`, or") as caught:
        check_names(root)
    return str(caught.value).partition("do this: ")[2].split("; ")


def test_directories_under_names_are_removed_before_a_resume_if_their_checkpoints_are_there(followed):
    commands = told(followed)
    assert commands == [f"rm -r {followed / name}" for name in ("best", "epoch-1", "latest")]
    for command in commands:
        subprocess.run(command, shell=True, check=True)
    check_names(followed)
    go_back_to(newest(followed))
    assert links_in(followed) == {"best": "it-00000001", "epoch-1": "it-00000001", "latest": "it-00000002"}


def test_the_only_copy_of_a_checkpoint_is_moved_and_not_removed(followed):
    shutil.rmtree(followed / "it-00000001")
    commands = told(followed)
    place = followed / "it-00000001"
    assert commands[:2] == [f"mv {followed / 'best'} {place}", f"rm -r {followed / 'epoch-1'}"]
    for command in commands:
        subprocess.run(command, shell=True, check=True)
    check_names(followed)
    assert verify(place).iteration == 1


def test_a_directory_under_a_name_that_is_not_a_checkpoint_is_not_removed(root):
    commit_at(root, 1, "latest")
    (root / "empty").mkdir()
    (root / "mine").mkdir()
    (root / "mine" / "notes").write_text("mine")
    assert told(root) == [f"rm -r {root / 'empty'}", f"move {root / 'mine'} elsewhere: it is not a checkpoint"]


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
