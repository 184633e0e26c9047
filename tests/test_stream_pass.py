"""Batches that are read ahead and changed: what a stream may do with what it gave away."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from emrun.errors import StreamError
from emrun.state import digest
from emrun.stream import StreamWrapper
from emrun.stream_pass import checked_for_reuse


def test_an_array_that_stays_as_it_was_may_be_given_away_again(monkeypatch):
    looked = []
    monkeypatch.setattr("emrun.stream_pass.digest", lambda batch: looked.append(batch) or digest(batch))
    constant = np.ones(3)
    stream = StreamWrapper(lambda: [{"x": [index], "constant": constant} for index in range(40)], 4, name="train")
    with stream:
        assert len(list(stream)) == 40
    assert len(looked) == 8  # and then no more


def test_without_read_ahead_a_stream_may_change_what_it_gave_away():
    array = np.zeros(3)

    def changing():
        for index in range(9):
            array[:] = index
            yield {"x": array}

    assert [batch["x"][0] for batch in StreamWrapper(changing, name="train")] == list(range(9))


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_new_arrays_where_older_ones_lay_are_no_change(ahead):
    """The one of two batches ago is kept; else its memory would be taken for the next, with other numbers in it."""
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
        with stream, nullcontext() if is_enough else pytest.raises(StreamError, match="changes the 'x'"):
            assert [batch["x"][0] for batch in stream] == list(range(20))
