"""Names of checkpoints: missing ones, directories under names, what is deleted."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from storage.committing import commit_at, names_in, save

from emrun.base.errors import ReadTimeout, StorageError
from emrun.storage.checkpoints.commits import commit, copy_up_to, find, newest
from emrun.storage.checkpoints.manifest import FILE, Contents, verify
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
    assert go_back_to(place, {"best": "it-00000001", "latest": "it-00000002"}) == place
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
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_directory_under_a_name_is_the_checkpoint_of_that_name(followed, name, is_partial):
    if is_partial:
        for place in list(followed.glob("it-*")):
            shutil.rmtree(place)
    assert verify(find(followed, name)).names == (["latest"] if name == "latest" else ["best", "epoch-1"])
    assert newest(followed).name == ("latest" if is_partial else "it-00000002")
    place = go_back_to(find(followed, name))
    assert place == followed / ("it-00000002" if name == "latest" else "it-00000001")
    assert links_in(followed)["best"] == "it-00000001"
    assert links_in(followed)["latest"] == place.name
    assert all(verify(place) for place in followed.glob("it-*"))
    assert not list(followed.glob(".*"))


def test_a_directory_under_a_name_is_kept_when_its_double_is_damaged(followed):
    (followed / "it-00000001" / "state.pt").write_bytes(b"other")
    go_back_to(followed / "it-00000002")
    assert verify(find(followed, "best")).iteration == 1


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_directory_under_a_name_is_found_by_whatever_path_the_run_has(followed, monkeypatch, is_partial):
    if is_partial:
        for place in list(followed.glob("it-*")):
            shutil.rmtree(place)
    (followed.parent / "link").symlink_to(".")
    monkeypatch.chdir(followed.parent)
    place = go_back_to(find(root := Path("link", followed.name), "best").resolve(), known=Names(root))
    assert place == followed / "it-00000001"
    assert links_in(followed)["best"] == "it-00000001"


def test_a_copy_of_directories_under_names_has_all_names(followed, tmp_path):
    for place in list(followed.glob("it-*")):
        shutil.rmtree(place)
    copy = copy_up_to(find(followed, "latest"), tmp_path / "other")
    go_back_to(copy)
    names = {"best": "it-00000001", "epoch-1": "it-00000001", "latest": "it-00000002"}
    assert links_in(tmp_path / "other") == names


@pytest.mark.parametrize("after", range(4))
def test_a_checkpoint_is_not_copied_if_another_of_its_iteration_takes_its_place(root, tmp_path, monkeypatch, after):
    place = commit_at(root, 5)
    real, copied = shutil.copy2, []

    def copy(source, target, **more):
        if len(copied) == after:
            commit_at(root, 5)  # it-00000005-2; it-00000005 is deleted
            assert commit_at(root, 5) == place
        copied.append(source)
        return real(source, target, **more)

    monkeypatch.setattr(shutil, "copy2", copy)
    assert copy_up_to(place, tmp_path / "other") is None
    assert not (tmp_path / "other").exists()
    assert copy_up_to(place, tmp_path / "other") == tmp_path / "other" / place.name
    verify(tmp_path / "other" / place.name)


def test_a_checkpoint_whose_manifest_cannot_be_read_in_time_is_not_copied_empty(root, tmp_path, monkeypatch):
    earlier, place = commit_at(root, 1, "best").stat(), commit_at(root, 2, "latest")
    opened, reads = os.open, []

    def timing_out(path, *arguments, dir_fd=None, **keywords):
        if path == FILE and os.path.samestat(os.fstat(dir_fd), earlier):
            reads.append(path)
            if len(reads) == 2:  # the first tells that the checkpoint is earlier, the second which files it has
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        return opened(path, *arguments, dir_fd=dir_fd, **keywords)

    monkeypatch.setattr(os, "open", timing_out)
    with pytest.raises(ReadTimeout, match=r"cannot read .*manifest.json: timed out"):
        copy_up_to(place, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert verify(copy_up_to(place, tmp_path / "other"))


def test_directories_under_names_are_settled_by_one_look_at_the_manifests(root, monkeypatch):
    for iteration in range(1, 9):
        commit_at(root, iteration, f"epoch-{iteration}")
    copied(root, *(f"epoch-{iteration}" for iteration in range(1, 9)))
    looks, real = [], Contents.manifests
    monkeypatch.setattr(Contents, "manifests", lambda self, root: looks.append(root) or real(self, root))
    Names(root).settle(root / "it-00000008")
    assert len(looks) == 1
    assert links_in(root) == {f"epoch-{iteration}": f"it-{iteration:08d}" for iteration in range(1, 9)}


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_name_moves_from_a_directory(followed, is_partial):
    if is_partial:
        for place in list(followed.glob("it-*")):
            shutil.rmtree(place)
    commit_at(followed, 3, "latest", "best")
    links = {"latest": "it-00000003", "best": "it-00000003"}
    assert links_in(followed) == links
    assert verify(find(followed, "epoch-1")).iteration == 1


def test_a_directory_that_is_not_a_checkpoint_is_not_deleted_when_its_name_moves(root, caplog):
    commit_at(root, 1, "latest")
    (root / "best").mkdir()
    (root / "best" / "notes").write_text("mine")
    commit_at(root, 2, "latest", "best")
    assert (root / "best-replaced-1" / "notes").read_text() == "mine"
    assert f"{root}/best is not a checkpoint; renamed it to best-replaced-1" in caplog.messages
    assert links_in(root) == {"latest": "it-00000002", "best": "it-00000002"}


def test_a_file_that_the_user_has_put_into_a_checkpoint_is_not_deleted_with_it(root):
    notes = commit_at(root, 1, "latest") / "notes"
    notes.write_text("mine")
    (root / "best").write_text("mine, too")
    commit_at(root, 2, "latest", "best")
    assert [path.name for path in notes.parent.iterdir()] == ["notes"]
    assert (root / "best-replaced-1").read_text() == "mine, too"


def test_an_empty_directory_under_a_name_is_a_name_that_is_missing(root):
    commit_at(root, 1, "best")
    place = commit_at(root, 2, "latest")
    unlinked(root)
    (root / "best").mkdir()
    (root / "latest").mkdir()
    go_back_to(place)
    assert links_in(root) == {"best": "it-00000001", "latest": "it-00000002"}


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


def test_a_copy_of_a_checkpoint_with_a_file_of_the_user_is_not_removed(root):
    commit_at(root, 1, "best")
    place = commit_at(root, 2, "latest")
    copied(root, "best")
    (root / "best" / "notes.txt").write_text("mine")
    go_back_to(place)
    assert [path.read_text() for path in root.rglob("notes.txt")] == ["mine"]


def test_a_file_in_the_place_of_the_checkpoints_is_an_error_of_storage(root):
    root.parent.mkdir(exist_ok=True)
    root.write_text("mine")
    with pytest.raises(StorageError, match="Not a directory"):
        find(root)
