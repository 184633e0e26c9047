"""Examples that cannot be read: an error that names them, or they are left out, logged and counted."""

import errno
import pickle

import numpy as np
import pytest

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.datasets._examples import ExampleReader
from emrun.stream_context import StreamContext

BAD = {2, 3, 5, 7}


def read_one(row):
    if row in BAD:
        raise ValueError("it is prime")
    return row * 10


def name_one(row):
    return f"row {row}"


def read(reader, rows=range(10), read_one=read_one, stream="train"):
    return reader.read(np.array(rows, np.int64), StreamContext(stream, seed=0), read_one, name_one)


def test_examples_come_in_the_order_of_the_rows():
    assert read(ExampleReader("error"), [4, 0, 9, 1]) == [40, 0, 90, 10]


def test_a_bad_example_is_an_error_that_names_it():
    with pytest.raises(StreamError) as caught:
        read(ExampleReader("error"))
    assert str(caught.value).startswith("stream 'train': cannot read row 2: it is prime (on_bad_example: skip")
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_without_a_message_is_reported_by_its_type():
    def fail(row):
        raise EOFError

    with pytest.raises(StreamError, match="cannot read row 0: EOFError"):
        read(ExampleReader("error"), read_one=fail)


def test_bad_examples_are_left_out_and_counted(caplog):
    reader = ExampleReader("skip")
    assert read(reader) == [0, 10, 40, 60, 80, 90]
    read(reader, stream="valid")
    assert reader.left_out == {"train": 4, "valid": 4}
    told = [record.getMessage() for record in caplog.records if "'train'" in record.getMessage()]
    assert told == [f"stream 'train': left out row {row}: it is prime" for row in (2, 3, 5)]


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
    def fail(row):
        raise error

    with pytest.raises(type(error)) as caught:
        read(ExampleReader("skip"), read_one=fail)
    assert caught.value is error


def test_a_refusal_of_the_system_is_never_left_out():
    def fail(row):
        raise OSError(errno.EMFILE, "too many open files")

    with pytest.raises(StreamError, match=r"cannot read row 0: .*too many open files$") as caught:
        read(ExampleReader("skip"), read_one=fail)
    assert "skip" not in str(caught.value)


def test_it_can_be_pickled():
    reader = pickle.loads(pickle.dumps(ExampleReader("skip")))
    assert read(reader) == [0, 10, 40, 60, 80, 90]


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_another_policy_is_refused(value):
    with pytest.raises(ArgumentError, match=r"^on_bad_example: .* is not one of error, skip$"):
        ExampleReader(value)
