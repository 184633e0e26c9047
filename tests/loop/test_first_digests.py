"""The checksums of first batches: of which batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emrun.loop.first_digests import FirstDigests
from emrun.storage.code.files import recorded_batches
from emrun.streams.bookmark import digests_of
from emrun.streams.stream import StreamPosition


def stream_at(name, pass_number, batch):
    return SimpleNamespace(name=name, position=StreamPosition(pass_number, batch))


def of_run(directory, later=lambda task: task()):
    return FirstDigests(SimpleNamespace(code=SimpleNamespace(directory=directory, later=later)))


def test_the_first_batch_of_the_first_pass_and_of_the_first_evaluation_counts(tmp_path):
    first_digests = of_run(tmp_path)
    for stream, *position in (("train", 0, 1), ("valid", 0, 1), ("valid", 0, 1), ("train", 1, 1), ("train", 2, 1)):
        first_digests.note(stream_at(stream, *position), {"x": [1]})
    first_digests.note(stream_at("test", 0, 2), {"x": [1]})  # a resume continues in the pass
    sources = digests_of({"x": [1]})
    keys = [("train", 0, 1), ("valid", 0, 1), ("train", 1, 1)]
    assert list(recorded_batches(tmp_path).items()) == [(key, sources) for key in keys]


@pytest.mark.parametrize("values", [np.zeros(3), torch.zeros(3)], ids=["array", "tensor"])
def test_a_batch_that_is_changed_afterwards_counts_as_it_was(tmp_path, values):
    tasks, expected = [], digests_of({"x": values})
    of_run(tmp_path, tasks.append).note(stream_at("train", 1, 1), {"x": values})
    values += 1
    tasks.pop()()
    assert recorded_batches(tmp_path) == {("train", 1, 1): expected}


def test_a_batch_that_is_another_one_than_before_is_a_warning(tmp_path, caplog):
    for values in ([1], [1], [2]):
        of_run(tmp_path).note(stream_at("train", 1, 1), {"x": values, "y": [0]})
    message = "stream 'train' has other data than when the run began: 'x' in the first batch of pass 1"
    assert caplog.messages == [message]


def test_without_a_run_or_a_record_nothing_is_noted():
    for run in (None, SimpleNamespace(code=None)):
        FirstDigests(run).note(stream_at("train", 0, 1), {"x": [1]})


def test_an_error_of_the_file_is_a_warning(tmp_path, caplog):
    of_run(tmp_path / "gone").note(stream_at("train", 0, 1), {"x": [1]})
    assert "the first batch of stream 'train' is not recorded: " in caplog.text


class Raising(dict):
    def items(self):
        raise ValueError("not now")


def test_a_batch_that_raises_is_not_noted(tmp_path):
    of_run(tmp_path).note(stream_at("train", 1, 1), Raising())
    assert recorded_batches(tmp_path) == {}
