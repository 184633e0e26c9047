"""Weights of any program: runs, checkpoints, directories and files; hostile files are clear errors."""

import errno
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from emrun.base.errors import StorageError, UsageError
from emrun.storage.checkpoints import commits
from emrun.storage.checkpoints.saved_weights import read_saved
from emrun.storage.checkpoints.weights import write_weights

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1.0, 2.0])}
CALLED = []


def same(found, weights=WEIGHTS):
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def checkpoint(root, iteration, *names, weights=WEIGHTS):
    return commits.commit(
        root, lambda place: write_weights(weights, {}, place), epoch=1, iteration=iteration, names=names
    )


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint `best` and a later one."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text("{}")
    checkpoint(directory / "checkpoints", 10, "best")
    checkpoint(directory / "checkpoints", 20, "latest", weights={"b": torch.zeros(1)})
    return directory


def test_a_run_means_its_best(run):
    found = read_saved(run)
    assert same(found.tensors)
    assert found.source == f"{run} (best: it-00000010)"


def test_a_checkpoint_is_read_by_its_name_or_directory(run):
    for place in ("best", "it-00000010"):
        assert same(read_saved(run / "checkpoints" / place).tensors)


def test_a_run_without_best_gives_its_latest_and_says_so(run):
    (run / "checkpoints" / "best").unlink()
    assert read_saved(run).source == f"{run} (the run has no best; latest: it-00000020)"


def test_a_run_without_checkpoints_is_an_error(tmp_path):
    (tmp_path / "trace.yaml").write_text("{}")
    with pytest.raises(UsageError, match="no checkpoint; available: nothing"):
        read_saved(tmp_path)


@pytest.mark.parametrize("place", ["", "checkpoints/best"])
def test_a_damaged_checkpoint_is_an_error(run, place):
    path = run / "checkpoints" / "it-00000010" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match=r"model.safetensors differs from its manifest"):
        read_saved(run / place)


def test_safetensors_are_not_read_before_they_are_used(tmp_path):
    save_file({"a": torch.ones(10_000_000)}, tmp_path / "a.safetensors")

    def anonymous():
        with Path("/proc/self/status").open() as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    before = anonymous()
    found = read_saved(tmp_path / "a.safetensors").tensors["a"]
    torch.empty(10_000_000).copy_(found)
    assert anonymous() - before < 10_000  # KB; the tensor has 40,000


def test_names_that_are_left_out_of_safetensors_because_they_are_tied_come_back(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    save_model(module, str(tmp_path / "model.safetensors"))
    found = read_saved(tmp_path).tensors
    assert sorted(found) == ["0.weight", "1.weight"]
    assert torch.equal(found["0.weight"], found["1.weight"])


def shards(folder, **files):
    """Write an index and its files: name of a file -> names of tensors; return the index."""
    names = {}
    for file, tensors in files.items():
        save_file({name: WEIGHTS[name] for name in tensors}, folder / f"{file}.safetensors")
        names |= dict.fromkeys(tensors, f"{file}.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return path


def test_shards_are_read_by_their_index_or_directory(tmp_path):
    index = shards(tmp_path, one=["a.weight"], two=["a.bias"])
    (tmp_path / "config.json").write_text("{}")
    assert same(read_saved(index).tensors)
    assert same(read_saved(tmp_path).tensors)


def test_a_hub_keeps_links_to_its_files_elsewhere(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(WEIGHTS, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert same(read_saved(tmp_path / "snapshot").tensors)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "..", "", "a/b", "a\\b", "model.safetensors.index.json"]
)
def test_an_index_names_only_files_in_its_directory(tmp_path, file):
    save_file(WEIGHTS, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a.weight": file}}))
    with pytest.raises(StorageError, match="is not the name of a file with weights in its directory"):
        read_saved(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is not JSON"),
    ],
)
def test_a_wrong_index_is_an_error(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StorageError, match=message):
        read_saved(tmp_path)


def test_an_index_of_tensors_that_its_files_lack_is_an_error(tmp_path):
    index = shards(tmp_path, one=["a.weight"], two=["a.bias"])
    index.write_text(index.read_text().replace("a.bias", "b.bias"))
    with pytest.raises(StorageError, match=r"two.safetensors has no b.bias"):
        read_saved(index)


def test_entries_that_are_not_tensors_are_listed(tmp_path):
    torch.save({**WEIGHTS, "_extra_state": {"n": 1}}, tmp_path / "a.pt")
    found = read_saved(tmp_path / "a.pt")
    assert same(found.tensors)
    assert found.others == ["_extra_state"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(1), "it holds a Tensor, not a state dict"),
        ({"state_dict": WEIGHTS, "epoch": 3}, "it holds a mapping of state_dict, epoch, not a state dict"),
        ({}, "it holds a dict, not a state dict"),
        (nn.Linear(1, 1), "it needs torch.nn.modules.linear.Linear, .* nothing was called"),
    ],
)
def test_a_file_without_a_state_dict_is_an_error(tmp_path, content, message):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(StorageError, match=f"{message}.*torch.save\\(module.state_dict\\(\\), PATH\\)"):
        read_saved(tmp_path / "a.pt")


def test_a_file_that_cannot_be_opened_is_not_answered_with_how_to_save_it(tmp_path, monkeypatch):
    torch.save(WEIGHTS, tmp_path / "a.pt")

    def refuse(path, *arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*a.pt: Permission denied$") as caught:
        read_saved(tmp_path / "a.pt")
    assert caught.value.errno == errno.EACCES


class Hostile:
    """Calls a function when it is unpickled without care."""

    def __reduce__(self):
        return CALLED.append, (1,)


class Command:
    """Runs a command when it is unpickled without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_pickle_that_would_call_something_calls_nothing(tmp_path, is_archive):
    path, trace = tmp_path / "a.pt", tmp_path / "called"
    torch.save({**WEIGHTS, "x": Command(trace)}, path, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(StorageError, match=r"it needs posix.system, and only tensors .* nothing was called"):
        read_saved(path)
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(StorageError, match=r"cannot read .*a.pt: "):
        read_saved(path)
    assert not trace.exists()
    assert not CALLED


def test_an_archive_that_is_larger_inside_is_not_read(tmp_path):
    content = io.BytesIO()
    torch.save({"a": torch.zeros(1_000_000)}, content)
    with zipfile.ZipFile(content) as plain, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "a.pt").stat().st_size < 100_000
    with pytest.raises(StorageError, match="larger inside than outside"):
        read_saved(tmp_path / "a.pt")


def safetensors(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 100 * 10**9) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        safetensors({"a": {**TENSOR, "data_offsets": [0, 400]}}, b"0000"),
        safetensors({"a": {**TENSOR, "shape": [10**9, 10**9]}}, b"0000"),
        safetensors({"a": TENSOR, "b": TENSOR}, b"0000"),
        pickle.dumps(WEIGHTS),
    ],
    ids=["empty", "header of 100 GB", "header of 16 EB", "offsets", "shape", "overlap", "pickle"],
)
def test_safetensors_that_lie_are_an_error(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors: Error while deserializing header"):
        read_saved(tmp_path)


def test_pipes_devices_and_links_without_an_end_are_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("nowhere")
    for name, message in {
        "pipe.safetensors": "not a regular file",
        "zero.safetensors": "not a regular file",
        "loop": "too many levels of symbolic links",
        "broken": "does not exist",
    }.items():
        with pytest.raises((StorageError, UsageError), match=message):
            read_saved(tmp_path / name)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("google/bert", "google/bert does not exist; write the path of a run, a checkpoint or a file on this machine"),
        ("log", "log is neither a run nor a checkpoint, and has no .*; write the path of a file"),
    ],
)
def test_a_path_without_weights_is_an_error(tmp_path, monkeypatch, path, message):
    (tmp_path / "log").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        read_saved(Path(path))
