"""The state file: what is read back from it, and what is refused."""

import zipfile
from pathlib import Path

import pytest
import torch

from emrun.base.encoding import encode
from emrun.base.errors import StorageError
from emrun.storage.checkpoints import state_file
from emrun.storage.checkpoints.state_file import load_state, read_back, save_state


def test_plain_types_and_tensors_come_back_as_they_were(tmp_path):
    state = {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], "b": {"c": torch.arange(3)}, 3: float("inf")}
    save_state(encode(state, "state"), tmp_path)
    found = load_state(tmp_path)
    assert found["a"] == state["a"]
    assert torch.equal(found["b"]["c"], torch.arange(3))
    assert found[3] == float("inf")


def test_a_state_with_usual_tensors_is_read_back_as_one_that_is_written(monkeypatch):
    state = {
        "a": [1, None, "x", (b"y", 2.5)],
        "b": {index: torch.ones(3).to(each) for index, each in enumerate(state_file._USUAL)},
    }
    usual = read_back(state, "state")
    monkeypatch.setattr(state_file, "_USUAL", ())
    written = read_back(state, "state")
    assert usual["a"] == written["a"] == state["a"]
    for index, each in state["b"].items():
        assert usual["b"][index] is not each
        assert usual["b"][index].dtype == written["b"][index].dtype == each.dtype
        assert torch.equal(written["b"][index], each)


def test_other_tensors_are_written_to_see_whether_they_can_be_read(monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: "written")
    for each in (torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex64)):
        assert read_back({"a": each}, "state") == "written"


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04garbage"])
def test_a_file_that_is_not_a_state_is_refused_without_bad_advice(tmp_path, content):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(StorageError, match="is not a saved state of a run") as caught:
        load_state(tmp_path)
    assert "weights_only" not in str(caught.value)


def test_nothing_in_a_state_is_ever_called(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "called").touch, ())

    torch.save({"a": Evil()}, tmp_path / "state.pt")
    with pytest.raises(StorageError):
        load_state(tmp_path)
    assert not (tmp_path / "called").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_full_disk_is_not_reported_as_something_else(tmp_path, size):
    (tmp_path / "state.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save_state({"a": torch.zeros(size)}, tmp_path)


def test_a_state_that_is_missing_may_have_been_removed(tmp_path):
    with pytest.raises(StorageError, match=r"it is missing; `emrun prune --optimizer-states` removes it"):
        load_state(tmp_path)


def test_what_takes_more_memory_than_the_file_is_refused(tmp_path):
    inner = [0]
    for _ in range(60):
        inner = [inner, inner]
    for value in (inner, torch.zeros(1).expand(10_000, 10_000)):
        torch.save({"a": value}, tmp_path / "state.pt")
        with pytest.raises(StorageError, match="is not a saved state of a run"):
            load_state(tmp_path)
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "large.pt")
    with zipfile.ZipFile(tmp_path / "large.pt") as large, zipfile.ZipFile(tmp_path / "state.pt", "w", 8) as small:
        for entry in large.infolist():
            small.writestr(entry.filename, large.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["a"].numel() == 1_000_000
    with pytest.raises(StorageError, match="is not a saved state of a run"):
        load_state(tmp_path)
