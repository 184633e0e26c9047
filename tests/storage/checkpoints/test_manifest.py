"""Manifests: what is intact and what is damaged, and the content of the directory of checkpoints."""

import dataclasses
import errno
import hashlib
import json
import random
import re
import shutil

import pytest
from storage.committing import FILES, commit_at, save, sealed

from emrun.base.errors import ReadTimeout, StateError, StorageError, exit_status
from emrun.storage.checkpoints.commits import commit
from emrun.storage.checkpoints.finding import newest
from emrun.storage.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Contents,
    Manifest,
    check_resumable,
    free_place,
    verify,
)


def test_verifying_returns_the_manifest(root):
    place = commit_at(root, 120, epoch=3)
    manifest = verify(place)
    assert isinstance(manifest, Manifest)
    assert (manifest.format, manifest.commit, manifest.epoch, manifest.iteration) == (FORMAT, 1, 3, 120)
    assert set(manifest.files) == set(FILES)


def damaged(place, match):
    with pytest.raises(StorageError, match=rf"checkpoint {re.escape(str(place))}: {match}") as raised:
        verify(place)
    assert exit_status(raised.value) == 74


def test_an_untouched_checkpoint_is_intact_whenever_it_is_verified(place):
    assert verify(place) == verify(place)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_file_cut_off_at_any_point_is_noticed(place, name):
    content = (place / name).read_bytes()
    for size in range(0, len(content), max(1, len(content) // 70)):
        (place / name).write_bytes(content[:size])
        damaged(place, name)
    (place / name).write_bytes(content)
    verify(place)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
def test_every_flipped_bit_is_noticed(place, name):
    """This fails without the comparison with the manifest, or without the manifest's own digest."""
    content = (place / name).read_bytes()
    expected = verify(place)
    bits = random.Random(0).sample(range(8 * len(content)), min(100, 8 * len(content)))
    unnoticed = 0
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (place / name).write_bytes(flipped)
        try:
            assert verify(place) == expected
            unnoticed += 1
        except StorageError as error:
            assert "checkpoint" in str(error)
    assert unnoticed == 0 or (name == "manifest.json" and unnoticed < 5)  # another blank means the same


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file_is_noticed(place, name):
    with (place / name).open("ab") as file:
        file.write(b"\0")
    damaged(place, f"{name} differs from its manifest; the checkpoint is damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(place, name):
    (place / name).unlink()
    damaged(place, f"{name} is missing; the checkpoint is damaged")


def test_swapped_files_are_noticed(place):
    (place / "state.pt").rename(place / "x")
    (place / "model.safetensors").rename(place / "state.pt")
    (place / "x").rename(place / "model.safetensors")
    damaged(place, "model.safetensors differs")


def test_a_directory_in_the_place_of_a_file_is_noticed(place):
    (place / "state.pt").unlink()
    (place / "state.pt").mkdir()
    damaged(place, "state.pt is missing")


def test_a_file_of_another_checkpoint_is_noticed(root, place):
    other = commit_at(root, 121, "other", save=lambda directory: save(directory, {**FILES, "state.pt": b"STATE"}))
    shutil.copy(other / "state.pt", place / "state.pt")
    damaged(place, "state.pt differs")


def test_a_file_that_cannot_be_read_is_a_storage_error(place, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("emrun.storage.sealed.describe", fails)
    with pytest.raises(StorageError, match=r"cannot read .*: Input/output error"):
        verify(place)


def test_a_checkpoint_under_the_name_of_another_iteration_is_noticed(place):
    damaged(place.rename(place.with_name("it-00000099")), "manifest.json belongs to another checkpoint")


def test_a_directory_without_a_manifest_is_not_a_checkpoint(place):
    (place / "manifest.json").unlink()
    damaged(place, "manifest.json cannot be read")


def rewrite(place, **changes):
    path = place / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("newer", [FORMAT + 1, 99])
def test_a_newer_format_is_called_so(place, newer):
    rewrite(place, format=newer, files=None, something_new=[1])
    damaged(place, rf"format {newer} of manifest.json is newer than this emrun supports \({FORMAT}\)")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '"format"',
        "{}",
        '{"format": 1}',
        '{"format": "1"}',
        '{"format": null}',
        "\xff",
        "[" * 900 + "]" * 900,
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_not_a_manifest_is_noticed(place, text):
    (place / "manifest.json").write_text(text, encoding="latin-1")
    damaged(place, "manifest.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 4},
        {"iteration": 121},
        {"commit": 7},
        {"format": 0},
        {"files": {}},
        {"files": []},
        {"more": 1},
        {"sha256": None},
    ],
    ids=str,
)
def test_a_manifest_that_was_changed_is_noticed(place, changes):
    rewrite(place, **changes)
    damaged(place, "manifest.json is damaged")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "sub/file"])
def test_a_manifest_names_no_file_outside_of_its_checkpoint(place, name, monkeypatch):
    monkeypatch.setattr("emrun.storage.sealed.json_digest", lambda content: "intact")  # as if emrun had written it
    (place.parent / "secret").write_bytes(b"")
    empty = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
    rewrite(place, files={name: empty}, sha256="intact")
    with pytest.raises(StateError, match=re.escape(f"manifest.json: a key of files is {name!r}, but must be the name")):
        verify(place)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("names", ["latest", "../../victim.txt"], "names[1] is '../../victim.txt', but must be a name such as 'best'"),
        ("names", ["/tmp/x"], "names[0] is '/tmp/x'"),
        ("names", ["it-00000120"], "names[0] is 'it-00000120'"),
        ("names", [".hidden"], "names[0] is '.hidden'"),
        ("names", ["a b"], "names[0] is 'a b'"),
        ("names", "latest", "names is 'latest', but must be a list"),
        ("format", 0, "format is 0"),
        ("commit", -1, "commit is -1, but must be a whole number from 0"),
        ("commit", "3", "commit is '3'"),
        ("epoch", None, "epoch is None"),
        ("iteration", 120.0, "iteration is 120.0"),
        ("files", [], "files is [], but must be a mapping"),
        ("files", {"state.pt": {"size": 0}}, "files.'state.pt'.sha256 is missing"),
    ],
)
def test_a_wrong_field_with_a_right_checksum_is_named_with_file_value_and_what_was_allowed(place, field, value, said):
    (place.parent.parent / "victim.txt").write_text("precious")
    sealed(place, **{field: value})
    for check in (lambda: verify(place), lambda: newest(place.parent)):
        with pytest.raises(StateError, match=re.escape(f"{place / 'manifest.json'}: {said}")) as raised:
            check()
        assert exit_status(raised.value) == 2
    assert (place.parent.parent / "victim.txt").read_text() == "precious"


def test_what_a_manifest_may_hold_is_known_of_each_of_its_fields():
    assert set(MANIFEST) == {field.name for field in dataclasses.fields(Manifest)}


# The content of the directory of checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    root = tmp_path / "checkpoints"
    commit(root, lambda place: None, epoch=0, iteration=3, names=["latest"])
    return root


def test_a_directory_that_is_not_there_is_empty(tmp_path):
    assert Contents.of(tmp_path / "gone") == Contents([], [], {}, [])


def test_checkpoints_names_and_temporary_directories_are_distinguished(checkpoints):
    (checkpoints / "it-00000003").rename(checkpoints / "best")  # as in a copy that followed links
    commit(checkpoints, lambda place: None, epoch=0, iteration=4, names=["latest"])
    (checkpoints / "mine").symlink_to("elsewhere/it-00000009")
    for name in (".tmp-7", "notes", ".hidden"):
        (checkpoints / name).mkdir()
    (checkpoints / "it-00000005").touch()
    (checkpoints / ".latest.tmp").symlink_to("it-00000004")
    here = Contents.of(checkpoints)
    assert here.checkpoints == ["it-00000004"]
    assert sorted(here.others) == ["best", "notes"]
    assert here.links == {"latest": "it-00000004", "mine": "it-00000009"}
    assert here.asides == [".tmp-7"]


def test_the_manifest_of_what_is_damaged_is_left_out(checkpoints):
    place = commit(checkpoints, lambda place: None, epoch=0, iteration=4, names=["best"])
    (place / "manifest.json").write_text("{")
    found = Contents.of(checkpoints).manifests(checkpoints)
    assert list(found) == ["it-00000003"]
    assert found["it-00000003"].iteration == 3


def test_a_manifest_that_is_not_given_in_time_is_not_taken_for_damaged(checkpoints, monkeypatch):
    def late(path):
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr("emrun.storage.checkpoints.manifest.read_seal", late)
    with pytest.raises(ReadTimeout):
        Contents.of(checkpoints).manifests(checkpoints)


def test_a_place_that_is_taken_gets_a_number(checkpoints):
    assert free_place(checkpoints, 3).name == "it-00000003-2"
    assert free_place(checkpoints, 4).name == "it-00000004"


def test_a_checkpoint_that_a_run_at_work_deletes_has_not_lost_its_state(tmp_path):
    place = commit_at(tmp_path, 1)
    (place / "state.pt").unlink()
    check_resumable(place)  # who reads the state says what is missing, or looks for the checkpoint again
    shutil.rmtree(place)
    check_resumable(place)
