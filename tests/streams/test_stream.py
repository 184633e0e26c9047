"""The connection between a dataset's stream function and the loop: batches, positions, the block, the thread."""

import itertools
import logging
import os
import signal
import threading
import time

import pytest
from campaign import thinned
from doubles import always_the_same, by_context, by_counting, flat, lists, readers, wrapped

from emrun.base.errors import StreamError
from emrun.loop.interrupts import Interrupts
from emrun.streams import read_ahead
from emrun.streams.stream import StreamPosition

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


BUFFERS = [0, 1, 2, 3, 4, 16]
FEW = [0, 1, 4]  # buffers, where the number itself changes nothing


# The same batches, whatever the buffer


SIZES_AND_BUFFERS = [(-1, 1), (-1, 4), (1, 2), (3, 1), (3, 4), (7, 2), (7, 16), (10, 1), (10, 4), (15, 3), (15, 16)]
"""Sizes of epochs, equal to a pass of 7 batches, smaller and larger; buffers likewise."""


@pytest.mark.parametrize(("epoch_size", "buffer"), thinned(SIZES_AND_BUFFERS, SIZES_AND_BUFFERS[::3]))
@pytest.mark.parametrize("make", [by_context, by_counting])
def test_batches_and_their_order_do_not_depend_on_the_buffer(make, buffer, epoch_size):
    def epochs(buffer):
        with wrapped(make(), buffer, epoch_size, "train") as stream:
            return [(list(stream), stream.position) for _ in range(5)]

    found = epochs(buffer)
    assert found == epochs(0)
    assert all(len(batches) == (7 if epoch_size == -1 else epoch_size) for batches, _ in found)


@pytest.mark.parametrize("buffer", FEW)
def test_an_epoch_is_a_pass_by_default(buffer):
    with wrapped(by_counting(3), buffer) as stream:
        for number in (1, 2, 3):
            assert list(stream) == [{"pass": number, "index": index} for index in range(3)]
            assert stream.position == (number + 1, 0)


@pytest.mark.parametrize("buffer", FEW)
def test_epochs_of_a_size_continue_one_iteration_and_start_the_next_pass_when_it_is_exhausted(buffer):
    with wrapped(by_counting(3), buffer, epoch_size=5) as stream:
        epochs = [[(batch["pass"], batch["index"]) for batch in stream] for _ in range(3)]
    assert epochs == [
        [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)],
        [(2, 2), (3, 0), (3, 1), (3, 2), (4, 0)],
        [(4, 1), (4, 2), (5, 0), (5, 1), (5, 2)],
    ]


@pytest.mark.parametrize(("epoch_size", "buffer"), [(2, 0), (2, 4), (3, 1), (3, 16), (4, 2), (8, 0), (8, 3)])
def test_epochs_of_any_size_hand_out_the_same_batches_in_the_same_order(buffer, epoch_size):
    with wrapped(by_context(), buffer, epoch_size, seed=3) as stream:
        found = flat(list(stream) for _ in range(12))
    with wrapped(by_context(), seed=3) as stream:
        expected = flat(list(stream) for _ in range(14))
    assert found == expected[: 12 * epoch_size]


@pytest.mark.parametrize("buffer", [0, 2])
def test_another_seed_or_name_has_another_order(buffer):
    def rows(**options):
        with wrapped(by_context(), buffer, **options) as stream:
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
        with wrapped(lambda value=value: value, buffer) as stream:
            assert [list(stream), list(stream)] == [[{"x": [1]}, {"x": [2]}]] * 2


@pytest.mark.parametrize("buffer", [0, 1, 4])
def test_a_batch_that_is_none_does_not_end_the_epoch(buffer):
    with wrapped(lambda: [{"x": [1]}, None, {"x": [2]}], buffer) as stream:
        assert list(stream) == [{"x": [1]}, None, {"x": [2]}]


# Leaving early, going on


@pytest.mark.parametrize(
    ("buffer", "reenter"), [(0, False), (0, True), (1, False), (2, True), (3, True), (4, False), (16, True)]
)
@pytest.mark.parametrize("make", [by_context, by_counting])
def test_an_iteration_that_was_left_early_continues_where_it_was_left(make, buffer, reenter):
    with wrapped(make()) as whole:
        expected = flat(list(whole) for _ in range(3))
    stream = wrapped(make(), buffer)
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

    wrapper = wrapped(stream, buffer)
    found = []
    for _ in range(11):
        with wrapper:
            found += itertools.islice(wrapper, 1)
    assert found == made == list(range(10))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_an_epoch_of_a_size_that_was_left_early_continues_to_its_end(buffer):
    with wrapped(by_counting(5), buffer, epoch_size=4) as stream:
        assert [b["index"] for b in itertools.islice(stream, 3)] == [0, 1, 2]
        assert [b["index"] for b in stream] == [3]
        assert [b["index"] for b in stream] == [4, 0, 1, 2]


@pytest.mark.parametrize(("buffer", "epoch_size"), [(0, -1), (0, 3), (1, 3), (4, -1), (4, 3)])
def test_an_evaluation_always_starts_from_the_beginning_of_pass_0(buffer, epoch_size):
    with wrapped(by_context(), buffer, epoch_size, training=False) as stream:
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
    with wrapped(by_counting(4), buffer) as stream:
        assert stream.position == StreamPosition(1, 0)
        positions = [stream.position for _ in stream]
        assert positions == [(1, 1), (1, 2), (1, 3), (1, 4)]
        assert stream.position == (2, 0)


@pytest.mark.parametrize("buffer", FEW)
@pytest.mark.parametrize("make", [by_context, always_the_same, lists])
def test_seeking_continues_as_if_the_stream_had_been_read_up_to_there(make, buffer):
    with wrapped(make(), buffer) as stream:
        passes = [list(stream) for _ in range(3)]
    for number in (1, 2):
        for batch in range(8):
            with wrapped(make(), buffer) as stream:
                stream.seek(StreamPosition(number, batch))
                assert stream.position == (number, batch)
                assert list(stream) == passes[number - 1][batch:]
                assert list(stream) == passes[number]


@pytest.mark.parametrize("buffer", FEW)
@pytest.mark.parametrize("make", [by_context, always_the_same])
def test_seeking_with_an_epoch_size_wraps_at_the_end_of_the_pass(make, buffer):
    with wrapped(make()) as stream:
        expected = flat(list(stream) for _ in range(3))
    for batch in range(8):
        with wrapped(make(), buffer, epoch_size=5) as stream:
            stream.seek(StreamPosition(1, batch))
            assert list(stream) == expected[batch : batch + 5]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_seeking_drops_what_was_read_ahead(buffer):
    with wrapped(by_context(), buffer) as stream:
        first = list(itertools.islice(stream, 3))
        stream.seek(StreamPosition(1, 1))
        assert next(iter(stream)) == first[1]


@pytest.mark.parametrize(
    ("make", "buffer", "epoch_size"),
    [(by_context, 0, 3), (by_context, 1, -1), (always_the_same, 0, -1), (always_the_same, 4, 3), (lists, 1, 3)],
)
def test_seeking_beyond_the_end_is_an_error(make, buffer, epoch_size):
    with wrapped(make(), buffer, epoch_size, "train") as stream:
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

    with wrapped(stream, buffer) as wrapper:
        wrapper.seek(StreamPosition(1, 3))
        assert [rows.tolist() for rows in wrapper] == made == [[6, 7], [8, 9]]


# Empty streams and functions that return none


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("buffer", "epoch_size"), [(0, -1), (0, 3), (1, 1), (1, -1), (4, 3)])
def test_an_empty_stream_ends_instead_of_hanging(buffer, epoch_size, training):
    for function in (lambda: iter(()), list, lambda ctx: ctx.batches(0, 3)):
        with wrapped(function, buffer, epoch_size, training=training) as stream:
            assert [list(stream), list(stream)] == [[], []]


@pytest.mark.parametrize("buffer", [0, 2])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (5, "int")])
def test_a_stream_function_that_returns_no_iterable_is_an_error(value, kind, buffer):
    with wrapped(lambda: value, buffer, name="valid") as stream:
        with pytest.raises(StreamError, match=rf"stream 'valid': its function returned {kind}; .*`yield`") as raised:
            list(stream)
        assert raised.value.exit_status == 2


# The block and the thread


@pytest.mark.parametrize("training", [True, False])
def test_a_buffered_stream_is_iterated_inside_its_block_only(training):
    stream = wrapped(by_counting(), 2, name="train", training=training)
    with pytest.raises(ValueError, match="stream 'train' is read ahead: iterate it inside `with stream:`"):
        next(iter(stream))
    with stream:
        assert len(list(stream)) == 7
    with pytest.raises(ValueError, match="inside `with stream:`"):
        next(iter(stream))


def test_an_iteration_that_began_inside_the_block_does_not_start_the_thread_again_behind_it():
    stream = wrapped(by_counting(), 2)
    with stream:
        iteration = iter(stream)
        assert next(iteration)["index"] == 0
    with pytest.raises(ValueError, match="inside `with stream:`"):
        next(iteration)
    with stream:
        assert next(iter(stream))["index"] == 1


def test_an_unbuffered_stream_needs_no_block():
    assert len(list(wrapped(by_counting()))) == 7


def test_an_unbuffered_stream_is_read_in_the_threads_of_the_loop():
    def stream():
        yield threading.current_thread()

    assert list(wrapped(stream)) == [threading.current_thread()]


def test_a_buffered_stream_is_read_in_a_thread_of_its_own_which_lives_for_one_pass():
    def stream():
        for _ in range(3):
            yield threading.current_thread()

    with wrapped(stream, 2, name="train") as wrapper:
        first, second = set(wrapper), set(wrapper)
        assert not readers()  # at the end of a pass, before the end of the block
    assert len(first) == len(second) == 1
    assert not first & second
    assert {thread.name for thread in first | second} == {"emrun-read-train"}


@pytest.mark.parametrize(("buffer", "taken"), [(0, 1), (1, 0), (1, 3), (4, 0), (4, 1), (4, 3)])
def test_no_thread_is_left_after_the_block_or_close(buffer, taken):
    with wrapped(by_counting(50), buffer) as stream:
        list(itertools.islice(stream, taken))
    assert not readers()
    with stream:
        list(itertools.islice(stream, taken))
        stream.close()
        assert not readers()


@pytest.mark.parametrize("buffer", [0, 2])
def test_closing_drops_what_was_read_ahead_and_keeps_the_position(buffer):
    with wrapped(by_context(), buffer) as stream:
        first = list(itertools.islice(stream, 2))
        stream.close()
        assert stream.position == (1, 2)
        rest = list(stream)
    with wrapped(by_context()) as whole:
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

    with wrapped((lambda ctx: stream()) if takes_context else kept, buffer) as wrapper:
        next(iter(wrapper))
        wrapper.close()
        assert ended == [True]


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


def test_leaving_the_block_returns_although_the_producer_hangs(monkeypatch, caplog):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    stuck = Stuck(at=1)
    with caplog.at_level(logging.WARNING), wrapped(stuck, 2, name="train") as stream:
        assert next(iter(stream)) == 0
        stuck.reached.wait()
    assert caplog.messages == ["stream 'train' does not stop; its reader thread is left behind"]
    assert stuck.thread.daemon
    assert stream.position == (1, 1)
    with stream:  # what was left behind is not used again
        assert list(stream) == [1, 2, 3, 4]
    stuck.free()


@pytest.mark.parametrize("leave", ["close", "seek"])
def test_closing_returns_although_the_producer_hangs(leave, monkeypatch, caplog):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    stuck = Stuck(at=1)
    with caplog.at_level(logging.WARNING), wrapped(stuck, 2) as stream:
        assert next(iter(stream)) == 0
        stuck.reached.wait()
        stream.close() if leave == "close" else stream.seek(StreamPosition(1, 0))
    assert "left behind" in caplog.text
    stuck.free()


def test_an_interrupt_ends_the_wait_for_a_batch():
    interrupted = threading.Event()
    stuck = Stuck(at=2)
    with wrapped(stuck, 2, interrupted=interrupted.is_set) as stream:

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_batch(number, monkeypatch):
    monkeypatch.setattr(read_ahead, "_LOOK_AGAIN", 0.1)  # the signal may come just before the wait begins
    stuck = Stuck(at=2)
    interrupts = Interrupts(lambda: stream.wake())
    helper = threading.Thread(target=lambda: (stuck.reached.wait(), os.kill(os.getpid(), number)))
    with wrapped(stuck, 2, interrupted=lambda: interrupts.ending is not None) as stream:
        interrupts.install()
        try:
            helper.start()
            assert list(stream) == [0, 1]
        finally:
            interrupts.restore()
            helper.join()
            stuck.released.set()
    assert interrupts.ending.signal == number


def test_waking_a_stream_that_nobody_waits_for_does_nothing():
    stream = wrapped(by_counting(), 2)
    stream.wake()
    with stream:
        next(iter(stream))
        stream.wake()
        assert len(list(stream)) == 6


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize(("buffer", "epoch_size"), thinned(itertools.product((1, 2, 3), (-1, 4)), [(1, -1), (3, 4)]))
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
        stream = wrapped(make(buffer > 0), buffer, epoch_size, seed=9)
        for number in range(60):
            with stream:
                if number % 5 == 3:
                    found.append(list(itertools.islice(stream, 2)))
                found.append(list(stream))
                if buffer and number % 3 == 0:
                    time.sleep(0)
        return found

    assert epochs(buffer) == epochs(0)
