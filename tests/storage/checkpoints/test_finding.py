"""Which checkpoint a name means, and directories under names."""

import shutil
import subprocess

import pytest
from storage.committing import commit_at, give_names, links_in

from emrun.base.errors import ReadTimeout, StorageError, UsageError, exit_status
from emrun.storage.checkpoints.commits import commit, go_back_to
from emrun.storage.checkpoints.finding import check_names, find, kept, newest, note_intact
from emrun.storage.checkpoints.manifest import verify


@pytest.fixture
def named(root):
    commit_at(root, 1, "epoch-1")
    commit_at(root, 2, "latest")
    return root


def test_a_checkpoint_is_found_by_its_name_or_directory(named):
    assert find(named, "epoch-1") == find(named, "it-00000001") == named / "it-00000001"


def test_the_default_is_best_or_else_latest(named):
    assert find(named) == named / "it-00000002"
    give_names(named / "it-00000001", "best")
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


def test_all_checkpoints_are_kept_in_their_order_and_the_damaged_ones_come_first(root):
    for iteration, names in ((1, ["epoch-1", "best"]), (2, ["epoch-2"]), (3, ["latest"])):
        commit_at(root, iteration, *names)
    (root / ".tmp-it-00000004").mkdir()
    assert [(each["directory"], each["names"], each["iteration"]) for each in kept(root)] == [
        ("it-00000001", ["best", "epoch-1"], 1),
        ("it-00000002", ["epoch-2"], 2),
        ("it-00000003", ["latest"], 3),
    ]
    file = next(path for path in (root / "it-00000002").iterdir() if path.name != "manifest.json")
    file.unlink()
    why = f"checkpoint {root / 'it-00000002'}: {file.name} is missing; the checkpoint is damaged"
    place = {"directory": "it-00000002", "names": ["epoch-2"], "epoch": -1, "iteration": -1}
    assert kept(root)[0] == {**place, "damage": why}


def test_a_copy_that_followed_links_or_lost_them_has_each_checkpoint_once(root, tmp_path):
    commit_at(root, 1, "epoch-1")
    commit_at(root, 2, "best", "latest")
    followed = shutil.copytree(root, tmp_path / "followed")
    assert [(each["directory"], each["names"]) for each in kept(followed)] == [
        ("it-00000001", ["epoch-1"]),
        ("it-00000002", ["best", "latest"]),
    ]
    for path in links_in(root):
        (root / path).unlink()
    assert [(each["directory"], each["names"]) for each in kept(root)] == [("it-00000001", []), ("it-00000002", [])]
    with pytest.raises(UsageError, match="no checkpoint; available: nothing"):
        kept(tmp_path / "nowhere")


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


def test_what_is_intact_is_not_looked_for_where_files_cannot_be_read_in_time(tmp_path):
    commit(tmp_path, lambda place: (place / "state.pt").touch(), epoch=1, iteration=2, names=("best",))
    late, damaged = ReadTimeout("no answer"), StorageError("damaged")
    note_intact(late, tmp_path)
    note_intact(damaged, tmp_path)
    assert not hasattr(late, "__notes__")
    assert damaged.__notes__ == ["intact checkpoints: best"]


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
