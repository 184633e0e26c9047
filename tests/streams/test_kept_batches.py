"""The batches that `overfit` keeps: which ones, once for all passes, and as copies."""

import random

import numpy as np
import pytest

from emrun.base.encoding import random_state
from emrun.streams.dataset_streams import KeptBatches
from emrun.streams.stream_pass import StreamPass


def numbers(ctx):
    for rows in ctx.batches(12, 2, shuffle=True):
        yield {"x": rows + ctx.epoch * 100}


def kept(function=numbers, count=3, seed=1):
    return KeptBatches(function, "train", seed, count)


def values(batches):
    return [getattr(each, "batch", each)["x"].tolist() for each in batches]  # the first tells the number of rows, too


def test_they_are_the_first_of_pass_1_in_every_call():
    batches = kept()
    first = values(StreamPass(numbers, "train", 1, 1).read())[:3]
    assert values(batches()) == values(batches()) == first
    assert values(kept(seed=2)()) != first


def test_a_batch_that_is_changed_in_place_is_as_before_in_the_next_call():
    batches = kept()
    before = values(batches())
    for batch in batches():
        batch["x"] += 1
        batch["y"] = 1
    assert values(batches()) == before
    assert [list(batch) for batch in batches()] == [["x"]] * 3


def test_a_stream_is_read_once_and_closed_and_only_so_far():
    reads = []

    def counted():
        try:
            for i in range(10):
                reads.append(i)
                yield {"x": np.array([i])}
        finally:
            reads.append("closed")

    batches = kept(counted, 2)
    for _ in range(3):
        assert values(batches()) == [[0], [1]]
    assert reads == [0, 1, "closed"]


def test_a_stream_that_draws_from_global_random_states_gives_the_same_and_leaves_these_as_they_were():
    def noisy():
        while True:
            yield {"x": np.array([random.random(), np.random.rand()])}

    random.seed(5)
    first = values(kept(noisy)())
    random.seed(6)
    before = random_state()["python"]
    assert values(kept(noisy)()) == first
    assert random_state()["python"] == before


class Stateful:
    def __init__(self):
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield {"x": np.array([self.position])}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_stream_with_a_state_gives_plain_batches():
    assert values(kept(Stateful)()) == [[1], [2], [3]]


def test_a_shorter_stream_gives_what_it_has_and_a_warning(caplog):
    assert len(values(kept(count=50)())) == 6
    assert "overfit: pass 1 of stream 'train' has only 6 batches" in caplog.text


def test_an_error_of_the_stream_is_raised_in_each_call():
    def broken():
        yield {"x": np.array([1])}
        raise OSError("gone")

    batches = kept(broken)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            values(batches())
