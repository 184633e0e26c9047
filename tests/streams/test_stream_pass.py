"""A pass over a stream: errors of the stream function, and where they are raised."""

import itertools
import threading
import traceback

import pytest
from campaign import thinned
from doubles import readers, wrapped

from emrun.base.errors import StreamError

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


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


ERRORS = [(buffer, at) for buffer in (0, 1, 4) for at in sorted({0, max(buffer - 1, 0), buffer, buffer + 1, 19})]


@pytest.mark.parametrize("epoch_size", [-1, 30])
@pytest.mark.parametrize(("kind", "slow"), [("plain", False), ("with_context", True)], ids=["fast", "slow"])
@pytest.mark.parametrize(("buffer", "at"), thinned(ERRORS, [(0, 1), (1, 0), (1, 19), (4, 4)]))
def test_an_error_reaches_the_loop_as_itself_after_the_batches_before_it(buffer, at, kind, slow, epoch_size):
    error = KeyError("no such image")
    broken = Broken(20, at, error)
    found = []
    with wrapped(getattr(broken, kind), buffer, epoch_size, "train") as stream:
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
    assert error.__cause__ is None


@pytest.mark.parametrize(("kind", "buffer"), [("plain", 0), ("plain", 4), ("with_context", 1)])
def test_a_stream_that_works_again_continues_at_the_batch_that_failed(kind, buffer):
    broken = Broken(20, 7, OSError("the network is down"))
    with wrapped(getattr(broken, kind), buffer) as stream:
        found = []
        with pytest.raises(OSError, match="the network is down"):
            found.extend(batch["index"] for batch in stream)
        broken.at = None
        assert [batch["index"] for batch in stream] == list(range(7, 20))


@pytest.mark.parametrize("buffer", [0, 4])
def test_an_error_of_the_stream_function_itself_is_noted_too(buffer):
    def stream():
        raise KeyError("no such folder")

    with wrapped(stream, buffer, name="valid") as wrapper, pytest.raises(KeyError) as raised:
        list(wrapper)
    assert raised.value.__notes__ == ["in stream 'valid', batch 0 of the pass"]


@pytest.mark.parametrize("buffer", [0, 1, 4])
def test_an_evaluation_that_failed_starts_from_the_beginning_again(buffer):
    broken = Broken(10, 5, KeyError("x"))
    with wrapped(broken.plain, buffer, training=False) as stream:
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
    with wrapped(stream, buffer, epoch_size=10) as wrapper, pytest.raises(KeyError):
        for batch in wrapper:
            found.append(batch)
    assert found == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("buffer", thinned([1, 2, 3], [1, 3]))
def test_no_error_is_lost_under_stress(buffer):
    for at in range(60):
        broken = Broken(60, at, KeyError(at))
        found = []
        with wrapped(broken.plain, buffer) as stream, pytest.raises(KeyError):
            for batch in stream:
                found.append(batch["index"])
        assert found == list(range(at))


def stops_in_a_generator():
    yield {"x": [0]}
    next(iter(()))
    yield {"x": [1]}


def stops_before_it_begins():
    return [next(iter(()))]


@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
@pytest.mark.parametrize("function", [stops_in_a_generator, stops_before_it_begins])
def test_a_stop_iteration_that_a_stream_raises_is_an_error_that_names_it(function, options):
    stream = wrapped(function, name="train", **options)
    message = rf"stream 'train' raised StopIteration \(.*test_stream_pass.py:\d+, in {function.__name__}\)"
    with stream, pytest.raises(StreamError, match=message):
        list(stream)
