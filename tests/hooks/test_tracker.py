"""Trackers: what they are sent, when, and what happens when they cannot be reached."""

import errno
import io
import itertools
import json
import logging
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import numpy as np
import pytest
from campaign import thinned

from emrun import AbstractHook, create_training, resume_training
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.events import check_events
from emrun.hooks import AbstractTracker
from emrun.hooks._shared.figures import png
from emrun.record.rows import Row
from emrun.shown import Counts, Picture, Text
from emrun.training.create import train

# a thread that waits for a server that hangs is left behind with its socket
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FILE_TRACKER = """
import json
from emrun.hooks import AbstractTracker


class Told(AbstractTracker):
    def begin(self, facts, identity):
        self.say({"start": identity is None})
        return identity or facts.name

    def newest(self):
        rows = [json.loads(line) for line in (self.output_dir / "told.jsonl").read_text().splitlines()]
        return max((row["iteration"] for row in rows if "iteration" in row), default=-1)

    def write(self, row):
        epoch = row.epoch if row.every is None else None
        self.say({"iteration": row.iteration, "epoch": epoch, **row.values})

    def finish(self, status, reason):
        self.say({"finish": status, "reason": reason})

    def say(self, content):
        with (self.output_dir / "told.jsonl").open("a") as file:
            file.write(json.dumps(content) + "\\n")
"""


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_is_told_each_row_once_whatever_interrupts_the_run(run_often, signals, epochs, due, emrun_here):
    place = run_often("  - told.Told: {every: 10 updates}", signals, {"told.py": FILE_TRACKER}, emrun_here)
    straight, often = told(place / "straight" / "told.jsonl"), told(place / "often" / "told.jsonl")
    assert straight[0] == {"start": True}
    assert straight[-1] == {"finish": "finished", "reason": f"{epochs} epochs done (StopAfter epochs: {epochs})"}
    values = [row for row in straight if "iteration" in row]
    assert [row["iteration"] for row in values] == due
    assert [row["epoch"] for row in values if row["epoch"] is not None] == [*range(epochs + 1)]
    assert merged(often) == merged(straight)
    assert [row["start"] for row in often if "start" in row] == [True, *[False] * len(signals)]


def merged(rows):
    """Return name and iteration of each value with all the times that it came, in the order of iterations."""
    found = [
        (row["iteration"], name, value)
        for row in rows
        if "iteration" in row
        for name, value in row.items()
        if name not in ("iteration", "epoch")
    ]
    return sorted(found, key=lambda each: each[:2])


class Post(AbstractTracker):
    """Posts rows to a server."""

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.url = url

    def begin(self, facts, identity):
        self._post({"start": facts.name})
        return facts.name

    def newest(self):
        return None

    def write(self, row):
        self._post([row.iteration])

    def finish(self, status, reason):
        self._post({"finish": status})

    def _post(self, content):
        urlopen(Request(self.url, json.dumps(content).encode()), timeout=60).close()


class Calls(AbstractHook):
    """Calls a function after each stream."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def after_stream(self, stream_name):
        self.function(stream_name)


class Server(ThreadingHTTPServer):
    """Keeps what it gets; hangs while `free` is not set, and refuses while `is_up` is false."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.got, self.free, self.is_up = [], threading.Event(), True
        self.free.set()
        self.refused = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.is_up:
            self.server.refused.set()
            self.send_error(503)
            return
        self.server.free.wait()
        self.server.got.append(content)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@contextmanager
def serving():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.free.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def post(digits_config, tmp_path):
    """Return a training with a tracker that posts to a URL, its directory, and the tracker."""

    def make(url, epochs=1, **arguments):
        hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": epochs}}]
        config = digits_config(hooks, batch_size=500)  # three updates in an epoch
        directory = tmp_path / "run"
        if directory.exists():
            training = resume_training(directory, [f"hooks.StopAfter.epochs={epochs}"], checkpoint_name="latest")
        else:
            training = create_training(config, output_dir=directory)
        hook = Post(url, output_dir=directory, **arguments)
        training.main_loop.change_hooks([*training.main_loop.hooks, hook])
        return training

    return make


def iterations(server):
    return list(itertools.chain.from_iterable(each for each in server.got if isinstance(each, list)))


def test_what_a_server_that_was_down_has_missed_comes_later(post, caplog):
    caplog.set_level(logging.INFO)
    with serving() as (server, url):
        training = post(url, epochs=3)

        def after_stream(stream_name):
            epoch = training.main_loop.training_epochs_done
            if (stream_name, epoch) == ("valid", 0):
                server.is_up = False
            elif (stream_name, epoch) == ("train", 2):
                assert server.refused.wait(60)
                server.is_up = True

        training.main_loop.change_hooks([*training.main_loop.hooks, Calls(after_stream)])
        train(training)
    assert iterations(server) == [0, 3, 6, 9]
    assert server.got[-1] == {"finish": "finished"}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in warnings if "Post" in each] == [
        "Post: the tracker cannot be reached: HTTPError: HTTP Error 503: Service Unavailable; the rows are sent later"
    ]
    assert "Post: the tracker is back" in caplog.text


def test_a_server_that_hangs_does_not_stop_the_run_and_a_resume_sends_the_rest(post, caplog):
    with serving() as (server, url):
        training = post(url)
        *hooks, tracker = training.main_loop.hooks

        def hang(stream_name):
            server.free.clear()
            tracker._timeout = 0.2  # only now: it has been connected in its time

        training.main_loop.change_hooks([*hooks, tracker, Calls(hang)])
        train(training)
        assert training.main_loop.outcome.status == "finished"
        assert "Post: the tracker did not take all rows; `emrun resume" in caplog.text
        server.got.clear()
        server.free.set()
        again = post(url)
        train(again)
        assert iterations(server)[-2:] == [0, 3]
        assert server.got[-1] == {"finish": "finished"}


FAILS = FILE_TRACKER.replace(
    "    def write(self, row):\n",
    "    def write(self, row):\n"
    '        if row.iteration > 15 and not (self.output_dir / "is_up").exists():\n'
    '            raise ConnectionError("nobody listens")\n',
)


def test_a_resume_of_a_finished_run_sends_what_the_tracker_has_not_taken(
    digits_config, tmp_path, monkeypatch, caplog, request
):
    name = f"told_{request.node.name}"
    (tmp_path / f"{name}.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {f"{name}.Told": {"every": "5 updates"}}]
    run = tmp_path / "run"
    train(create_training(digits_config([*hooks, {"StopAfter": {"epochs": 2}}]), output_dir=run))
    assert "Told: the tracker did not take all rows after iteration 15; `emrun resume" in caplog.text
    assert [row["iteration"] for row in told(run / "told.jsonl") if "iteration" in row] == [0, 5, 10, 15]
    (run / "is_up").touch()
    assert resume_training(run) is None
    rows = told(run / "told.jsonl")
    assert [row["iteration"] for row in rows if "iteration" in row] == [0, 5, 10, 15, 20, 25, 30]
    assert [row["epoch"] for row in rows if row.get("epoch") is not None] == [0, 1, 2]
    assert rows[-1] == {"finish": "finished", "reason": "2 epochs done (StopAfter epochs: 2)"}
    assert resume_training(run) is None
    assert told(run / "told.jsonl") == rows


def test_the_sample_gets_no_row_twice_if_a_kill_comes_before_the_note_of_what_was_sent(
    digits_config, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend("sample_configs/tracker")
    file, run = tmp_path / "rows.jsonl", tmp_path / "run"
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"my_tracker.AppendRows": {"file": str(file)}}]
    train(create_training(digits_config([*hooks, {"StopAfter": {"epochs": 1}}], batch_size=500), output_dir=run))
    rows = told(file)
    assert [row["iteration"] for row in rows] == [0, 3]
    note = run / "trackers" / "AppendRows.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "last": [0, 0, 0]}))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"run": "another", "iteration": 99}]))
    train(resume_training(run, ["hooks.StopAfter.epochs=2"]))
    assert [row["iteration"] for row in told(file)] == [0, 3, 99, 6]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["begin", "write"], "no method newest, which is called to do this: Return the newest iteration"),
        (["newest", "write"], "no method begin, which is called to do this: Begin, or continue"),
        (["begin", "newest"], "no method write, which is called to do this: Write a row"),
        (["begin", "newest", "write", "finnish"], r"finnish is not a method that emrun calls; did you mean 'finish'\?"),
    ],
)
def test_a_tracker_without_a_method_or_with_a_misspelt_one_is_refused(methods, message):
    mine = type("Mine", (AbstractTracker,), dict.fromkeys(methods, lambda *_: None))
    with pytest.raises(HookError, match=f"Mine.*{message}"):
        check_events(mine)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error(post, hangs):
    with serving() as (server, url):
        server.is_up = hangs
        server.free.clear()
        why = r"TimeoutError: no answer in 0\.2 seconds" if hangs else "HTTPError: HTTP Error 503: Service Unavailable"
        with pytest.raises(HookError, match=f"Post cannot reach the tracker: {why}; start it, correct its address"):
            train(post(url, timeout=0.2 if hangs else 60))


def test_an_error_of_several_lines_is_told_whole_and_on_one_line(post, monkeypatch):
    def begin(self, facts, identity):
        raise ValueError("1 wrong setting\nreinit\n  'create_new' is not allowed")

    monkeypatch.setattr(Post, "begin", begin)
    with pytest.raises(
        HookError, match="tracker: ValueError: 1 wrong setting reinit 'create_new' is not allowed; start"
    ):
        train(post("http://127.0.0.1:9"))


def test_a_resume_with_a_tracker_that_is_down_is_a_warning(post, caplog):
    with serving() as (_, url):
        train(post(url))
    train(post(url, epochs=2, timeout=60))  # nobody listens any more
    assert "Post: the tracker cannot be reached: URLError" in caplog.text
    assert "the tracker did not take all rows after iteration 3" in caplog.text


def test_what_hooks_show_is_given_as_objects_of_the_service():
    shown = {
        "p": Picture(png(np.zeros((2, 3, 3), dtype=np.uint8))),
        "h": Counts([0.0, 0.5, 1.0], [1, 2], 2.0, 2.0),
        "t": Text("**t**"),
    }
    of = {kind: lambda *args, kind=kind, **kwargs: (kind, *args, kwargs) for kind in ("picture", "histogram", "text")}
    found = Post.objects_of(Row(1, 1, None, 1, shown=shown), **of)
    assert (found["p"][0], found["p"][1].size) == ("picture", (3, 2))
    assert found["h"] == ("histogram", {"np_histogram": ([1, 2], [0.0, 0.5, 1.0])})
    assert found["t"] == ("text", "**t**", {})


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"every": "2 epochs"}, "every"), ({"timeout": 0}, "timeout"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        Post("http://127.0.0.1:1", **arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize("text", thinned(["{", "[" * 100_000], ["{"]))
def test_a_damaged_file_begins_a_new_run_of_the_tracker(post, caplog, tmp_path, text):
    with serving() as (server, url):
        train(post(url))
        path = tmp_path / "run" / "trackers" / "Post.json"
        written = json.loads(path.read_text())
        assert written == {"identity": "run", "home": written["home"], "last": [3, 0, 1], "status": "finished"}
        path.write_text(text)
        train(post(url, epochs=2))
    assert f"{path} is damaged; the tracker begins a new run" in caplog.text
    assert iterations(server) == [0, 3, 0, 3, 6]


def test_a_file_that_cannot_be_read_in_time_is_told_and_begins_no_new_run(post, monkeypatch, tmp_path):
    with serving() as (server, url):
        train(post(url))
        path = tmp_path / "run" / "trackers" / "Post.json"
        before, training = path.read_text(), post(url, epochs=4)
        with monkeypatch.context() as patched:
            for module in (io, os):
                patched.setattr(module, "open", partial(timing_out, module.open, path))
            with pytest.raises(StorageError, match=r"cannot read .*Post.json: timed out"):
                train(training)
        assert path.read_text() == before
        train(post(url, epochs=2))
    assert iterations(server) == [0, 3, 6]


def timing_out(opened, path, file, *arguments, **keywords):
    """Open a file; a time-out if it is the one at the path."""
    if str(file) in (str(path), path.name):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
    return opened(file, *arguments, **keywords)


def test_two_trackers_of_a_class_have_a_file_each(post, tmp_path):
    with serving() as (one, url), serving() as (two, other):
        training = post(url)
        second = Post(other, output_dir=tmp_path / "run")
        training.main_loop.change_hooks([*training.main_loop.hooks, second])
        train(training)
    assert iterations(one) == iterations(two) == [0, 3]
    assert sorted(path.name for path in (tmp_path / "run" / "trackers").iterdir()) == ["Post-2.json", "Post.json"]


@pytest.mark.parametrize(("how", "is_continued"), [
    (lambda run, new: run.rename(new), True),
    (lambda run, new: shutil.copytree(run, new, symlinks=True), False),
])  # fmt: skip
def test_a_copy_of_a_run_begins_a_new_run_of_the_tracker_and_a_run_that_was_moved_continues_its_own(
    post, tmp_path, how, is_continued
):
    with serving() as (server, url):
        train(post(url))
        how(tmp_path / "run", tmp_path / "new")
        server.got.clear()
        training = resume_training(tmp_path / "new", ["hooks.StopAfter.epochs=2"])
        hook = Post(url, output_dir=tmp_path / "new")
        training.main_loop.change_hooks([*training.main_loop.hooks, hook])
        train(training)
    assert iterations(server) == ([6] if is_continued else [0, 3, 6])


def test_a_run_that_is_restored_at_its_place_continues_the_run_of_the_tracker(post, tmp_path):
    with serving() as (server, url):
        train(post(url))
        (tmp_path / "run").rename(tmp_path / "old")
        shutil.copytree(tmp_path / "old", tmp_path / "run", symlinks=True)
        shutil.rmtree(tmp_path / "old")
        train(post(url, epochs=2))
    assert iterations(server) == [0, 3, 6]


HANGS = """
import time

from emrun.hooks import AbstractTracker


class Hangs(AbstractTracker):
    def begin(self, facts, identity):
        return "one"

    def newest(self):
        return None

    def write(self, row):
        print("hangs", flush=True)
        time.sleep(10**6)
"""


def test_a_tracker_that_hangs_does_not_keep_the_process(often_project, emrun):
    place = often_project("  - hangs.Hangs: {timeout: 0.1}", {"hangs.py": HANGS})
    done = emrun("train", "-q", "config.yaml", "hooks.StopAfter.epochs=1", "--output-dir", "run", cwd=place)
    assert (done.returncode, done.stdout) == (0, "hangs\n")
    assert "Hangs: the tracker did not take all rows; `emrun resume" in done.stderr
