"""The content of the directory of checkpoints: checkpoints, names, temporary directories."""

import errno

import pytest

from emrun.errors import ReadTimeout
from emrun.storage.checkpoints import commit
from emrun.storage.manifest import Contents, free_place


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "checkpoints"
    commit(root, lambda place: None, epoch=0, iteration=3, names=["latest"])
    return root


def test_a_directory_that_is_not_there_is_empty(tmp_path):
    assert Contents.of(tmp_path / "gone") == Contents([], [], {}, [])


def test_checkpoints_names_and_temporary_directories_are_distinguished(root):
    (root / "it-00000003").rename(root / "best")  # as in a copy that followed links
    commit(root, lambda place: None, epoch=0, iteration=4, names=["latest"])
    (root / "mine").symlink_to("elsewhere/it-00000009")
    for name in (".tmp-7", "notes", ".hidden"):
        (root / name).mkdir()
    (root / "it-00000005").touch()
    (root / ".latest.tmp").symlink_to("it-00000004")
    here = Contents.of(root)
    assert here == Contents(["it-00000004"], ["best"], {"latest": "it-00000004", "mine": "it-00000009"}, [".tmp-7"])


def test_the_manifest_of_what_is_damaged_is_left_out(root):
    place = commit(root, lambda place: None, epoch=0, iteration=4, names=["best"])
    (place / "manifest.json").write_text("{")
    found = Contents.of(root).manifests(root)
    assert list(found) == ["it-00000003"]
    assert found["it-00000003"].iteration == 3


def test_a_manifest_that_is_not_given_in_time_is_not_taken_for_damaged(root, monkeypatch):
    def late(path):
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr("emrun.storage.manifest.read_seal", late)
    with pytest.raises(ReadTimeout):
        Contents.of(root).manifests(root)


def test_a_place_that_is_taken_gets_a_number(root):
    assert free_place(root, 3).name == "it-00000003-2"
    assert free_place(root, 4).name == "it-00000004"
