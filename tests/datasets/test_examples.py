"""Examples that cannot be read: an error that names them, or they are left out, logged and counted."""

import errno
import gc
import os
import pickle
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from emrun.base.errors import ArgumentError, MissingExtra, StreamError, UsageError
from emrun.datasets._examples import ExampleReader
from emrun.datasets._paths import files_of
from emrun.stream_context import StreamContext, WithLeftOut

BAD = {2, 3, 5, 7}


def read_one(row, place):
    if row in BAD:
        raise ValueError("it is prime")
    return row * 10


def name_one(row):
    return str(row), f"file {row}"


def read(reader, rows=range(10), read_one=read_one, ctx=None):
    return reader.read(np.array(rows, np.int64), ctx or StreamContext("train", seed=0), read_one, name_one)


def test_examples_come_in_the_order_of_the_rows():
    assert read(ExampleReader("error"), [4, 0, 9, 1]) == [40, 0, 90, 10]


def test_a_bad_example_is_an_error_that_names_it():
    with pytest.raises(StreamError) as caught:
        read(ExampleReader("error"))
    assert str(caught.value).startswith(
        "stream 'train': cannot read file 2 (row 2): it is prime (main_loop.on_bad_example: w"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_without_a_message_is_reported_by_its_type():
    def fail(row, place):
        raise EOFError

    with pytest.raises(StreamError, match=r"cannot read file 0 \(row 0\): EOFError"):
        read(ExampleReader("error"), read_one=fail)


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_bad_examples_are_left_out_and_told_to_the_context_of_the_pass(policy):
    ctx = StreamContext("train", seed=0)
    batches = (read(ExampleReader(policy), rows, ctx=ctx) for rows in ctx.batches(10, 4))
    why = "it is prime"
    assert list(ctx.counted(batches)) == [
        WithLeftOut([0, 10], {"2": why, "3": why}, 10),
        WithLeftOut([40, 60], {"5": why, "7": why}, 10),
        [80, 90],
    ]


@pytest.mark.parametrize(
    "error", [MissingExtra("It", "pillow", "data"), StreamError("two sizes"), MemoryError()], ids=repr
)
def test_what_is_not_about_the_example_is_never_left_out(error):
    def fail(row, place):
        raise error

    with pytest.raises(type(error)) as caught:
        read(ExampleReader("warn"), read_one=fail)
    assert caught.value is error


def test_a_refusal_of_the_system_is_never_left_out():
    def fail(row, place):
        raise OSError(errno.EMFILE, "too many open files")

    with pytest.raises(StreamError, match=r"cannot read file 0 \(row 0\): .*too many open files$") as caught:
        read(ExampleReader("warn"), read_one=fail)
    assert "warn" not in str(caught.value)


def test_it_can_be_pickled():
    reader = pickle.loads(pickle.dumps(ExampleReader("warn")))
    assert read(reader) == [0, 10, 40, 60, 80, 90]


@pytest.mark.parametrize("value", ["skip", None, True])
def test_another_policy_is_refused(value):
    with pytest.raises(ArgumentError, match=r"^on_bad_example: .* is not one of error, warn, ignore$"):
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
def test_examples_and_reasons_are_those_of_one_thread(monkeypatch, rows):
    found = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("EMRUN_THREADS", threads)
        ctx = StreamContext("train", seed=0)
        examples = read(ExampleReader("warn"), rows, ctx=ctx)
        found.append((examples, list(ctx._left_out.items())))
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
        read(ExampleReader("warn"), read_one=fail)
    assert caught.value.__notes__ == ["while reading file 8 (row 8)"]


def test_an_interrupt_leaves_a_row_behind_that_hangs(three_threads, monkeypatch):
    monkeypatch.setattr("emrun.datasets._threads._PATIENCE", 0.01)
    main, hangs = threading.get_ident(), threading.Event()
    once = threading.Lock()  # a second interrupt would end the tests

    def wait(row, place):
        if threading.get_ident() != main:
            if once.acquire(blocking=False):
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
                    is_read = read(ExampleReader("warn")) == [0, 10, 40, 60, 80, 90]
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


@pytest.mark.parametrize("folder", ["data [1]", "a/b[cd]*", "[x]/[!y]?", "plain"])
@pytest.mark.parametrize("pattern", ["*.txt", "**/?.txt", "[ab].txt"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_folder_that_is_there_is_no_pattern(tmp_path, monkeypatch, folder, pattern, is_absolute):
    monkeypatch.chdir(tmp_path)
    there = Path(folder)
    there.mkdir(parents=True)
    for name in ("a", "b"):
        (there / f"{name}.txt").touch()
    given = tmp_path / there / pattern if is_absolute else there / pattern
    assert [each.name for each in files_of("train", str(given))] == ["a.txt", "b.txt"]


def test_a_pattern_with_brackets_that_names_nothing_tells_what_they_mean(tmp_path):
    (tmp_path / "a[1]b.txt").touch()
    with pytest.raises(ArgumentError, match=r"; in a pattern, \[1\] stands for 1: write \[\[\]1\] for"):
        files_of("train", str(tmp_path / "a[1]*.txt"))
    assert [each.name for each in files_of("train", str(tmp_path / "a[[]1]*.txt"))] == ["a[1]b.txt"]
