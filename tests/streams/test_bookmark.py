"""The state of a stream, and another stream that continues where it was."""

import copy
import itertools
import threading

import numpy as np
import pytest
from doubles import always_the_same, by_context, flat, readers, wrapped

from emrun.base.randomness import preserved_randomness
from emrun.streams import bookmark
from emrun.streams.stream import StreamPosition

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


class Live:
    """An object that returns and loads its state without a copy, and keeps changing it."""

    def __init__(self):
        self.state = {"seen": [], "passes": 0}

    def __iter__(self):
        while len(self.state["seen"]) < 5:
            self.state["seen"].append(10 * self.state["passes"] + len(self.state["seen"]))
            yield {"seen": list(self.state["seen"])}
        self.state["seen"].clear()
        self.state["passes"] += 1

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def live():
    """Return a stream function that gives the same object for each pass."""
    stream = Live()
    return lambda: stream


@pytest.mark.parametrize("buffer", [0, 3])
@pytest.mark.parametrize("at", [1, 3, 5, 6, 8, 10])
def test_a_state_that_the_stream_keeps_changing_is_the_one_before_the_batch(at, buffer):
    straight = flat([list(stream) for stream in [wrapped(live(), name="train")] for _ in range(4)])
    before, after = (wrapped(live(), buffer, name="train") for _ in range(2))
    with before:
        assert list(itertools.islice((batch for _ in range(3) for batch in before), at)) == straight[:at]
        if at % 5 == 0:
            assert list(before) == []
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.restore()
        with after:
            rest = [batch for _ in range(2) for batch in after]
    assert rest == straight[at : at + len(rest)]
    assert len(rest) > 5


def test_a_state_between_passes_stays_as_it_was_saved_and_is_given_on():
    before, after = (wrapped(live(), name="train") for _ in range(2))
    for _ in range(2):
        list(before)
    state = before.state_dict()
    expected = copy.deepcopy(state["end_of_pass"]["before_last"])
    after.load_state_dict(state)
    assert after.restore()
    assert after.state_dict()["end_of_pass"]["before_last"] == expected
    assert len(list(after)) == 5
    assert state["end_of_pass"]["before_last"] == expected


@pytest.mark.parametrize("batches", [5, 6, 8])
def test_a_pass_that_has_another_length_by_now_is_not_the_same(batches):
    before, after = wrapped(always_the_same(7), name="train"), wrapped(always_the_same(batches))
    list(before)
    after.load_state_dict(before.state_dict())
    assert not after.restore()
    assert after.position == (2, 0)
    assert len(list(after)) == batches


def test_a_resume_behind_an_empty_pass_begins_the_pass_after_it():
    def make():
        def stream(ctx):
            for rows in ctx.batches(0 if ctx.epoch == 2 else 3, 1):
                yield {"pass": ctx.epoch, "rows": rows.tolist()}

        return wrapped(stream, name="train")

    before, after = make(), make()
    assert [len(list(before)) for _ in range(2)] == [3, 0]
    after.load_state_dict(before.state_dict())
    assert after.restore()
    assert after.position == (3, 0)
    assert [batch["pass"] for batch in after] == [3, 3, 3]


def test_seeking_in_a_stream_with_a_state_reads_up_to_there():
    stream = wrapped(live(), name="train")
    stream.seek(StreamPosition(1, 3))
    assert [len(batch["seen"]) for batch in stream] == [4, 5]


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_batch():
    stream = live()
    stream().state["lock"] = threading.Lock()
    with pytest.raises(ValueError, match="stream 'train'"):
        next(iter(wrapped(stream, name="train")))


@pytest.mark.parametrize("buffer", [0, 2])
def test_a_state_that_is_loaded_into_a_stream_in_use_ends_what_it_was_reading(buffer):
    before, after = (wrapped(by_context(), buffer, name="train") for _ in range(2))
    with before, after:
        straight = list(itertools.islice(before, 3))
        state = before.state_dict()
        straight.extend(before)
        next(iter(after))
        after.load_state_dict(state)
        assert readers() == []
        assert after.restore()
        assert list(after) == straight[3:]


@pytest.mark.parametrize("at", [1, 3])
def test_a_stream_that_draws_when_it_begins_is_read_again_under_the_same_random_states(at):
    def stream():
        for index in np.random.permutation(20):
            yield {"index": int(index)}

    before, after = (wrapped(stream, name="train") for _ in range(2))
    with preserved_randomness():
        np.random.seed(1)
        head = list(itertools.islice(before, at))
        state = before.state_dict()
        rest = list(before)
        np.random.seed(2)
        after.load_state_dict(state)
        assert after.restore()
        assert list(after) == rest
    assert len(head + rest) == 20


def test_the_checksums_of_a_batch_are_computed_once_also_of_a_batch_that_is_the_same_object(monkeypatch):
    batch = {"x": np.zeros(2)}
    stream = wrapped(lambda: itertools.repeat(batch, 3))
    digests, computed = bookmark.digests_of, []
    monkeypatch.setattr(bookmark, "digests_of", lambda each: (computed.append(0), digests(each))[1])
    found = []
    for _ in stream:
        found += [stream.state_dict()["digest"], stream.state_dict()["digest"]]
        batch["x"] += 1
    assert (len(computed), len(set(found))) == (3, 3)
    assert found[::2] == found[1::2]
