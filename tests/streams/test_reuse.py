"""Batches that are read ahead and changed: what a stream may do with a batch that it has yielded."""

import importlib.util
import itertools
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from emrun.base.encoding import digest
from emrun.base.errors import StreamError
from emrun.streams.reuse import checked_for_reuse
from emrun.streams.stream import StreamWrapper

FILE = Path(__file__).with_name("reusing_streams.py")
SPEC = importlib.util.spec_from_file_location("reusing_streams", FILE)
streams = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(streams)


def seen(kind, buffer):
    with StreamWrapper(streams.KINDS[kind], buffer, name="train") as stream:
        return [digest({**batch}) for batch in (list(stream) if buffer else stream)]


@pytest.mark.parametrize("kind", [*streams.COPIED, *streams.LEGAL])
def test_what_is_copied_or_unchanged_may_be_yielded_again(kind):
    assert seen(kind, 8) == seen(kind, 0)


@pytest.mark.parametrize("kind", streams.TOLD)
def test_what_is_filled_again_is_an_error(kind):
    with pytest.raises(StreamError, match=r"changed '[xy]' of a batch that it has already yielded"):
        seen(kind, 8)


def test_a_memoryview_that_is_filled_again_is_found_when_it_is_yielded_again():
    arrays = [np.zeros(4), np.zeros(4)]
    views = [memoryview(array) for array in arrays]

    def batches():
        for index in range(3):
            arrays[index % 2][:] = index
            yield {"x": views[index % 2]}

    with pytest.raises(StreamError, match="changed 'x' of a batch that it has already yielded"):
        list(checked_for_reuse(batches(), "train", 9))


def test_without_read_ahead_a_stream_may_change_a_yielded_batch():
    array = np.zeros(3)

    def changing():
        for index in range(9):
            array[:] = index
            yield {"x": array}

    assert [batch["x"][0] for batch in StreamWrapper(changing, name="train")] == list(range(9))


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_new_arrays_where_older_ones_lay_are_no_change(ahead):
    """The array of two batches ago is kept; otherwise its memory would be used for the next array."""
    batches = ({"y": [index]} if index % 2 else {"x": np.full(9, index)} for index in range(40))
    for number, batch in enumerate(checked_for_reuse(batches, "train", ahead)):
        assert next(iter(batch.values()))[0] == number
        del batch


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_parts_of_different_lengths_of_one_array_are_no_change(ahead):
    ones = np.arange(9)
    lengths = [4, 4, 2, 2, 4, 4, 9]
    batches = ({"mask": ones[:length]} for length in lengths)
    assert [len(batch["mask"]) for batch in checked_for_reuse(batches, "train", ahead)] == lengths


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_one_constant_after_another_is_no_change(ahead):
    constants = [np.full(3, value) for value in range(3)]
    batches = ({"x": constants[index // 3]} for index in range(9))
    assert [batch["x"][0] for batch in checked_for_reuse(batches, "train", ahead)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("prepared", "arrays"), [(False, 2), (True, 3)])
def test_one_batch_more_is_in_use_when_batches_are_prepared_and_one_is_read_ahead(prepared, arrays):
    def filled_in_turn(count):
        there = [np.zeros(3) for _ in range(count)]
        for index in range(20):
            there[index % count][:] = index
            yield {"x": there[index % count]}

    prefetch = (lambda batch: None) if prepared else None
    for count, is_enough in ((arrays - 1, False), (arrays, True)):
        stream = StreamWrapper(partial(filled_in_turn, count), 1, name="train", prefetch=lambda: prefetch)
        with stream, nullcontext() if is_enough else pytest.raises(StreamError, match="changed 'x'"):
            assert [batch["x"][0] for batch in stream] == list(range(20))


@pytest.mark.parametrize("part", [lambda values: values, torch.from_numpy], ids=["views", "tensors"])
def test_a_block_that_is_loaded_anew_while_other_parts_of_it_wait_is_an_error(part):
    """Without a comparison of the previous batch, which waits, no error would be raised."""

    def loaded():
        block = np.zeros((40, 4))
        for index in range(40):
            if index % 10 == 0:
                block[...] = index
            yield {"x": part(block[index % 10 * 4 : index % 10 * 4 + 4])}

    with pytest.raises(StreamError, match="changed 'x' of a batch that it has already yielded and that still waits"):
        list(checked_for_reuse(loaded(), "train", 2))


def test_views_that_change_while_in_use_cause_only_a_warning_as_a_hook_may_have_changed_them(caplog):
    data = np.zeros((10, 4))
    batches = ({"x": data[index]} for index in range(10))
    for batch in checked_for_reuse(batches, "train", 2, lambda: 0):
        batch["x"] += 1
    assert caplog.text.count("changed 'x' of a batch that it has already yielded and that is still in use") == 1


@pytest.mark.parametrize("kind", [object, float])
def test_an_object_that_is_made_into_a_new_array_each_time_is_no_change(kind):
    numbers = itertools.count()

    class Made:
        def __array__(self, dtype=None, copy=None):
            return np.array([(next(numbers),)], kind)

    made = Made()
    batches = ({"x": np.full(4, index), "extra": made} for index in range(20))
    assert all(batch["extra"] is made for batch in checked_for_reuse(batches, "train", 4))


def test_an_object_whose_missing_attributes_raise_another_error_is_let_through():
    class Lazy:
        def __getattr__(self, name):
            raise KeyError(name)

    batches = ({"x": [Lazy()] * 4, "y": Lazy()} for _ in range(9))
    assert len(list(checked_for_reuse(batches, "train", 4))) == 9


@pytest.mark.parametrize("kind", ["series with a time zone", "periods", "lists"])
def test_constants_of_pandas_and_pyarrow_that_are_made_into_new_arrays_are_no_change(kind):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    constant = {
        "series with a time zone": lambda: pandas.Series(pandas.date_range("2020", periods=4, tz="Europe/Berlin")),
        "periods": lambda: pandas.period_range("2020", periods=4, freq="M"),
        "lists": lambda: pyarrow.array([[1], [2], [3], [4]]),
    }[kind]()
    batches = ({"x": np.full(4, index), "extra": constant} for index in range(20))
    assert all(batch["extra"] is constant for batch in checked_for_reuse(batches, "train", 4))


def test_a_series_that_is_filled_again_is_an_error():
    pandas = pytest.importorskip("pandas")

    def filled():
        series = pandas.Series(np.zeros(4))
        for index in range(9):
            series[:] = index
            yield {"x": series}

    with pytest.raises(StreamError, match="changed 'x'"):
        list(checked_for_reuse(filled(), "train", 4))


def test_whether_an_object_has_an_array_is_asked_of_its_class():
    class Picture:
        @property
        def __array_interface__(self):
            raise AssertionError("its data is computed")

    batches = ({"x": [Picture()]} for _ in range(9))
    assert len(list(checked_for_reuse(batches, "train", 4))) == 9


@pytest.mark.parametrize(("waiting", "most"), [(0, 4), (5, 9), (100, 101)])
def test_of_large_batches_only_those_are_kept_that_may_wait_or_be_in_use(waiting, most):
    """Without the number of waiting batches, all 101 would be kept although no batch waits."""
    alive = []

    def large():
        for _ in range(150):
            values = np.empty(1 << 20)  # its memory is never touched
            alive.append(weakref.ref(values))
            yield {"x": values}
            del values

    batches = large()
    counts = []
    for batch in checked_for_reuse(batches, "train", 100, lambda: waiting):
        del batch
        counts.append(sum(each() is not None for each in alive))
    assert max(counts) <= most
    assert max(counts) >= min(waiting, 99) + 1
