"""The thread that reads ahead: what it may do, when it waits, and how it ends."""

import logging
import threading
import traceback
from collections import deque

import pytest
from campaign import thinned

from emrun.streams import read_ahead
from emrun.streams.read_ahead import END, INTERRUPTED, PreparedAhead, ReadAhead
from emrun.streams.stream_pass import WithState

pytestmark = pytest.mark.usefixtures("no_reader_is_left")
SIZES = [1, 2, 3, 4, 16]


class Producer:
    """Yields 0, 1, ... and shows its position, so that tests need no clock."""

    def __init__(self, count, error=None):
        self.count = count
        self.error = error
        self.made = 0
        self.ended = False
        self.threads = set()
        self._news = threading.Condition()

    def __iter__(self):
        try:
            for number in range(self.count):
                with self._news:
                    self.made += 1
                    self.threads.add(threading.current_thread())
                    self._news.notify_all()
                yield number
            if self.error is not None:
                raise self.error
        finally:
            with self._news:
                self.ended = True
                self._news.notify_all()

    def wait_for(self, made):
        with self._news:
            self._news.wait_for(lambda: self.ended or self.made >= made)

    def wait_for_reader(self):
        """Wait until the thread that runs this has ended by itself."""
        self.wait_for(self.count + 1)
        for thread in self.threads:
            thread.join()


def reader_of(batches, size, interrupted=lambda: False):
    reader = ReadAhead(iter(batches), size, "train", interrupted)
    reader.start()
    return reader


def drain(reader):
    """Return what is left of a pass."""
    found = []
    while (item := reader.get()) is not END:
        found.append(item)
    return found


@pytest.mark.parametrize(
    ("size", "count"),
    [(1, 0), (1, 1), (1, 2), (1, 40), (2, 1), (2, 2), (2, 3), (4, 3), (4, 4), (4, 5), (16, 0), (16, 40)],
)
def test_batches_come_in_their_order_and_then_the_end(size, count):
    reader = reader_of(range(count), size)
    assert drain(reader) == list(range(count))
    assert reader.get() is END  # any number of times
    assert reader.stop()


@pytest.mark.parametrize("item", [None, 0, False, (), "", {}], ids=repr)
def test_whatever_the_stream_yields_arrives(item):
    reader = reader_of([item, item], 1)
    assert [reader.get(), reader.get()] == [item, item]
    assert reader.get() is END
    assert reader.stop()


class Semaphore:
    """A lock that records when a thread is about to wait for it."""

    def __init__(self, lock):
        self._lock = lock
        self.waits = threading.Semaphore(0)
        self.released = 0

    def acquire(self, **options):
        self.waits.release()
        return self._lock.acquire(**options)

    def release(self):
        self._lock.release()
        self.released += 1


@pytest.mark.parametrize("size", SIZES)
def test_it_reads_size_batches_ahead_and_then_waits_until_half_of_them_were_taken(size):
    producer = Producer(100)
    reader = ReadAhead(iter(producer), size, "train", lambda: False)
    reader._space = space = Semaphore(reader._space)
    reader.start()
    taken = 0
    for wakes in range(5):
        space.waits.acquire()  # hangs when the reader was not woken
        assert producer.made == taken + size
        for _ in range(size - size // 2):
            assert space.released == wakes  # once for many batches
            assert reader.get() == taken
            taken += 1
    assert reader.stop()


def test_it_reads_in_a_thread_of_the_streams_name():
    producer = Producer(3)
    reader = reader_of(producer, 4)
    drain(reader)
    (thread,) = producer.threads
    assert thread.name == "emrun-read-train"
    assert thread.daemon  # one that hangs does not keep the process alive
    assert reader.stop()


def test_the_thread_ends_with_the_pass():
    producer = Producer(3)
    reader = reader_of(producer, 4)
    producer.wait_for_reader()
    assert drain(reader) == [0, 1, 2]


@pytest.mark.parametrize("size", SIZES)
def test_a_reader_that_was_stopped_continues_where_it_stopped(size):
    reader = reader_of(range(20), size)
    found = []
    for _ in range(10):
        reader.start()
        found += [reader.get(), reader.get()]
        assert reader.stop()
    assert found == list(range(20))
    reader.start()
    assert reader.get() is END
    assert reader.stop()


def test_starting_twice_makes_one_thread():
    producer = Producer(50)
    reader = reader_of(producer, 2)
    reader.start()
    assert drain(reader) == list(range(50))
    assert len(producer.threads) == 1
    assert reader.stop()


def test_stopping_what_was_not_started_or_is_stopped_does_nothing():
    reader = ReadAhead(iter(range(3)), 1, "train", lambda: False)
    assert reader.stop()
    reader.start()
    assert reader.stop()
    assert reader.stop()


@pytest.mark.parametrize("error", [None, KeyError("x")], ids=repr)
def test_a_reader_that_ended_is_not_started_again(error):
    producer = Producer(2, error)
    batches = iter(producer)
    asked = []
    reader = reader_of(iter(lambda: asked.append(None) or next(batches), object()), 4)
    producer.wait_for_reader()
    assert len(asked) == 3
    for _ in range(3):
        assert reader.stop()
        reader.start()
    assert [reader.get(), reader.get()] == [0, 1]
    if error is None:
        assert reader.get() is END
    else:
        with pytest.raises(KeyError):
            reader.get()
    assert reader.stop()
    assert len(asked) == 3


@pytest.mark.parametrize("error", [KeyError("x"), StopAsyncIteration(), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("before", [0, 1, 3, 4, 5])
def test_an_error_arrives_as_itself_after_the_batches_before_it(before, error):
    reader = reader_of(Producer(before, error), 4)
    found = []
    with pytest.raises(type(error)) as raised:
        while True:
            found.append(reader.get())
    assert raised.value is error
    assert found == list(range(before))
    assert "__iter__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    with pytest.raises(type(error)):  # the next call raises the same
        reader.get()
    assert reader.stop()


def test_an_error_is_raised_although_the_thread_has_ended_before_anyone_asked():
    producer = Producer(2, KeyError("x"))
    reader = reader_of(producer, 16)
    producer.wait_for_reader()
    assert [reader.get(), reader.get()] == [0, 1]
    with pytest.raises(KeyError):
        reader.get()
    assert reader.stop()


class Stuck:
    """An iterator that blocks until it is released."""

    def __init__(self):
        self.reached = threading.Event()
        self.released = threading.Event()
        self.thread = None

    def __iter__(self):
        return self

    def __next__(self):
        self.thread = threading.current_thread()
        self.reached.set()
        self.released.wait()
        return "late"

    def free(self):
        self.released.set()
        self.thread.join()


def test_wake_ends_a_wait_that_was_interrupted():
    stuck, interrupted = Stuck(), threading.Event()
    reader = reader_of(stuck, 1, interrupted.is_set)

    def interrupt():
        stuck.reached.wait()
        interrupted.set()
        reader.wake()

    helper = threading.Thread(target=interrupt)
    helper.start()
    assert reader.get() is INTERRUPTED
    helper.join()
    interrupted.clear()
    stuck.released.set()
    assert reader.get() == "late"  # nothing was lost
    assert reader.stop()


def test_an_interrupt_that_came_just_before_the_wait_ends_it_soon(monkeypatch):
    """This hangs if the wait has no limit: the handler of such a signal cannot run before the wait ends."""
    monkeypatch.setattr(read_ahead, "_LOOK_AGAIN", 0.01)
    stuck, answers = Stuck(), iter([False, True])
    reader = reader_of(stuck, 1, lambda: next(answers))
    stuck.reached.wait()
    assert reader.get() is INTERRUPTED
    stuck.released.set()
    assert reader.stop()


def test_wake_without_an_interrupt_continues_to_wait():
    stuck = Stuck()
    asked = threading.Semaphore(0)

    def interrupted():
        asked.release()
        return False

    reader = reader_of(stuck, 1, interrupted)

    def wake():
        for _ in range(3):
            asked.acquire()
            reader.wake()
        asked.acquire()
        stuck.released.set()

    helper = threading.Thread(target=wake)
    helper.start()
    assert reader.get() == "late"
    helper.join()
    assert reader.stop()


def test_what_was_read_is_handed_out_before_an_interrupt_is_noticed():
    producer = Producer(2)
    reader = reader_of(producer, 4, lambda: True)
    producer.wait_for_reader()
    assert drain(reader) == [0, 1]


def test_a_reader_that_hangs_is_left_behind_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    stuck = Stuck()
    reader = reader_of(stuck, 1)
    stuck.reached.wait()
    with caplog.at_level(logging.WARNING):
        assert not reader.stop()
    assert "stream 'train' does not stop; its reader thread is left behind" in caplog.text
    assert stuck.thread.daemon
    stuck.free()  # and it ends after the batch it is working on
    assert not stuck.thread.is_alive()


class WatchedQueue(deque):
    """A queue that records when a side has read its length, before this side acts on the length."""

    look = staticmethod(lambda length: None)

    def __len__(self):
        length = super().__len__()
        self.look(length)
        return length


@pytest.mark.parametrize("nth", [1, 2])
def test_a_batch_that_arrives_just_after_the_loop_looked_is_not_missed(nth):
    """This hangs if the reader is notified after the second look, not before it."""
    loop, looks = threading.current_thread(), 0
    go, appended, past = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def batches():
        for number in range(3):
            go.acquire()
            appended.set()
            yield number

    def look(length):
        nonlocal looks
        if threading.current_thread() is loop:
            looks += length == 0
            if length == 0 and looks == nth:
                go.release()
                past.acquire()  # now the reader has handed a batch over, and thinks that the loop does not wait
        elif appended.is_set():
            appended.clear()
            past.release()

    reader = ReadAhead(batches(), 4, "train", lambda: False)
    reader._queue = WatchedQueue()
    reader._queue.look = look
    reader.start()
    assert reader.get() == 0
    go.release(2)
    assert drain(reader) == [1, 2]
    assert reader.stop()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_queue_that_is_emptied_just_after_the_reader_looked_is_filled_again(size, nth):
    """This hangs if the loop is notified after the second look, not before it."""
    loop, looks = threading.current_thread(), 0
    go = threading.Semaphore(0)
    reader = ReadAhead(iter(range(3 * size)), size, "train", lambda: False)
    reader._items = items = Semaphore(reader._items)

    def look(length):
        nonlocal looks
        if threading.current_thread() is not loop and length == size:
            looks += 1
            if looks == nth:
                go.release()
                items.waits.acquire()  # now the loop has taken everything, and waits for more

    reader._queue = WatchedQueue()
    reader._queue.look = look
    reader.start()
    go.acquire()
    assert drain(reader) == list(range(3 * size))
    assert reader.stop()


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("size", thinned([1, 2, 3], [1, 3]))
def test_no_wake_up_is_ever_lost(size):
    for count in (0, 1, 2, 3, 7) * 40:
        reader = reader_of(range(count), size)
        assert drain(reader) == list(range(count))
        assert reader.stop()
    reader = reader_of(range(3000), size)
    assert drain(reader) == list(range(3000))
    assert reader.stop()


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("size", thinned([1, 2, 3], [1, 3]))
def test_stopping_and_starting_at_any_moment_loses_nothing(size):
    reader = reader_of(range(400), size)
    found = []
    for number in range(400):
        reader.start()
        found.append(reader.get())
        if number % 3 != 1:
            assert reader.stop()
    assert found == list(range(400))
    reader.start()
    assert reader.get() is END
    assert reader.stop()


@pytest.mark.usefixtures("busy_switching")
def test_stray_wakes_do_no_harm():
    reader = reader_of(range(2000), 2)
    ended = threading.Event()

    def wake():
        while not ended.is_set():
            reader.wake()

    helper = threading.Thread(target=wake)
    helper.start()
    try:
        assert drain(reader) == list(range(2000))
    finally:
        ended.set()
        helper.join()
    assert reader.stop()


class Preparations:
    """Records which batches are prepared, in which threads, and which are begun."""

    def __init__(self, unprepared=()):
        self.unprepared = unprepared
        self.prepared = []
        self.threads = set()
        self.begun = []

    def __call__(self, batch):
        self.prepared.append(batch)
        self.threads.add(threading.current_thread())
        return None if batch in self.unprepared else lambda: self.begun.append(batch)


def prepared_reader_of(batches, size, preparations):
    reader = PreparedAhead(preparations, iter(batches), size, "train", lambda: False)
    reader.start()
    return reader


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("size", SIZES)
def test_each_batch_is_prepared_in_the_readers_thread_and_begun_once_in_its_order(size, count):
    preparations = Preparations(unprepared=[2, 7])
    reader = prepared_reader_of(range(count), size, preparations)
    assert drain(reader) == list(range(count))
    assert reader.get() is END
    assert preparations.prepared == list(range(count))
    assert threading.current_thread() not in preparations.threads
    assert preparations.begun == [each for each in range(count) if each not in (2, 7)]
    assert reader.stop()


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_is_begun_with_the_one_before_it_when_it_is_there_and_no_earlier(size):
    preparations = Preparations()
    reader = PreparedAhead(preparations, iter(range(6)), size, "train", lambda: False)
    reader._space = space = Semaphore(reader._space)
    reader.start()
    for number in range(4):
        space.waits.acquire()  # two are there, and the reader waits for room
        assert preparations.begun == ([*range(number + 1)] if number else [])
        assert reader.get() == number
        assert preparations.begun == [*range(number + 2)]
    assert reader.stop()


def test_a_batch_with_a_state_is_prepared_without_it():
    preparations = Preparations()
    reader = prepared_reader_of([WithState("batch", "state")], 2, preparations)
    assert drain(reader) == [WithState("batch", "state")]
    assert preparations.prepared == preparations.begun == ["batch"]
    assert reader.stop()


def test_an_error_behind_prepared_batches_comes_after_them():
    preparations = Preparations()
    reader = prepared_reader_of(Producer(2, ValueError("broken")), 4, preparations)
    assert [reader.get(), reader.get()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            reader.get()
    assert preparations.begun == [0, 1]
    assert reader.stop()
