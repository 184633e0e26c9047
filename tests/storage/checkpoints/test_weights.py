"""The file of weights: what is read back from it, its permissions, and errors that name it."""

import errno
import os
import stat

import pytest
import torch

from emrun.base.errors import StorageError
from emrun.storage.checkpoints.weights import FILE, read_weights, write_weights


def write(directory, **tensors):
    write_weights(tensors, {}, directory)


def test_tied_weights_are_read_under_each_of_their_names(tmp_path):
    write_weights({"a": torch.arange(3), "c": torch.zeros(1)}, {"b": "a"}, tmp_path)
    found = read_weights(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0]}


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_truncated_file_is_an_error(tmp_path, kept):
    write(tmp_path, a=torch.ones(100))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
        read_weights(tmp_path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
        read_weights(tmp_path)


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*model.safetensors") as caught:
        write(tmp_path / "nowhere", a=torch.ones(1))
    assert caught.value.errno == errno.EIO


def test_a_dtype_that_safetensors_does_not_know_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*: safetensors has no torch.complex128"):
        write(tmp_path, a=torch.zeros(1, dtype=torch.complex128))


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002], ids=oct)
def test_the_umask_says_who_may_read_the_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        write(tmp_path, a=torch.ones(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o666 & ~umask
