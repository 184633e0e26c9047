"""Worker processes yield the same batches in the same order as the process of the loop, and end with this process."""

import errno
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from campaign import thinned

from emrun.base.encoding import digest, random_digest
from emrun.base.errors import StorageError, StreamError
from emrun.base.randomness import preserved_randomness
from emrun.streams import packing
from emrun.streams.packing import packed, shared_empty
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.streams.stream_pass import StreamPass
from emrun.streams.workers import Workers

pytestmark = pytest.mark.slow

METHODS = ("fork", "forkserver", "spawn")
SLOW = [pytest.param(method, marks=() if method == "fork" else pytest.mark.campaign) for method in METHODS]


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch):
    """Let processes that are not forked import this file by the name that pytest gives it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


class Strided:
    """Rows from `ctx.batches`, with random numbers of each kind that does not depend on the process."""

    def __init__(self, n=23, batch_size=3):
        self.x = np.arange(n * 2000, dtype=np.float32).reshape(n, 2000)
        self.batch_size = batch_size

    def train_stream(self, ctx):
        for rows in ctx.batches(len(self.x), self.batch_size, shuffle=True):
            noise = ctx.rng.random(len(rows)), torch.rand(len(rows), generator=ctx.torch_generator)
            yield {"x": self.x[rows], "noise": noise[0], "tensor": noise[1], "row": rows.tolist(), "epoch": ctx.epoch}


class Plain:
    """A generator that takes nothing."""

    def train_stream(self):
        for start in range(7):
            yield {"x": np.arange(start, start + 3), "text": [f"{start}"] * 3}


class Drawing:
    """A generator that takes the context, and filters: it draws its own rows."""

    def train_stream(self, ctx):
        for index in range(20):
            if ctx.rng.random() < 0.5:
                yield {"x": np.full(3, index), "draw": ctx.rng.random(3)}


class Counter:
    """An object with a state."""

    def __init__(self):
        self.done = 0

    def __iter__(self):
        while self.done < 7:
            self.done += 1
            yield {"x": torch.full((2,), self.done)}
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Stateful:
    def train_stream(self):
        return Counter()


KINDS = [Strided, Plain, Drawing, Stateful]


def plain(value):
    """Return a batch as something that can be compared bit by bit."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | torch.Tensor):
        return (type(value).__name__, str(value.dtype), tuple(value.shape), np.asarray(value).tobytes())
    return value


def wrap(function, workers, epoch_size=-1, training=True, **how):
    reading = Reading(workers=workers, **how)
    return StreamWrapper(function, "train", seed=3, epoch_size=epoch_size, training=training, reading=reading)


def epochs_of(stream, count):
    with stream:
        return [[plain(batch) for batch in stream] for _ in range(count)]


# The same as without


def of_campaigns(*cases):
    return [pytest.param(*each, marks=pytest.mark.campaign) for each in cases]


PAIRS = [  # of a stream, a number of workers and a buffer
    *((Strided, 2, 4), (Drawing, 2, 1), (Stateful, 1, 4)),
    *of_campaigns((Strided, 3, 1), (Drawing, 3, 4), (Plain, 2, 0), (Strided, 1, 0), (Strided, 2, 16)),
    *of_campaigns((Plain, 1, 4), (Drawing, 1, 16), (Stateful, 3, 0), (Stateful, 2, 4)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", SLOW)
@pytest.mark.parametrize(("kind", "workers", "buffer"), PAIRS)
def test_batches_and_their_order_are_those_of_one_process(kind, workers, buffer, method):
    stream = wrap(kind().train_stream, workers, buffer=buffer, start_method=method)
    assert epochs_of(stream, 2) == epochs_of(wrap(kind().train_stream, 0), 2)
    stream.close()


RESUMED = [  # a stream, the batch at which it is left, and the numbers of workers before and after
    *((Strided, 4, 2, 0), (Stateful, 4, 0, 1)),
    *of_campaigns(
        (Drawing, 4, 1, 2),
        (Strided, 4, 3, 0),
        (Stateful, 4, 0, 3),
        (Strided, 4, 1, 2),
        (Plain, 4, 2, 2),
        (Stateful, 1, 3, 0),
    ),
    *of_campaigns((Strided, 1, 2, 2), (Strided, 4, 0, 3), (Plain, 1, 0, 3), (Drawing, 1, 3, 0), (Stateful, 1, 1, 2)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", SLOW)
@pytest.mark.parametrize(("kind", "at", "before", "after"), RESUMED)
def test_a_resume_in_the_middle_continues_exactly_with_any_number_of_workers(kind, at, before, after, method):
    first, second = (wrap(kind().train_stream, n, start_method=method if n else None) for n in (before, after))
    with first:
        head = [plain(batch) for batch in itertools.islice(iter(first), at)]
        state = first.state_dict()
    first.close()
    second.load_state_dict(state)
    assert second.restore()
    with second:
        rest = [plain(batch) for _ in range(2) for batch in second]
    second.close()
    assert head + rest == list(itertools.chain(*epochs_of(wrap(kind().train_stream, 0), 2)))


def test_epochs_of_a_fixed_size_continue_over_the_end_of_a_pass():
    expected = epochs_of(wrap(Strided().train_stream, 0, epoch_size=5), 2)  # of 8 batches in a pass
    stream = wrap(Strided().train_stream, 2, epoch_size=5)
    assert epochs_of(stream, 2) == expected
    stream.close()


def test_an_evaluation_left_early_begins_again():
    stream = wrap(Plain().train_stream, 2, training=False)
    with stream:
        next(iter(stream))
    with stream:
        assert len(list(stream)) == 7


def test_global_random_numbers_are_seeded_for_each_batch_in_every_worker():
    def stream(ctx):
        for rows in ctx.batches(20, 3):
            yield {"row": rows.tolist(), "draw": [np.random.rand(), torch.rand(1).item()]}

    one = epochs_of(wrap(stream, 1), 2)
    assert epochs_of(wrap(stream, 2), 2) == one
    draws = [batch["draw"][0] for epoch in one for batch in epoch]
    assert len(set(draws)) == len(draws)


def test_the_loops_own_random_state_is_left_alone():
    with preserved_randomness():
        before = random_digest()
        epochs_of(wrap(Strided().train_stream, 2), 1)
        assert random_digest() == before


def test_a_function_that_draws_when_it_is_called_leaves_the_loops_random_state_alone():
    def stream():
        return iter([{"x": np.random.permutation(5)}])

    with preserved_randomness():
        before = random_digest()
        epochs_of(wrap(stream, 1), 2)
        assert random_digest() == before


def test_only_the_first_worker_reads_a_stream_without_rows(tmp_path):
    def stream(ctx):
        for index in range(5):
            (tmp_path / f"{index}-{os.getpid()}").touch()
            yield {"x": [index]}

    epochs_of(wrap(stream, 3), 1)
    pids = {path.name.split("-")[1] for path in tmp_path.iterdir() if not path.name.startswith("0-")}
    assert len(pids) == 1
    assert str(os.getpid()) not in pids


def test_a_dataset_that_shares_its_items_among_workers_of_torch_is_read_whole():
    """One worker reads the whole dataset; it used to know of other workers, and lost the items that it left to them."""

    class Shared(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            first, step = (info.id, info.num_workers) if info is not None else (0, 1)
            return ({"x": [number]} for number in range(first, 6, step))

    with wrap(Shared, 2) as stream:
        assert [batch["x"] for batch in stream] == [[number] for number in range(6)]


# What comes over


def test_containers_and_dtypes_are_sent_unchanged():
    batch = {
        "large": np.ones((50, 100), np.float64),
        "small": np.arange(3, dtype=np.int16),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "fortran": np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
        "constant": np.broadcast_to(np.float32(3), (40, 60)),
        "frozen": np.frombuffer(bytes(range(200)) * 30, np.uint8),
        "swapped": np.arange(1000, dtype=np.dtype(">f8")),
        "backwards": np.arange(1000.0)[::-1],
        "text": ["a", "b"],
        "objects": np.array([None, "x"], dtype=object),
        "dates": np.arange(1000).astype("datetime64[s]"),
        "nested": ({"x": [np.zeros(2000)]}, 5),
        "ordered": OrderedDict(x=np.zeros(2000)),
        "jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4000, 3)], layout=torch.jagged),
    }
    with wrap(lambda: [batch], 1) as stream:
        (came,) = stream
    assert {key: type(value) for key, value in came.items()} == {key: type(value) for key, value in batch.items()}
    for name in ("large", "small", "fortran", "constant", "frozen", "backwards", "objects", "dates"):
        assert came[name].dtype == batch[name].dtype
        assert np.array_equal(came[name], batch[name])
    assert np.array_equal(came["swapped"], batch["swapped"])  # pickled, and so in the byte order of the machine
    assert came["half"].dtype == torch.bfloat16
    assert np.array_equal(came["nested"][0]["x"][0], np.zeros(2000))
    assert digest(came["jagged"]) == digest(batch["jagged"])


def test_an_array_that_is_in_a_batch_twice_is_one_array_in_the_loop_too():
    x = np.zeros(2000)
    with wrap(lambda: [{"x": x, "same": x}], 1) as stream:
        (came,) = stream
    assert came["x"] is came["same"]


def test_batches_that_no_pipe_holds_are_read_ahead(tmp_path):
    """A message that does not fit into a pipe blocks the worker until the loop reads it."""

    def stream():
        for index in range(3):
            (tmp_path / str(index)).touch()
            yield {"text": ["text" * 300_000]}

    workers = Workers(StreamPass(stream, "train", 0, 1), 1, 3, "fork")
    while not (tmp_path / "2").exists():
        pass
    assert [len(batch["text"][0]) for batch in workers] == [1_200_000] * 3
    workers.close()


@pytest.mark.parametrize("ahead", thinned([1, 2, 3], [2]))
def test_a_worker_makes_no_more_batches_ahead_of_the_loop_than_it_may(tmp_path, ahead):
    def stream(ctx):
        for rows in ctx.batches(20, 1):
            (tmp_path / str(rows[0])).touch()
            yield {"x": rows.tolist()}

    def made():
        return {int(path.name) for path in tmp_path.iterdir()}

    workers = Workers(StreamPass(stream, "train", 0, 1), 2, ahead, "fork")
    for taken in range(20):
        while len(made()) < min(20, taken + 2 * ahead):
            pass
        assert made() == set(range(min(20, taken + 2 * ahead)))
        item = next(workers)
        assert getattr(item, "batch", item) == {"x": [taken]}  # the first batch tells the number of rows, too
    assert list(workers) == []
    workers.close()


# What goes wrong


class Broken(ValueError):
    def __init__(self, code, *, place):
        super().__init__(f"{code} at {place}")
        self.code = code


@pytest.mark.parametrize(("workers", "at"), thinned([(1, 0), (1, 2), (2, 1), (2, 5), (3, 0), (3, 5)], [(1, 0), (2, 5)]))
def test_an_error_comes_after_the_batches_before_it_with_the_workers_traceback(workers, at):
    def stream(ctx):
        for number, rows in enumerate(ctx.batches(20, 3)):
            if 3 * at in rows:
                raise KeyError("no such image")
            yield {"x": rows, "number": number}

    got = []
    with wrap(stream, workers) as wrapper, pytest.raises(KeyError, match="no such image") as raised:
        got.extend(wrapper)
    assert len(got) == at
    notes = "\n".join(raised.value.__notes__)
    assert 'raise KeyError("no such image")' in notes
    assert "in worker process" in notes
    assert f"in stream 'train', batch {at} of the pass" in notes


def test_an_error_that_cannot_be_sent_comes_as_one_that_says_the_same():
    def stream():
        raise Broken(7, place="disk")
        yield

    with wrap(stream, 1) as wrapper, pytest.raises(StreamError, match="Broken: 7 at disk"):
        list(wrapper)


class Dying:
    def __init__(self, how):
        self.how = how

    def train_stream(self, ctx):
        for rows in ctx.batches(40, 2):
            if 6 in rows:
                if isinstance(self.how, signal.Signals):
                    os.kill(os.getpid(), self.how)
                os._exit(self.how)
            yield {"x": rows}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, "was killed by SIGKILL; .* when memory runs out"),
        *of_campaigns((signal.SIGSEGV, "was killed by SIGSEGV; a library that the stream uses crashed")),
        *of_campaigns((0, "ended by itself with exit status 0")),
        (3, "ended by itself with exit status 3"),
    ],
)
@pytest.mark.parametrize("method", SLOW)
def test_a_worker_that_dies_is_an_error_with_its_pid_and_how(how, message, method):
    stream = wrap(Dying(how).train_stream, 2, start_method=method)
    with stream, pytest.raises(StreamError, match=rf"worker process 1 \(pid \d+\) {message}"):
        list(stream)
    stream.close()


def test_a_worker_that_dies_is_an_error_also_when_a_process_that_it_forked_lives_on(tmp_path):
    """Such a process has copies of all open files, including the end of the pipe to the loop."""

    def stream():
        if child := os.fork():
            (tmp_path / "child").write_text(str(child))
            os._exit(3)
        signal.pause()
        yield

    with wrap(stream, 1) as wrapper, pytest.raises(StreamError, match="ended by itself with exit status 3"):
        list(wrapper)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


class Hanging:
    def __init__(self, mark):
        self.mark = mark

    def train_stream(self, ctx):
        for rows in ctx.batches(40, 2):
            if 6 in rows:
                hang_here(self.mark)
            yield {"x": rows}


RELEASED = threading.Event()


def hang_here(mark):
    mark.touch()
    RELEASED.wait()


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that a stream makes when it hangs: before, however long it takes, no time limit is over."""
    file, watch = tmp_path / "hangs", StreamWrapper._watch
    monkeypatch.setattr(StreamWrapper, "_watch", lambda self, seconds: watch(self, seconds) if file.exists() else None)
    return file


@pytest.fixture
def released():
    """Let the threads that hang end after the test; in worker processes nothing is ever released."""
    before = set(threading.enumerate())
    yield
    RELEASED.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    RELEASED.clear()


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(("workers", "buffer"), [(2, 0), (1, 4), (0, 2)])
def test_a_stream_that_hangs_is_an_error_after_the_time_limit_and_the_log_says_where(workers, buffer, mark, caplog):
    stream = wrap(Hanging(mark).train_stream, workers, buffer=buffer, timeout=1)
    with stream, pytest.raises(StreamError, match=r"yielded no batch for 1 seconds \(`main_loop.stream_timeout`\)"):
        list(stream)
    stream.close()
    assert ("in hang_here" in caplog.text) == (not workers)


def test_a_stream_that_cannot_be_sent_is_an_error_with_the_type_that_cannot():
    data = Plain()
    data.parts = {"files": [1, threading.Lock()]}
    stream = wrap(data.train_stream, 1, start_method="spawn")
    with stream, pytest.raises(StreamError, match=r"with start method spawn: cannot pickle .*lock' object; create"):
        next(iter(stream))


@pytest.mark.campaign  # a new process imports PyTorch; tests/faults has workers of all methods in `make test`
@pytest.mark.parametrize("method", METHODS[1:])
def test_what_cannot_be_read_in_a_worker_is_an_error_however_much_was_sent(tmp_path, monkeypatch, method):
    path = tmp_path / "only_here.py"
    path.write_text("class Data:\n    def train_stream(self):\n        yield {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = importlib.import_module("only_here").Data()
    data.x = np.zeros(10**6)
    path.unlink()
    importlib.invalidate_caches()
    stream = wrap(data.train_stream, 1, start_method=method)
    with stream, pytest.raises(ModuleNotFoundError, match="only_here") as caught:
        next(iter(stream))
    assert any("in worker process" in note for note in caught.value.__notes__)


def test_a_function_that_cannot_be_sent_is_named():
    stream = wrap(lambda: iter(()), 1, start_method="spawn")
    with stream, pytest.raises(StreamError, match=r"with start method spawn: Can't .*<lambda>"):
        next(iter(stream))


# The end


@pytest.mark.parametrize("taken", thinned([0, 1, 8], [1]))
def test_no_process_and_no_file_is_left_behind(taken, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    epochs_of(wrap(Strided().train_stream, 1), 1)  # what multiprocessing keeps for the next time
    own = psutil.Process()
    before, files = {*own.children()}, own.num_fds()
    stream = wrap(Strided().train_stream, 3)
    with stream:
        list(itertools.islice(iter(stream), taken))
    stream.close()
    assert {*own.children()} <= before
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert own.num_fds() <= files


@pytest.mark.parametrize("method", SLOW)
def test_a_batch_that_cannot_be_sent_is_an_error(method):
    stream = wrap(Unsendable().train_stream, 2, start_method=method)
    with (
        stream,
        pytest.raises(StreamError, match=r"a batch cannot be sent .*lock") as caught,
    ):
        list(stream)
    assert "in stream 'train', batch 1 of the pass" in caught.value.__notes__


class Unsendable:
    def train_stream(self, ctx):
        for rows in ctx.batches(6, 2):
            yield {"x": rows if 0 in rows else threading.Lock()}


def test_only_the_part_of_a_tensor_that_is_given_is_sent():
    with wrap(Views().train_stream, 1) as stream:
        sizes = [(batch["x"].tolist(), batch["x"].untyped_storage().nbytes()) for batch in stream]
    assert sizes == [([0, 1], 16), ([2, 3], 16)]


class Views:
    def __init__(self):
        self.x = torch.arange(4)

    def train_stream(self, ctx):
        for rows in ctx.batches(4, 2):
            yield {"x": self.x[int(rows[0]) : int(rows[-1]) + 1]}


@pytest.mark.parametrize("method", SLOW)
def test_workers_begin_with_signals_blocked_and_end_with_a_loop_that_is_killed(tmp_path, method, short_folder):
    (tmp_path / "main.py").write_text(
        "import signal\n"
        "from emrun.streams.reading import Reading\n"
        "from emrun.streams.stream import StreamWrapper\n"
        "def stream(ctx):\n"
        "    for rows in ctx.batches(10**6, 1):\n"
        "        yield {'x': ['text' * 30000]}\n"
        "if __name__ == '__main__':\n"
        f"    reading = Reading(20, 2, {method!r})\n"
        "    with StreamWrapper(stream, reading=reading) as wrapper:\n"
        "        next(iter(wrapper))\n"
        "        print('begun', flush=True)\n"
        "        signal.pause()\n"
        "else:\n"
        "    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "    with open('masks', 'a') as file: print(*sorted(each.name for each in mask), file=file)\n"
    )
    begun, said = os.pipe()
    if method == "fork":
        process = multiprocessing.get_context("fork").Process(
            target=run_as_main, args=(tmp_path / "main.py", said, short_folder)
        )
        process.start()
    else:
        environment = {**os.environ, "TMPDIR": str(short_folder)}
        process = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, stdout=said, env=environment)
    os.close(said)
    with os.fdopen(begun, "rb") as output:
        assert output.readline() == b"begun\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.join() if method == "fork" else process.wait()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list(short_folder.glob("emrun-*")) == []
    if method != "fork":  # a signal of the group must not reach a worker before it can ignore it
        assert set((tmp_path / "masks").read_text().splitlines()) == {"SIGHUP SIGINT SIGTERM SIGUSR1"}


def run_as_main(path, output, folder):
    """Run a program with this standard output, in a fork, which needs no time to import PyTorch."""
    os.dup2(output, 1)
    os.close(output)
    sys.stdout = os.fdopen(1, "w")
    tempfile.tempdir = str(folder)
    runpy.run_path(str(path), run_name="__main__")


@pytest.fixture
def short_folder():
    """Return a folder with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="e") as folder:
        yield Path(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the loader, half made
def test_what_was_begun_ends_when_a_process_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {*psutil.Process().children()}
    start, started = multiprocessing.context.ForkProcess.start, []

    def once(self):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(self)
        start(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", once)
    stream = wrap(Strided().train_stream, 2, start_method="fork")
    with stream, pytest.raises(BlockingIOError):
        next(iter(stream))
    assert len(started) == 1
    assert {*psutil.Process().children()} <= before
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_ends_long_before_another_one_yields_a_batch_is_not_an_error(tmp_path):
    def late():
        while not (tmp_path / "go on").exists():
            pass
        yield {"x": [1]}

    workers = Workers(StreamPass(late, "train", 0, 1), 2, 2, "fork")
    got = []
    reader = threading.Thread(target=lambda: got.extend(workers))
    reader.start()
    second = workers._processes[1]
    second.join(60)
    assert second.exitcode == 0
    (tmp_path / "go on").touch()
    reader.join()
    assert got == [{"x": [1]}]
    workers.close()


def test_the_handler_of_a_data_loader_hears_nothing_of_the_processes(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)  # in this process
    before = signal.getsignal(signal.SIGCHLD)
    try:
        list(torch.utils.data.DataLoader([1, 2], num_workers=1))  # sets its handler for good
        assert signal.getsignal(signal.SIGCHLD) != before
        with wrap(Strided().train_stream, 2) as stream:
            next(iter(stream))
        with wrap(Dying(signal.SIGKILL).train_stream, 2) as stream, pytest.raises(StreamError, match="was killed by"):
            list(stream)
        assert signal.getsignal(signal.SIGCHLD) != before
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_handlers_and_masks_are_as_before():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    epochs_of(wrap(Strided().train_stream, 2), 1)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


@pytest.mark.parametrize("number", thinned([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], [signal.SIGINT]))
def test_a_signal_of_the_group_does_not_end_a_worker_and_is_not_kept_from_what_it_starts(number):
    def stream():
        os.kill(os.getpid(), number)
        yield {"x": [1], "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}

    with wrap(stream, 1, start_method="fork") as wrapper:
        assert list(wrapper) == [{"x": [1], "blocked": []}]


@pytest.mark.parametrize("taken", thinned([1, 3], [3]))
def test_the_reader_ends_with_the_processes_that_it_waits_for(taken, tmp_path):
    before = readers()
    stream = wrap(Hanging(tmp_path / "hangs").train_stream, 1)
    with stream:
        list(itertools.islice(iter(stream), taken))
        stream.close()
    assert readers() <= before


def readers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")}


def test_processes_that_are_forked_later_and_the_end_of_a_loop_with_workers_write_nothing(capfd):
    def loop():
        first = wrap(Strided().train_stream, 2).__enter__()
        next(iter(first))
        for _ in range(2):
            with wrap(Strided().train_stream, 2, training=False) as other:
                next(iter(other))

    process = multiprocessing.get_context("fork").Process(target=loop)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", SLOW)
def test_too_many_open_files_are_an_error_that_names_the_limit(tmp_path, warm, method):
    (tmp_path / "few.py").write_text(
        "import resource, sys; sys.path[:0] = sys.argv[1], sys.argv[1] + '/tests'\n"
        "from tests.streams.test_workers import Strided, wrap\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\n"
        "with wrap(Strided().train_stream, 2, start_method=sys.argv[2]) as stream:\n"
        "    list(stream)"
    )
    root = str(Path(__file__).parents[2])
    done = warm.run([str(tmp_path / "few.py"), root, method], tmp_path, timeout=100)
    assert done.stderr.count("this process may open 8 (`ulimit -n`); raise the limit, use fewer `workers`") == 1
    assert "AttributeError" not in done.stderr


def test_too_many_open_files_of_a_worker_process_that_sends_a_batch_are_told_too():
    """Shared memory, by which a large array is sent, is a file."""

    def stream():
        yield {"x": [0]}
        highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        while os.open(os.devnull, os.O_RDONLY) < highest:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
        yield {"x": np.zeros(1 << 20)}

    with wrap(stream, 1, start_method="fork") as wrapper, pytest.raises(StreamError, match="too many open files for"):
        list(wrapper)


def test_a_stop_iteration_that_a_stream_raises_in_a_worker_is_named():
    def stream():
        yield {"x": [0]}
        next(iter(()))

    with wrap(stream, 1) as wrapper, pytest.raises(StreamError, match=r"raised StopIteration \(.*test_workers.py:\d+"):
        list(wrapper)


def test_a_process_that_cannot_be_started_after_another_leaves_nothing_but_its_error(monkeypatch):
    """The loader, which has started one process of two, used to raise when it was deleted; here that is an error."""
    started, real = [], multiprocessing.process.BaseProcess.start

    def start(process):
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        started.append(process)
        real(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(StreamError, match="too many open files for its 2 worker processes"):
        Workers(StreamPass(lambda: iter([]), "train", 0, 1), 2, 2, "fork")
    gc.collect()
    started[0].join()


def test_many_small_batches_ahead_of_one_worker_do_not_stop_it():
    def stream(ctx):
        for rows in ctx.batches(8000, 4):
            yield {"x": rows}

    with wrap(stream, 1, buffer=1000, timeout=60) as stream:
        assert sum(1 for _ in stream) == 2000  # more than fit into the pipe in either direction


class Detailed(Exception):
    """An error with a tensor, which would be lost in shared memory when its process ends."""


@pytest.mark.parametrize("error", [Detailed("bad batch", torch.arange(10)), ValueError("x" * 100_000)], ids=type)
def test_an_error_arrives_although_its_worker_ends_before_the_loop_reads_it(error):
    def stream(ctx):
        for index, rows in enumerate(ctx.batches(12, 4)):
            if index == 1:
                raise error
            yield {"x": rows}

    with wrap(stream, 1) as stream, pytest.raises(type(error)) as caught:
        for _ in stream:
            for worker in multiprocessing.active_children():  # none if the worker has ended
                worker.join()  # its error is in the pipe now
    assert str(caught.value) == str(error)


# Arrays that are made in shared memory


class Made:
    def train_stream(self, ctx):
        for rows in ctx.batches(12, 3):
            big = ctx.empty((3, 40, 40), np.uint8)
            big[...] = rows[0]
            small = ctx.empty(2)
            small[...] = rows[0]
            yield {"whole": big, "view": ctx.empty((4, 40, 40), np.uint8)[:0], "small": small}


@pytest.mark.parametrize("workers", thinned([0, 1, 2], [0, 2]))
def test_arrays_of_ctx_empty_are_those_of_numpy(workers):
    (batches,) = epochs_of(wrap(Made().train_stream, workers), 1)
    assert batches == [
        {
            "whole": plain(np.full((3, 40, 40), first, np.uint8)),
            "view": plain(np.empty((0, 40, 40), np.uint8)),
            "small": plain(np.full(2, first, np.float32)),
        }
        for first in (0, 3, 6, 9)
    ]


def test_an_array_of_ctx_empty_is_sent_without_a_copy_once_and_can_then_not_be_written_to():
    array = shared_empty((100, 100), np.float32)
    array[...] = 7
    one, two = pickle.loads(packed(array)), pickle.loads(packed(array))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    one[0], before = 9, array[0, 0].copy()  # the memory of `one` is that of `array`
    assert (before, array[0, 0], two[0, 0]) == (7, 9, 7)
    assert not packing._made
    view = shared_empty((100, 100), np.float32)
    found = pickle.loads(packed(view[:50]))
    found[...] = 1
    view[...] = 2
    assert found.max() == 1


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_worker_keeps_no_array_while_the_stream_makes_the_next_batch(of_numpy):
    def made(ctx, last):
        array = np.empty(10_000) if of_numpy else ctx.empty(10_000)
        return [{"x": array, "kept": [last is not None and last() is not None]}], weakref.ref(array)

    def stream(ctx):
        last = None
        for _ in ctx.batches(3, 1):
            batches, last = made(ctx, last)
            yield batches.pop()

    with wrap(stream, 1) as batches:
        assert [batch["kept"] for batch in batches] == [[False]] * 3


def test_a_stream_that_another_stream_is_made_of_has_shared_memory_too():
    def part(ctx):
        for _ in ctx.batches(2, 1):
            array = ctx.empty(10_000)
            yield {"is_shared": [id(array) in packing._made]}

    with wrap(lambda: iter(StreamWrapper(part, "part", training=False)), 1) as stream:
        assert [batch["is_shared"] for batch in stream] == [[True], [True]]


class Many:
    values = (
        *(torch.full((each,), float(each)) for each in (1, 2000) for _ in range(50)),
        *(torch.ones(2, 3).T, torch.ones(2000, dtype=torch.bfloat16), np.ones(3000)),
    )

    def train_stream(self):
        yield {"x": list(self.values)}


def test_a_list_of_many_tensors_takes_few_open_files():
    with wrap(Many().train_stream, 1) as stream:
        before = psutil.Process().num_fds()
        (found,) = (batch["x"] for batch in stream)
        assert psutil.Process().num_fds() - before < 40
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(found, Many.values, strict=True))
    assert [each.dtype for each in found] == [each.dtype for each in Many.values]
    for each in found[:100]:
        each.add_(1)


def test_a_full_shared_memory_is_an_error_with_its_size(monkeypatch):
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 2000, 2000))
    stream = wrap(lambda ctx: iter([{"x": np.zeros(10_000)}]), 1)
    with pytest.raises(StorageError, match=r"/dev/shm, the shared memory, has 2 KB free, .* needs 80 KB") as caught:
        epochs_of(stream, 1)
    assert caught.value.exit_status == 74


def test_a_stream_that_starts_processes_in_a_worker_is_told_which_key_to_change():
    def stream(ctx):
        for rows in ctx.batches(2, 1):
            multiprocessing.Process(target=print).start()
            yield {"x": rows}

    with pytest.raises(StreamError, match=r"'train' starts processes, .* write main_loop.workers=0, or") as raised:
        next(Workers(StreamPass(stream, "train", 0, 1), 1, 1, "fork"))
    assert raised.value.exit_status == 2
