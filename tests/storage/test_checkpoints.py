"""Checkpoints: committed whole, verified, named, found."""

import dataclasses
import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import emrun.storage.checkpoints
from emrun.errors import StateError, StorageError, UsageError, exit_status
from emrun.storage.checkpoints import (
    FORMAT,
    Manifest,
    Names,
    commit,
    copy_up_to,
    find,
    go_back_to,
    name_checkpoint,
    newest,
    verify,
)
from emrun.storage.files import json_digest

FILES = {"model.safetensors": bytes(range(256)) * 4, "state.pt": b"state", "empty": b""}


def save(directory, files=FILES):
    for name, content in files.items():
        (directory / name).write_bytes(content)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def commit_at(root, iteration, *names, epoch=0, save=save):
    return commit(root, save, epoch=epoch, iteration=iteration, names=names or ("latest",))


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


def names_in(root):
    return sorted(path.name for path in root.iterdir())


# Committing


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


def test_verifying_returns_the_manifest(root):
    place = commit_at(root, 120, epoch=3)
    manifest = verify(place)
    assert isinstance(manifest, Manifest)
    assert (manifest.format, manifest.commit, manifest.epoch, manifest.iteration) == (FORMAT, 1, 3, 120)
    assert set(manifest.files) == set(FILES)


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
    assert [verify(root / name).commit for name in "abc"] == [1, 2, 3]
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
    name_checkpoint(first, ["best"])
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
        "flush checkpoints",  # the checkpoint has its name for good
        "flush checkpoints",  # and then latest
    ]


# Failures


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
@pytest.mark.parametrize("function", ["fsync", "rename", "replace", "symlink"])
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
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path) or original(path, **options))
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
import os, signal, sys
from pathlib import Path
from emrun.storage import checkpoints as checkpoint
root, iteration, function, nth = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
module = checkpoint.shutil if function == 'rmtree' else os
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
    [("fsync", 1), ("fsync", 3), ("rename", 1), ("symlink", 1), ("replace", 1), ("rename", 2), ("rmtree", 3)],
)
def test_a_process_that_is_killed_leaves_a_whole_checkpoint_and_no_rubbish_for_long(root, function, nth):
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


# Verifying


@pytest.fixture
def place(root):
    return commit_at(root, 120, epoch=3)


def damaged(place, match):
    with pytest.raises(StorageError, match=rf"checkpoint {re.escape(str(place))}: {match}") as raised:
        verify(place)
    assert exit_status(raised.value) == 74


def test_an_untouched_checkpoint_is_intact_as_often_as_it_is_verified(place):
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
    """Taking the comparison with the manifest, or the manifest's own digest, out makes this fail."""
    content = (place / name).read_bytes()
    expected = verify(place)
    bits = random.Random(0).sample(range(8 * len(content)), min(300, 8 * len(content)))
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

    monkeypatch.setattr(emrun.storage.checkpoints, "describe", fails)
    with pytest.raises(StorageError, match=r"cannot read .*: Input/output error"):
        verify(place)


def test_a_checkpoint_without_a_manifest_is_none(place):
    (place / "manifest.json").unlink()
    damaged(place, "manifest.json cannot be read")


def rewrite(place, **changes):
    path = place / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("newer", [FORMAT + 1, 99])
def test_a_newer_format_is_called_so(place, newer):
    rewrite(place, format=newer, files=None, something_new=[1])
    damaged(place, rf"format {newer} of manifest.json is newer than this emrun knows \({FORMAT}\)")


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
def test_a_manifest_that_is_none_is_noticed(place, text):
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
    monkeypatch.setattr("emrun.storage.checkpoints.json_digest", lambda content: "intact")  # as if emrun had written it
    (place.parent / "secret").write_bytes(b"")
    empty = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
    rewrite(place, files={name: empty}, sha256="intact")
    with pytest.raises(StateError, match=re.escape(f"manifest.json: a key of files is {name!r}, but must be the name")):
        verify(place)


# Finding


@pytest.fixture
def named(root):
    commit_at(root, 1, "epoch-1")
    commit_at(root, 2, "latest")
    return root


def test_a_checkpoint_is_found_by_its_name_or_directory(named):
    assert find(named, "epoch-1") == find(named, "it-00000001") == named / "it-00000001"


def test_the_default_is_best_or_else_latest(named):
    assert find(named) == named / "it-00000002"
    name_checkpoint(named / "it-00000001", ["best"])
    assert find(named) == named / "it-00000001"
    assert find(named, "latest") == named / "it-00000002"


def test_a_name_that_points_at_nothing_is_not_found(named):
    (named / "best").symlink_to("it-00000099")
    assert find(named) == named / "it-00000002"
    with pytest.raises(UsageError):
        find(named, "best")


def test_an_unknown_name_lists_what_there_is(named):
    with pytest.raises(UsageError) as raised:
        find(named, "bset")
    there = "epoch-1, it-00000001, it-00000002, latest"
    assert str(raised.value) == f"{named}: no checkpoint 'bset'; there is {there}"
    assert exit_status(raised.value) == 2


@pytest.mark.parametrize("exists", [False, True])
def test_without_any_checkpoint_there_is_nothing(root, exists):
    if exists:
        root.mkdir()
    with pytest.raises(UsageError, match="no checkpoint; there is nothing"):
        find(root)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../checkpoints", "../checkpoints/latest", "it-00000001/", "./latest", "latest/..", ".tmp-1", "{root}"],
)
def test_a_name_is_no_path(named, name):
    (named / ".tmp-1").mkdir()
    with pytest.raises(UsageError, match="no checkpoint"):
        find(named, name.format(root=named / "latest"))


# A right checksum says nothing of what was written


def sealed(place, **changes):
    """Change fields of a manifest and make its checksum right again."""
    content = {**json.loads((place / "manifest.json").read_text()), **changes}
    del content["sha256"]
    (place / "manifest.json").write_text(json.dumps({**content, "sha256": json_digest(content)}))


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
    for check in (lambda: verify(place), lambda: emrun.storage.checkpoints.newest(place.parent)):
        with pytest.raises(StateError, match=re.escape(f"{place / 'manifest.json'}: {said}")) as raised:
            check()
        assert exit_status(raised.value) == 2
    assert (place.parent.parent / "victim.txt").read_text() == "precious"


def test_a_manifest_with_a_wrong_field_does_not_keep_a_new_checkpoint_from_being_saved(root, place):
    sealed(place, names=["../x"])
    assert verify(commit_at(root, 130)).commit == 1


def test_what_a_manifest_may_hold_is_known_of_each_of_its_fields():
    assert set(emrun.storage.checkpoints.MANIFEST) == {field.name for field in dataclasses.fields(Manifest)}


def test_a_name_that_could_not_be_read_again_is_never_written(root):
    with pytest.raises(StateError, match=r"names\[0\] is '../x'"):
        commit_at(root, 120, "../x")
    assert names_in(root) == []


# Names that are missing, directories under names


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


def test_names_that_nobody_recorded_come_back_from_the_manifests_that_are_not_later(root):
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


def test_what_this_process_did_not_see_named_is_not_deleted(root):
    commit_at(root, 1, "best")
    place = commit_at(root, 2, "latest")
    shutil.copytree(place, root / "it-00000002-5")
    unlinked(root, "best")
    commit_at(root, 3, "latest")
    assert names_in(root) == ["it-00000001", "it-00000002-5", "it-00000003", "latest"]


def test_a_name_that_a_killed_process_was_to_give_up_is_given_up(root):
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
    (followed.parent / "link").symlink_to(followed.name)
    monkeypatch.chdir(followed.parent)
    place = go_back_to(find(Path("link"), "best").resolve(), known=Names(Path("link")))
    assert place == followed / "it-00000001"
    assert links_in(followed)["best"] == "it-00000001"


def test_a_copy_of_directories_under_names_has_all_names(followed, tmp_path):
    for place in list(followed.glob("it-*")):
        shutil.rmtree(place)
    copy = copy_up_to(find(followed, "latest"), tmp_path / "other")
    go_back_to(copy)
    names = {"best": "it-00000001", "epoch-1": "it-00000001", "latest": "it-00000002"}
    assert links_in(tmp_path / "other") == names


def test_directories_under_names_are_settled_by_one_look_at_the_manifests(root, monkeypatch):
    for iteration in range(1, 9):
        commit_at(root, iteration, f"epoch-{iteration}")
    copied(root, *(f"epoch-{iteration}" for iteration in range(1, 9)))
    looks, real = [], emrun.storage.checkpoints._manifests
    monkeypatch.setattr(emrun.storage.checkpoints, "_manifests", lambda root: looks.append(root) or real(root))
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
    assert f"{root}/best is a directory that is not a checkpoint; it is now best-replaced-1" in caplog.messages
    assert links_in(root) == {"latest": "it-00000002", "best": "it-00000002"}


def test_an_empty_directory_under_a_name_is_a_name_that_is_missing(root):
    commit_at(root, 1, "best")
    place = commit_at(root, 2, "latest")
    unlinked(root)
    (root / "best").mkdir()
    (root / "latest").mkdir()
    go_back_to(place)
    assert links_in(root) == {"best": "it-00000001", "latest": "it-00000002"}


def test_a_link_that_somebody_made_keeps_a_checkpoint(root):
    known = Names(root)
    for iteration in (1, 2):
        commit(root, save, epoch=0, iteration=iteration, names=["latest"], known=known)
        (root / f"mine-{iteration}").symlink_to(f"it-{iteration:08d}")
    commit(root, save, epoch=0, iteration=3, names=["latest"], known=known)
    assert names_in(root) == [*(f"it-{n:08d}" for n in (1, 2, 3)), "latest", "mine-1", "mine-2"]


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
