"""Tensors whose rows lie in the files of several ranks are read as those of one file, and forged places are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from emrun.base.encoding import Rows, encode
from emrun.base.errors import StateError, StorageError
from emrun.storage.checkpoints.manifest import SHARDS
from emrun.storage.checkpoints.saved_weights import read_saved
from emrun.storage.checkpoints.shards import (
    OF_STATE,
    has_tensors,
    put_back,
    read_tensors,
    taken_out,
    whole_of,
    write_places,
    write_shard,
)
from emrun.storage.checkpoints.state_file import load_state, save_state
from emrun.storage.checkpoints.weights import FILE, write_weights
from emrun.storage.sealed import describe

WEIGHT = torch.arange(15.0).view(5, 3)
PIECES = ((0, 2), (2, 4), (4, 5), (5, 5))  # the last rank has no rows


@pytest.fixture
def place(tmp_path):
    """The directory of weights that four ranks have written."""
    shards = []
    for rank, (begin, end) in enumerate(PIECES):
        tensors = {"weight": Rows(WEIGHT[begin:end], (5, 3), begin), "count": torch.tensor(7)}
        shards.append(write_shard({FILE: (tensors, {"tied": "weight"})}, rank, tmp_path))
    described = write_places(tmp_path, shards)
    assert described == {
        f"model-{rank}.safetensors": describe(tmp_path / f"model-{rank}.safetensors") for rank in range(4)
    }
    return tmp_path


def test_whole_tensors_are_those_of_one_file(place, tmp_path_factory):
    other = tmp_path_factory.mktemp("whole")
    write_weights({"weight": WEIGHT, "count": torch.tensor(7)}, {"tied": "weight"}, other)
    expected = read_saved(other).tensors
    for found in (read_saved(place).tensors, read_saved(place / SHARDS).tensors):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(whole_of(found[name]), tensor)
            for each in ("dtype", "shape", "layout", "is_meta", "is_nested"):
                assert getattr(found[name], each) == getattr(tensor, each)
            assert found[name].numel() == tensor.numel()
    assert "count" not in load_file(place / "model-1.safetensors")  # what is not sharded is written once
    assert has_tensors(place, FILE)
    assert has_tensors(other, FILE)
    assert not has_tensors(place, "training.safetensors")


@pytest.mark.parametrize("begin", range(6))
def test_any_rows_are_read_from_the_files_that_have_them(place, begin):
    for end in range(begin, 6):
        weight = read_tensors(place, FILE)["weight"]
        assert torch.equal(weight[begin:end], WEIGHT[begin:end])
        needed = {rank for rank, (first, last) in enumerate(PIECES) if max(begin, first) < min(end, last)}
        assert {*weight.files} == {f"model-{rank}.safetensors" for rank in needed}  # no other file is opened


def changed(key, **values):
    def change(content):
        content["tensors"][FILE]["weight"]["pieces"][key].update(values)

    return change


def without_piece(content):
    del content["tensors"][FILE]["weight"]["pieces"][1]


def without_last_piece(content):
    content["tensors"][FILE]["weight"]["pieces"] = content["tensors"][FILE]["weight"]["pieces"][:2]


def of_more_rows(content):
    content["tensors"][FILE]["weight"]["shape"][0] = 6


def of_unknown_dtype(content):
    content["tensors"][FILE]["weight"]["dtype"] = "load"


def tied_to_nothing(content):
    content["tied"][FILE]["tied"] = "nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed(2, end=6),
            r"weight has the rows 0 to 2 in .*, 4 to 6 in .*, but must be a tensor of 5 rows, each in one",
        ),
        (changed(1, begin=1), r"weight has the rows 0 to 2 in .*, 1 to 4 in .*, but must be a tensor of 5 rows"),
        (changed(1, begin=4, end=2), r"weight has the rows .*4 to 2 in .*, but must be a tensor of 5 rows"),
        (without_piece, r"weight has the rows 0 to 2 in model-0.safetensors, 4 to 5 in .*, but must be a tensor of"),
        (without_last_piece, r"weight has the rows 0 to 2 in .*2 to 4 in .*, but must be a tensor of 5 rows"),
        (of_more_rows, r"weight has the rows .*, but must be a tensor of 6 rows"),
        (changed(0, begin=-1), r"pieces\[0\].begin is -1, but must be a whole number from 0"),
        (changed(0, file="../model-0.safetensors"), r"pieces\[0\].file .*must be the name of a file in the same direc"),
        (changed(0, file="/etc/passwd"), r"pieces\[0\].file .*must be the name of a file in the same directory"),
        (of_unknown_dtype, r"dtype is 'load', but must be a dtype of torch"),
        (tied_to_nothing, r"its content cannot be used \(KeyError: 'nothing'\)"),
        (lambda content: content.pop("tied"), r"tied is missing"),
        (lambda content: content["tensors"].pop(FILE), r"its content cannot be used \(KeyError: 'model.safetensors'\)"),
    ],
)
def test_forged_places_are_refused(place, change, message):
    content = json.loads((place / SHARDS).read_text())
    change(content)
    (place / SHARDS).write_text(json.dumps(content))
    with pytest.raises(StateError, match=message):
        read_tensors(place, FILE)


@pytest.mark.parametrize("other", [WEIGHT[:1], WEIGHT[:2].double(), WEIGHT[:2, :2]], ids=["rows", "dtype", "columns"])
@pytest.mark.parametrize("end", [1, 2], ids=["a row", "the piece"])
def test_a_file_that_differs_from_its_places_is_refused(place, other, end):
    save_file({"weight": other.contiguous()}, place / "model-0.safetensors")
    with pytest.raises(StorageError, match=r"cannot read .*model-0\.safetensors: "):
        read_tensors(place, FILE)["weight"][:end]


def test_a_file_that_is_missing_or_a_link_is_refused(place, tmp_path_factory):
    (place / "model-2.safetensors").unlink()
    weight = read_tensors(place, FILE)["weight"]
    assert torch.equal(weight[:4], WEIGHT[:4])
    with pytest.raises(StorageError, match=r"model-2\.safetensors"):
        weight[:]
    target = tmp_path_factory.mktemp("other") / "model-2.safetensors"
    save_file({"weight": WEIGHT[4:].contiguous()}, target)
    (place / "model-2.safetensors").symlink_to(target)
    with pytest.raises(StorageError, match=r"is a link, which is not followed"):
        weight[:]


def test_a_state_has_its_tensors_back(tmp_path):
    state = {"model": {"groups": [{"lr": 0.1, "momentum": Rows(WEIGHT[:5], (5, 3), 0)}], "step": torch.tensor(3.0)}}
    rows = {}
    state = {"model": taken_out(encode(state["model"], "model", copied=True), rows)}
    assert {*rows} == {"['groups'][0]['momentum']"}
    save_state(state, tmp_path)
    write_places(tmp_path, [write_shard({OF_STATE: (rows, {})}, 0, tmp_path)])
    found = load_state(tmp_path)["model"]
    assert torch.equal(whole_of(found["groups"][0]["momentum"]), WEIGHT)
    assert (found["groups"][0]["lr"], found["step"]) == (0.1, torch.tensor(3.0))
    with pytest.raises(KeyError):
        put_back(state, {})
