"""The connection between a dataset's stream function and the loop."""

import copy
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from array import array

import numpy as np
import pytest

from emrun.errors import StreamError
from emrun.loop.interrupts import Interrupts
from emrun.randomness import preserved_randomness
from emrun.streams import read_ahead
from emrun.streams.stream import StreamPosition, StreamWrapper

BUFFERS = [0, 1, 2, 3, 4, 16]


@pytest.fixture(autouse=True)
def no_reader_is_left(monkeypatch):
    """Every test ends the threads that it began, however busy the machine is."""
    monkeypatch.setattr(read_ahead, "_PATIENCE", 60)
    monkeypatch.setattr(read_ahead, "_LOOK_AGAIN", 60)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")]


def by_context(batches=7):
    """A stream that has the number of its pass in every batch, and draws random numbers."""

    def stream(ctx):
        for rows in ctx.batches(2 * batches - 1, 2, shuffle=True):
            yield {"pass": ctx.epoch, "rows": rows.tolist(), "drawn": ctx.rng.random()}

    return stream


def by_counting(batches=7):
    """A generator without a context; it counts its passes itself."""
    passes = itertools.count(1)

    def stream():
        number = next(passes)
        for index in range(batches):
            yield {"pass": number, "index": index}

    return stream


def always_the_same(batches=7):
    return lambda: ({"index": index} for index in range(batches))


def lists(batches=7):
    return lambda: [{"index": index} for index in range(batches)]


STREAMS = [by_context, by_counting, always_the_same, lists]


def flat(epochs):
    return list(itertools.chain.from_iterable(epochs))


# The same batches, whatever the buffer


@pytest.mark.parametrize("epoch_size", [-1, None, 1, 3, 5, 7, 10, 15])
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("make", STREAMS)
def test_batches_and_their_order_do_not_depend_on_the_buffer(make, buffer, epoch_size):
    def epochs(buffer):
        with StreamWrapper(make(), buffer, -1 if epoch_size is None else epoch_size, "train") as stream:
            return [(list(stream), stream.position) for _ in range(5)]

    found = epochs(buffer)
    assert found == epochs(0)
    assert all(len(batches) == (7 if epoch_size in (-1, None) else epoch_size) for batches, _ in found)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_an_epoch_is_a_pass_by_default(buffer):
    with StreamWrapper(by_counting(3), buffer) as stream:
        for number in (1, 2, 3):
            assert list(stream) == [{"pass": number, "index": index} for index in range(3)]
            assert stream.position == (number + 1, 0)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_epochs_of_a_size_continue_one_iteration_and_start_the_next_pass_when_it_is_exhausted(buffer):
    with StreamWrapper(by_counting(3), buffer, epoch_size=5) as stream:
        epochs = [[(batch["pass"], batch["index"]) for batch in stream] for _ in range(3)]
    assert epochs == [
        [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)],
        [(2, 2), (3, 0), (3, 1), (3, 2), (4, 0)],
        [(4, 1), (4, 2), (5, 0), (5, 1), (5, 2)],
    ]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("epoch_size", [2, 3, 4, 8])
def test_epochs_of_any_size_hand_out_the_same_batches_in_the_same_order(buffer, epoch_size):
    with StreamWrapper(by_context(), buffer, epoch_size, seed=3) as stream:
        found = flat(list(stream) for _ in range(12))
    with StreamWrapper(by_context(), seed=3) as stream:
        expected = flat(list(stream) for _ in range(14))
    assert found == expected[: 12 * epoch_size]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_another_seed_or_name_has_another_order(buffer):
    def rows(**options):
        with StreamWrapper(by_context(), buffer, **options) as stream:
            return [batch["rows"] for batch in stream]

    first = rows(name="train", seed=1)
    assert rows(name="train", seed=1) == first
    assert rows(name="train", seed=2) != first
    assert rows(name="valid", seed=1) != first


@pytest.mark.parametrize("buffer", [0, 2])
def test_any_iterable_is_a_stream(buffer):
    class Batches:
        def __iter__(self):
            return iter([{"x": [1]}, {"x": [2]}])

    for value in (Batches(), [{"x": [1]}, {"x": [2]}], ({"x": [1]}, {"x": [2]})):
        with StreamWrapper(lambda value=value: value, buffer) as stream:
            assert [list(stream), list(stream)] == [[{"x": [1]}, {"x": [2]}]] * 2


@pytest.mark.parametrize("buffer", [0, 1, 4])
def test_a_batch_that_is_none_does_not_end_the_epoch(buffer):
    with StreamWrapper(lambda: [{"x": [1]}, None, {"x": [2]}], buffer) as stream:
        assert list(stream) == [{"x": [1]}, None, {"x": [2]}]


# Leaving early, going on


@pytest.mark.parametrize("reenter", [False, True])
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("make", STREAMS)
def test_an_iteration_that_was_left_early_continues_where_it_was_left(make, buffer, reenter):
    with StreamWrapper(make()) as whole:
        expected = flat(list(whole) for _ in range(3))
    stream = StreamWrapper(make(), buffer)
    found = []
    stream.__enter__()
    for taken in (1, 3, 2, 0, 1, 7, 4):  # of passes of 7
        found += itertools.islice(stream, taken)
        if reenter:
            stream.__exit__(None, None, None)
            assert not readers()
            stream.__enter__()
    stream.__exit__(None, None, None)
    # A pass that was left after its last batch is over when it is asked for the next.
    expected_taken = [1, 3, 2, 0, 1, 0, 4]
    assert found == expected[: sum(expected_taken)]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_leaving_the_block_keeps_what_was_read_ahead(buffer):
    made = []

    def stream():
        for index in range(10):
            made.append(index)
            yield index

    wrapper = StreamWrapper(stream, buffer)
    found = []
    for _ in range(11):
        with wrapper:
            found += itertools.islice(wrapper, 1)
    assert found == made == list(range(10))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_an_epoch_of_a_size_that_was_left_early_continues_to_its_end(buffer):
    with StreamWrapper(by_counting(5), buffer, epoch_size=4) as stream:
        assert [b["index"] for b in itertools.islice(stream, 3)] == [0, 1, 2]
        assert [b["index"] for b in stream] == [3]
        assert [b["index"] for b in stream] == [4, 0, 1, 2]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("epoch_size", [-1, 3])
def test_an_evaluation_always_starts_from_the_beginning_of_pass_0(buffer, epoch_size):
    with StreamWrapper(by_context(), buffer, epoch_size, training=False) as stream:
        first = list(stream)
        assert {batch["pass"] for batch in first} == {0}
        for taken in (1, 3, 6):
            assert list(itertools.islice(stream, taken)) == first[:taken]
            assert stream.position.pass_number == 0
        assert list(stream) == first
    with stream:
        assert list(stream) == first


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_position_counts_what_was_handed_out_not_what_was_read_ahead(buffer):
    with StreamWrapper(by_counting(4), buffer) as stream:
        assert stream.position == StreamPosition(1, 0)
        positions = [stream.position for _ in stream]
        assert positions == [(1, 1), (1, 2), (1, 3), (1, 4)]
        assert stream.position == (2, 0)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("make", [by_context, always_the_same, lists])
def test_seeking_continues_as_if_the_stream_had_been_read_up_to_there(make, buffer):
    with StreamWrapper(make(), buffer) as stream:
        passes = [list(stream) for _ in range(3)]
    for number in (1, 2):
        for batch in range(8):
            with StreamWrapper(make(), buffer) as stream:
                stream.seek(StreamPosition(number, batch))
                assert stream.position == (number, batch)
                assert list(stream) == passes[number - 1][batch:]
                assert list(stream) == passes[number]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("make", [by_context, always_the_same])
def test_seeking_with_an_epoch_size_wraps_at_the_end_of_the_pass(make, buffer):
    with StreamWrapper(make()) as stream:
        expected = flat(list(stream) for _ in range(3))
    for batch in range(8):
        with StreamWrapper(make(), buffer, epoch_size=5) as stream:
            stream.seek(StreamPosition(1, batch))
            assert list(stream) == expected[batch : batch + 5]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_seeking_drops_what_was_read_ahead(buffer):
    with StreamWrapper(by_context(), buffer) as stream:
        first = list(itertools.islice(stream, 3))
        stream.seek(StreamPosition(1, 1))
        assert next(iter(stream)) == first[1]


@pytest.mark.parametrize("epoch_size", [-1, 3])
@pytest.mark.parametrize("buffer", [0, 1, 4])
@pytest.mark.parametrize("make", [by_context, always_the_same, lists])
def test_seeking_beyond_the_end_is_an_error(make, buffer, epoch_size):
    with StreamWrapper(make(), buffer, epoch_size, "train") as stream:
        stream.seek(StreamPosition(1, 8))
        for _ in range(2):  # and it stays one
            with pytest.raises(StreamError, match="stream 'train' has 7 batches; position 8 is beyond its end"):
                list(stream)


@pytest.mark.parametrize("buffer", [0, 2])
def test_seeking_leaves_out_rows_without_reading_them(buffer):
    made = []

    def stream(ctx):
        for rows in ctx.batches(10, 2):
            made.append(rows.tolist())
            yield rows

    with StreamWrapper(stream, buffer) as wrapper:
        wrapper.seek(StreamPosition(1, 3))
        assert [rows.tolist() for rows in wrapper] == made == [[6, 7], [8, 9]]


# Empty streams and functions that return none


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("epoch_size", [-1, 1, 3])
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.timeout(20)
def test_an_empty_stream_ends_instead_of_hanging(buffer, epoch_size, training):
    for function in (lambda: iter(()), list, lambda ctx: ctx.batches(0, 3)):
        with StreamWrapper(function, buffer, epoch_size, training=training) as stream:
            assert [list(stream), list(stream)] == [[], []]


@pytest.mark.parametrize("buffer", [0, 2])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (5, "int")])
def test_a_stream_function_that_returns_no_iterable_is_an_error(value, kind, buffer):
    with StreamWrapper(lambda: value, buffer, name="valid") as stream:
        with pytest.raises(StreamError, match=rf"stream 'valid': its function returned {kind}; .*`yield`") as raised:
            list(stream)
        assert raised.value.exit_status == 2


# The block, the thread, the profile


@pytest.mark.parametrize("training", [True, False])
def test_a_buffered_stream_is_iterated_inside_its_block_only(training):
    stream = StreamWrapper(by_counting(), 2, name="train", training=training)
    with pytest.raises(ValueError, match="stream 'train' is read ahead: iterate it inside `with stream:`"):
        next(iter(stream))
    with stream:
        assert len(list(stream)) == 7
    with pytest.raises(ValueError, match="inside `with stream:`"):
        next(iter(stream))


def test_an_iteration_that_began_inside_the_block_does_not_start_the_thread_again_behind_it():
    stream = StreamWrapper(by_counting(), 2)
    with stream:
        iteration = iter(stream)
        assert next(iteration)["index"] == 0
    with pytest.raises(ValueError, match="inside `with stream:`"):
        next(iteration)
    with stream:
        assert next(iter(stream))["index"] == 1


def test_an_unbuffered_stream_needs_no_block():
    assert len(list(StreamWrapper(by_counting()))) == 7


def test_an_unbuffered_stream_is_read_in_the_threads_of_the_loop():
    def stream():
        yield threading.current_thread()

    assert list(StreamWrapper(stream)) == [threading.current_thread()]


def test_a_buffered_stream_is_read_in_a_thread_of_its_own_which_lives_for_one_pass():
    def stream():
        for _ in range(3):
            yield threading.current_thread()

    with StreamWrapper(stream, 2, name="train") as wrapper:
        first, second = set(wrapper), set(wrapper)
        assert not readers()  # at the end of a pass, before the end of the block
    assert len(first) == len(second) == 1
    assert not first & second
    assert {thread.name for thread in first | second} == {"emrun-read-train"}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_no_thread_is_left_after_the_block_or_close(buffer, taken):
    with StreamWrapper(by_counting(50), buffer) as stream:
        list(itertools.islice(stream, taken))
    assert not readers()
    with stream:
        list(itertools.islice(stream, taken))
        stream.close()
        assert not readers()


@pytest.mark.parametrize("buffer", [0, 2])
def test_closing_drops_what_was_read_ahead_and_keeps_the_position(buffer):
    with StreamWrapper(by_context(), buffer) as stream:
        first = list(itertools.islice(stream, 2))
        stream.close()
        assert stream.position == (1, 2)
        rest = list(stream)
    with StreamWrapper(by_context()) as whole:
        assert first + rest == list(whole)


@pytest.mark.parametrize("buffer", [0, 1, 4])
@pytest.mark.parametrize("takes_context", [False, True])
def test_closing_ends_the_generator(buffer, takes_context):
    ended, begun = [], []

    def stream():
        try:
            yield from range(10)
        finally:
            ended.append(True)

    def kept():  # the garbage collector is not to end it
        begun.append(stream())
        return begun[0]

    with StreamWrapper((lambda ctx: stream()) if takes_context else kept, buffer) as wrapper:
        next(iter(wrapper))
        wrapper.close()
        assert ended == [True]


@pytest.mark.parametrize("epoch_size", [-1, 3, 10])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_profile_has_one_entry_for_each_batch(buffer, epoch_size):
    profile = {}
    with StreamWrapper(by_counting(), buffer, epoch_size, "train", profile) as stream:
        first, second = len(list(stream)), len(list(stream))
        assert list(profile) == ["read_batch_train"]
        assert len(profile["read_batch_train"]) == first + second
        stream.profile = {"read_batch_train": array("d")}
        handed_out = len(list(itertools.islice(stream, 2)))
        assert len(stream.profile["read_batch_train"]) == handed_out
    assert all(seconds >= 0 for seconds in profile["read_batch_train"])


# Errors of the producer


class Broken:
    """A stream of `count` batches that raises instead of batch `at`, and records its position."""

    def __init__(self, count, at, error):
        self.count, self.at, self.error = count, at, error
        self.threads = []
        self._begin()

    def _begin(self):
        self.made = self.taken = 0
        self.ended = False

    news = threading.Condition()

    def plain(self):
        return self._batches(range(self.count))

    def with_context(self, ctx):
        return self._batches(int(rows[0]) for rows in ctx.batches(self.count, 1))

    def _batches(self, indices):
        with self.news:
            self._begin()
        try:
            for index in indices:
                if index == self.at:
                    raise self.error
                with self.news:
                    self.made += 1
                    self.threads.append(threading.current_thread())
                    self.news.notify_all()
                yield {"index": index}
        finally:
            with self.news:
                self.ended = True
                self.threads.append(threading.current_thread())
                self.news.notify_all()

    def take(self, buffer):
        """Be slow: wait until the reader has nothing left to do before the next batch is taken."""
        with self.news:
            self.taken += 1
            if self.made - self.taken <= buffer // 2:  # else the reader waits until it is
                self.news.wait_for(lambda: self.ended or self.made >= self.taken + buffer)
            over, thread = self.ended, self.threads[-1]
        if over and thread is not threading.current_thread():
            thread.join()


ERRORS = [
    pytest.param(buffer, at, id=f"buffer {buffer}, batch {at}")
    for buffer in (0, 1, 4, 16)
    for at in sorted({0, 1, max(buffer - 1, 0), buffer, buffer + 1, 19})
]


@pytest.mark.parametrize("epoch_size", [-1, 30])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("kind", ["plain", "with_context"])
@pytest.mark.parametrize(("buffer", "at"), ERRORS)
@pytest.mark.timeout(20)
def test_an_error_reaches_the_loop_as_itself_after_the_batches_before_it(buffer, at, kind, slow, epoch_size):
    error = KeyError("no such image")
    broken = Broken(20, at, error)
    found = []
    with StreamWrapper(getattr(broken, kind), buffer, epoch_size, "train") as stream:
        for attempt in range(3):  # also if the caller catches the error: no epoch ends early without one
            with pytest.raises(KeyError) as raised:
                for batch in stream:
                    found.append(batch["index"])
                    if slow and attempt == 0:
                        broken.take(buffer)
            assert raised.value is error
            assert found == list(range(at))
            assert stream.position == (1, at)
            assert not readers()
    assert "_batches" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert error.__notes__[0] == f"in stream 'train', batch {at} of the pass"


@pytest.mark.parametrize("buffer", [0, 1, 4, 16])
@pytest.mark.parametrize("kind", ["plain", "with_context"])
def test_a_stream_that_works_again_continues_at_the_batch_that_failed(kind, buffer):
    broken = Broken(20, 7, OSError("the network is down"))
    with StreamWrapper(getattr(broken, kind), buffer) as stream:
        found = []
        with pytest.raises(OSError, match="the network is down"):
            found.extend(batch["index"] for batch in stream)
        broken.at = None
        assert [batch["index"] for batch in stream] == list(range(7, 20))


@pytest.mark.parametrize("buffer", [0, 4])
def test_an_error_of_the_stream_function_itself_is_noted_too(buffer):
    def stream():
        raise KeyError("no such folder")

    with StreamWrapper(stream, buffer, name="valid") as wrapper, pytest.raises(KeyError) as raised:
        list(wrapper)
    assert raised.value.__notes__ == ["in stream 'valid', batch 0 of the pass"]


@pytest.mark.parametrize("buffer", [0, 1, 4])
def test_an_evaluation_that_failed_starts_from_the_beginning_again(buffer):
    broken = Broken(10, 5, KeyError("x"))
    with StreamWrapper(broken.plain, buffer, training=False) as stream:
        for _ in range(2):
            found = []
            with pytest.raises(KeyError):
                found.extend(batch["index"] for batch in stream)
            assert stream.position == (0, 5)
        broken.at = None
        assert len(list(stream)) == 10


@pytest.mark.parametrize("buffer", [0, 4])
def test_an_error_in_a_later_pass_of_an_epoch_is_not_its_end(buffer):
    passes = itertools.count(1)

    def stream():
        number = next(passes)
        yield from ((number, index) for index in range(3))
        if number == 2:
            raise KeyError("x")

    found = []
    with StreamWrapper(stream, buffer, epoch_size=10) as wrapper, pytest.raises(KeyError):
        for batch in wrapper:
            found.append(batch)
    assert found == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


# Producers that hang, and interrupts


class Stuck:
    """A stream that blocks at batch `at` of its first pass until it is released."""

    def __init__(self, at):
        self.at = at
        self.reached = threading.Event()
        self.released = threading.Event()
        self.thread = None

    def __call__(self):
        for index in range(5):
            if index == self.at and not self.reached.is_set():
                self.thread = threading.current_thread()
                self.reached.set()
                self.released.wait()
            yield index

    def free(self):
        self.released.set()
        self.thread.join()


@pytest.mark.timeout(20)
def test_leaving_the_block_returns_although_the_producer_hangs(monkeypatch, caplog):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    stuck = Stuck(at=1)
    with caplog.at_level(logging.WARNING), StreamWrapper(stuck, 2, name="train") as stream:
        assert next(iter(stream)) == 0
        stuck.reached.wait()
    assert caplog.messages == ["stream 'train' does not stop; its reader thread is left behind"]
    assert stuck.thread.daemon
    assert stream.position == (1, 1)
    with stream:  # what was left behind is not used again
        assert list(stream) == [1, 2, 3, 4]
    stuck.free()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("leave", ["close", "seek"])
def test_closing_returns_although_the_producer_hangs(leave, monkeypatch, caplog):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    stuck = Stuck(at=1)
    with caplog.at_level(logging.WARNING), StreamWrapper(stuck, 2) as stream:
        assert next(iter(stream)) == 0
        stuck.reached.wait()
        stream.close() if leave == "close" else stream.seek(StreamPosition(1, 0))
    assert "left behind" in caplog.text
    stuck.free()


@pytest.mark.timeout(20)
def test_an_interrupt_ends_the_wait_for_a_batch():
    interrupted = threading.Event()
    stuck = Stuck(at=2)
    with StreamWrapper(stuck, 2, interrupted=interrupted.is_set) as stream:

        def interrupt():
            stuck.reached.wait()
            interrupted.set()
            stream.wake()

        helper = threading.Thread(target=interrupt)
        helper.start()
        assert list(stream) == [0, 1]
        helper.join()
        assert stream.position == (1, 2)
        interrupted.clear()
        stuck.released.set()
        assert list(stream) == [2, 3, 4]  # nothing was lost


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_batch(number, monkeypatch):
    monkeypatch.setattr(read_ahead, "_LOOK_AGAIN", 0.1)  # the signal may come just before the wait begins
    stuck = Stuck(at=2)
    interrupts = Interrupts(lambda: stream.wake())
    helper = threading.Thread(target=lambda: (stuck.reached.wait(), os.kill(os.getpid(), number)))
    with StreamWrapper(stuck, 2, interrupted=lambda: interrupts.signal is not None) as stream:
        interrupts.install()
        try:
            helper.start()
            assert list(stream) == [0, 1]
        finally:
            interrupts.restore()
            helper.join()
            stuck.released.set()
    assert interrupts.signal == number


def test_waking_a_stream_that_nobody_waits_for_does_nothing():
    stream = StreamWrapper(by_counting(), 2)
    stream.wake()
    with stream:
        next(iter(stream))
        stream.wake()
        assert len(list(stream)) == 6


# Stress


@pytest.fixture
def busy_switching():
    """Make threads take turns as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("epoch_size", [-1, 4])
@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_many_short_passes_under_stress_equal_those_without_a_thread(buffer, epoch_size):
    def make(gives_way):
        def stream(ctx):
            for rows in ctx.batches(int(ctx.rng.integers(1, 12)), 2, shuffle=True):
                if gives_way and ctx.rng_for(rows[0]).random() < 0.3:
                    time.sleep(0)  # hands the interpreter lock on
                yield ctx.epoch, rows.tolist(), ctx.rng.random()

        return stream

    def epochs(buffer):
        found = []
        stream = StreamWrapper(make(buffer > 0), buffer, epoch_size, seed=9)
        for number in range(120):
            with stream:
                if number % 5 == 3:
                    found.append(list(itertools.islice(stream, 2)))
                found.append(list(stream))
                if buffer and number % 3 == 0:
                    time.sleep(0)
        return found

    assert epochs(buffer) == epochs(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_no_error_is_lost_under_stress(buffer):
    for at in range(60):
        broken = Broken(60, at, KeyError(at))
        found = []
        with StreamWrapper(broken.plain, buffer) as stream, pytest.raises(KeyError):
            for batch in stream:
                found.append(batch["index"])
        assert found == list(range(at))


# What is known of a stream, and another one that goes where it was


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
    straight = flat([list(stream) for stream in [StreamWrapper(live(), name="train")] for _ in range(4)])
    before, after = (StreamWrapper(live(), buffer, name="train") for _ in range(2))
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
    before, after = (StreamWrapper(live(), name="train") for _ in range(2))
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
    before, after = StreamWrapper(always_the_same(7), name="train"), StreamWrapper(always_the_same(batches))
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

        return StreamWrapper(stream, name="train")

    before, after = make(), make()
    assert [len(list(before)) for _ in range(2)] == [3, 0]
    after.load_state_dict(before.state_dict())
    assert after.restore()
    assert after.position == (3, 0)
    assert [batch["pass"] for batch in after] == [3, 3, 3]


def test_seeking_in_a_stream_with_a_state_reads_up_to_there():
    stream = StreamWrapper(live(), name="train")
    stream.seek(StreamPosition(1, 3))
    assert [len(batch["seen"]) for batch in stream] == [4, 5]


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_batch():
    stream = live()
    stream().state["lock"] = threading.Lock()
    with pytest.raises(ValueError, match="stream 'train'"):
        next(iter(StreamWrapper(stream, name="train")))


@pytest.mark.parametrize("buffer", [0, 2])
def test_a_state_that_is_loaded_into_a_stream_in_use_ends_what_it_was_reading(buffer):
    before, after = (StreamWrapper(by_context(), buffer, name="train") for _ in range(2))
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

    before, after = (StreamWrapper(stream, name="train") for _ in range(2))
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


def stops_in_a_generator():
    yield {"x": [0]}
    next(iter(()))
    yield {"x": [1]}


def stops_before_it_begins():
    return [next(iter(()))]


@pytest.mark.parametrize("options", [{}, {"buffer_size": 2}], ids=str)
@pytest.mark.parametrize("function", [stops_in_a_generator, stops_before_it_begins])
def test_a_stop_iteration_that_a_stream_raises_is_an_error_that_names_it(function, options):
    stream = StreamWrapper(function, name="train", **options)
    message = rf"stream 'train' raised StopIteration \(.*test_stream.py:\d+, in {function.__name__}\)"
    with stream, pytest.raises(StreamError, match=message):
        list(stream)
