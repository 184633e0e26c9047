"""Examples that cannot be read: an error that names them, or they are left out, logged and counted."""

import errno
import gc
import os
import pickle
import signal
import threading
import warnings

import numpy as np
import pytest

from emrun.base.errors import ArgumentError, MissingExtra, StreamError, UsageError
from emrun.datasets._examples import ExampleReader
from emrun.stream_context import StreamContext

BAD = {2, 3, 5, 7}


def read_one(row, place):
    if row in BAD:
        raise ValueError("it is prime")
    return row * 10


def name_one(row):
    return f"file {row}"


def read(reader, rows=range(10), read_one=read_one, stream="train"):
    return reader.read(np.array(rows, np.int64), StreamContext(stream, seed=0), read_one, name_one)


def test_examples_come_in_the_order_of_the_rows():
    assert read(ExampleReader("error"), [4, 0, 9, 1]) == [40, 0, 90, 10]


def test_a_bad_example_is_an_error_that_names_it():
    with pytest.raises(StreamError) as caught:
        read(ExampleReader("error"))
    assert str(caught.value).startswith("stream 'train': cannot read file 2 (row 2): it is prime (on_bad_example: skip")
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_without_a_message_is_reported_by_its_type():
    def fail(row, place):
        raise EOFError

    with pytest.raises(StreamError, match=r"cannot read file 0 \(row 0\): EOFError"):
        read(ExampleReader("error"), read_one=fail)


def test_bad_examples_are_left_out_and_counted(caplog):
    reader = ExampleReader("skip")
    assert read(reader) == [0, 10, 40, 60, 80, 90]
    read(reader, stream="valid")
    assert reader.left_out == {"train": 4, "valid": 4}
    told = [record.getMessage() for record in caplog.records if "'train'" in record.getMessage()]
    assert told == [f"stream 'train': left out file {row}: it is prime" for row in (2, 3, 5)]


def test_the_end_of_a_pass_reports_how_many_examples_were_left_out(caplog):
    reader, ctx = ExampleReader("skip"), StreamContext("train", seed=0)
    for _ in range(2):
        caplog.clear()
        assert list(reader.counted((read(reader, [i, i + 1]) for i in (0, 2, 4)), ctx)) == [[0, 10], [], [40]]
        assert caplog.records[-1].getMessage() == "left out 3 of 6 examples of stream 'train'"
    assert reader.left_out == {"train": 6}


def test_the_first_empty_batch_of_a_stream_comes_with_advice(caplog):
    reader = ExampleReader("skip")
    assert [read(reader, rows) for rows in ([1, 2], [2, 3], [5, 7])] == [[10], [], []]
    (told,) = [record.getMessage() for record in caplog.records if "empty" in record.getMessage()]
    assert told.startswith("stream 'train': all 2 examples of a batch were left out, so the batch is empty; set `main")


def test_a_pass_without_bad_examples_says_nothing(caplog):
    reader = ExampleReader("skip")
    read(reader)
    caplog.clear()
    assert list(reader.counted([read(reader, [0])], StreamContext("train", seed=0))) == [[0]]
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [MissingExtra("It", "pillow", "data"), StreamError("two sizes"), MemoryError()], ids=repr
)
def test_what_is_not_about_the_example_is_never_left_out(error):
    def fail(row, place):
        raise error

    with pytest.raises(type(error)) as caught:
        read(ExampleReader("skip"), read_one=fail)
    assert caught.value is error


def test_a_refusal_of_the_system_is_never_left_out():
    def fail(row, place):
        raise OSError(errno.EMFILE, "too many open files")

    with pytest.raises(StreamError, match=r"cannot read file 0 \(row 0\): .*too many open files$") as caught:
        read(ExampleReader("skip"), read_one=fail)
    assert "skip" not in str(caught.value)


def test_it_can_be_pickled():
    reader = pickle.loads(pickle.dumps(ExampleReader("skip")))
    assert read(reader) == [0, 10, 40, 60, 80, 90]


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_another_policy_is_refused(value):
    with pytest.raises(ArgumentError, match=r"^on_bad_example: .* is not one of error, skip$"):
        ExampleReader(value)


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setenv("EMRUN_THREADS", "3")


def test_several_threads_read_side_by_side(three_threads):
    together = threading.Barrier(3)

    def meet(row, place):
        together.wait(30)
        return threading.get_ident()

    assert len(set(read(ExampleReader("error"), range(3), read_one=meet))) == 3


@pytest.mark.parametrize("rows", [[], [4], [7, 4, 0, 5, 9, 1]], ids=str)
def test_examples_errors_and_warnings_are_those_of_one_thread(monkeypatch, caplog, rows):
    found = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("EMRUN_THREADS", threads)
        caplog.clear()
        reader = ExampleReader("skip")
        examples = read(reader, rows)
        found.append((examples, reader.left_out, [record.getMessage() for record in caplog.records]))
    assert found[0] == found[1] == found[2]


def test_the_first_error_in_the_order_of_the_rows_counts_and_no_row_is_begun_after_one(three_threads):
    begun, failed = [], threading.Event()

    def fail(row, place):
        begun.append(row)
        if row == 1:
            failed.wait(30)
        if row == 2:
            failed.set()
        if row < 3:
            raise ValueError(f"bad {row}")
        failed.wait(30)
        return row

    with pytest.raises(StreamError, match=r"file 0 \(row 0\): bad 0"):
        read(ExampleReader("error"), range(1000), read_one=fail)
    assert len(begun) < 1000


def test_the_rows_that_were_begun_have_ended_when_an_error_is_raised(three_threads):
    running, begun = [], threading.Barrier(3)

    def fail(row, place):
        running.append(row)
        begun.wait(30)
        if row == 1:
            raise ValueError("bad")
        sum(range(100_000))
        running.remove(row)

    with pytest.raises(StreamError, match="bad"):
        read(ExampleReader("error"), range(3), read_one=fail)
    assert running == [1]


def test_a_thread_without_memory_is_an_error_that_names_the_example(three_threads):
    def fail(row, place):
        if row == 8:
            raise MemoryError
        return row

    with pytest.raises(MemoryError) as caught:
        read(ExampleReader("skip"), read_one=fail)
    assert caught.value.__notes__ == ["while reading file 8 (row 8)"]


def test_an_interrupt_leaves_a_row_behind_that_hangs(three_threads, monkeypatch):
    monkeypatch.setattr("emrun.datasets._threads._PATIENCE", 0.01)
    main, hangs = threading.get_ident(), threading.Event()

    def wait(row, place):
        if threading.get_ident() != main:
            signal.raise_signal(signal.SIGINT)
            hangs.wait(60)
        return row

    gc.disable()  # an interrupt in a callback of the collector is lost, as torch has one
    try:
        with pytest.raises(KeyboardInterrupt):
            read(ExampleReader("error"), range(100_000), read_one=wait)
    finally:
        gc.enable()
        hangs.set()


def test_a_child_that_is_forked_while_threads_read_reads_with_its_own(three_threads):
    children = []

    def fork(row, place):
        if row == 5:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about threads
                child = os.fork()
            if not child:
                try:
                    is_read = read(ExampleReader("skip")) == [0, 10, 40, 60, 80, 90]
                finally:
                    os._exit(not is_read)
            children.append(child)
        return row

    assert read(ExampleReader("error"), read_one=fork) == list(range(10))
    assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.parametrize("value", ["0", "many", ""])
def test_a_wrong_number_of_threads_is_an_error(monkeypatch, value):
    monkeypatch.setenv("EMRUN_THREADS", value)
    with pytest.raises(UsageError, match=f"EMRUN_THREADS is {value!r}, which is not a number of threads"):
        read(ExampleReader("error"))
