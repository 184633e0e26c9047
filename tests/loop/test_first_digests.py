"""The checksums of first batches: of which batches, of how much of them, and of which types."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emrun.loop import first_digests as module
from emrun.loop.first_digests import FirstDigests
from emrun.storage.code.files import recorded_batches
from emrun.streams.stream import StreamPosition


def digests(batch):
    return module.digests(module.beginnings(batch))


def of_run(directory, later=lambda task: task()):
    return FirstDigests(SimpleNamespace(code=SimpleNamespace(directory=directory, later=later)))


def test_the_first_batch_of_the_first_pass_and_of_the_first_evaluation_counts(tmp_path):
    first_digests = of_run(tmp_path)
    for stream, *position in (("train", 0, 1), ("valid", 0, 1), ("valid", 0, 1), ("train", 1, 1), ("train", 2, 1)):
        first_digests.note(stream, StreamPosition(*position), {"x": [1]})
    first_digests.note("test", StreamPosition(0, 2), {"x": [1]})  # a resume continues in the pass
    sources = digests({"x": [1]})
    keys = [("train", 0, 1), ("valid", 0, 1), ("train", 1, 1)]
    assert list(recorded_batches(tmp_path).items()) == [(key, sources) for key in keys]


@pytest.mark.parametrize("values", [np.zeros(3), torch.zeros(3)], ids=["array", "tensor"])
def test_a_batch_that_is_changed_afterwards_counts_as_it_was(tmp_path, values):
    tasks, expected = [], digests({"x": values})
    of_run(tmp_path, tasks.append).note("train", StreamPosition(1, 1), {"x": values})
    values += 1
    tasks.pop()()
    assert recorded_batches(tmp_path) == {("train", 1, 1): expected}


def test_a_batch_that_is_another_one_than_before_is_a_warning(tmp_path, caplog):
    for values in ([1], [1], [2]):
        of_run(tmp_path).note("train", StreamPosition(1, 1), {"x": values, "y": [0]})
    message = "stream 'train' has other data than when the run began: 'x' in the first batch of pass 1"
    assert caplog.messages == [message]


def test_without_a_run_or_a_record_nothing_is_noted():
    for run in (None, SimpleNamespace(code=None)):
        FirstDigests(run).note("train", StreamPosition(0, 1), {"x": [1]})


def test_an_error_of_the_file_is_a_warning(tmp_path, caplog):
    of_run(tmp_path / "gone").note("train", StreamPosition(0, 1), {"x": [1]})
    assert "the first batch of stream 'train' is not recorded: " in caplog.text


VALUES = {
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "tensor": lambda: torch.arange(6).reshape(2, 3),
    "column": lambda: torch.arange(6).reshape(2, 3).t(),
    "empty": lambda: np.zeros((0, 3)),
    "scalar": lambda: torch.tensor(3.0),
    "text": lambda: ["a", "b"],
    "arrays": lambda: np.array(["a", "bc"]),
    "ragged": lambda: [np.arange(2), np.arange(3)],
    "nested": lambda: [{"boxes": np.zeros((1, 4)), "id": 3, "name": None}],
    "objects": lambda: np.array([np.arange(2), None], dtype=object),
}


def test_equal_values_have_equal_checksums_and_others_have_not():
    found = [digests({"x": make()})["x"] for make in VALUES.values()]
    assert found == [digests({"x": make()})["x"] for make in VALUES.values()]
    assert len(set(found)) == len(VALUES)
    assert None not in found


@pytest.mark.parametrize(
    "values",
    [object(), [object()], {"a": {1, 2}}, np.array([object()]), torch.zeros(2).to_sparse()],
    ids=["object", "list", "set", "array", "sparse"],
)
def test_values_of_other_types_have_no_checksum(values):
    assert digests({"x": values, "y": [1]}) == {"x": None, "y": digests({"y": [1]})["y"]}


def test_what_is_not_a_mapping_has_no_sources():
    assert digests([1, 2]) == digests({}) == {}


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("shape", [(1000, 1000), (1, 1000, 1000), (10**6,)])
def test_of_large_arrays_the_beginning_and_the_shape_count(make, shape):
    values = make(shape)
    before = digests({"x": values})["x"]
    values.reshape(-1)[-1] = 1
    assert digests({"x": values})["x"] == before
    values.reshape(-1)[0] = 1
    assert digests({"x": values})["x"] != before
    assert digests({"x": make((2, *shape))})["x"] != digests({"x": make((3, *shape))})["x"]


def test_of_mappings_texts_and_nested_lists_no_more_than_a_megabyte_is_looked_at():
    nested = []
    for _ in range(50):
        nested = [nested, nested]

    class Many(dict):
        def items(self):
            yield from ((number, 0) for number in range(2000))
            pytest.fail("read further than a megabyte")

    for values in (nested, Many(), {"a": Many()}, [Many()]):
        assert digests({"x": values})["x"] is not None
    texts = ["a" * 10**6, *(["b" * 10**6] * 1000)]
    before = digests({"x": texts})["x"]
    texts[1] = ""
    assert digests({"x": texts})["x"] == before
    assert digests({"x": ["a" * (10**6 + 1), *texts[1:]]})["x"] != before


def test_what_can_be_read_only_once_is_not_read():
    values = iter([1, 2])
    assert digests({"x": values}) == {"x": None}
    assert list(values) == [1, 2]


def test_of_long_lists_the_beginning_and_the_length_count():
    class Long(list):
        def __iter__(self):
            yield from range(2000)
            pytest.fail("read further than a megabyte")

    assert digests({"x": Long([0] * 10**6)})["x"] != digests({"x": Long([0] * 10**5)})["x"]
