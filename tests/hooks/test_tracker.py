"""Trackers: what they are sent, when, and what happens when they cannot be reached."""

import itertools
import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import pytest

from emrun import AbstractHook, create_training, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import AbstractTracker
from emrun.training.create import train

FILE_TRACKER = """
import json
from emrun.hooks import AbstractTracker


class Told(AbstractTracker):
    def start(self, facts, identity):
        self.write({"start": identity is None})
        return identity or facts.name

    def newest(self):
        rows = [json.loads(line) for line in (self.output_dir / "told.jsonl").read_text().splitlines()]
        return max((row["iteration"] for row in rows if "iteration" in row), default=-1)

    def send(self, rows):
        for row in rows:
            self.write({"iteration": row.iteration, "epoch": row.epoch, **row.values})

    def finish(self, status, reason):
        self.write({"finish": status, "reason": reason})

    def write(self, content):
        with (self.output_dir / "told.jsonl").open("a") as file:
            file.write(json.dumps(content) + "\\n")
"""


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_is_told_each_row_once_whatever_interrupts_the_run(run_often, signals):
    place = run_often("  - told.Told: {every: 10 updates}", signals, {"told.py": FILE_TRACKER})
    straight, often = told(place / "straight" / "told.jsonl"), told(place / "often" / "told.jsonl")
    assert straight[0] == {"start": True}
    assert straight[-1] == {"finish": "finished", "reason": "3 epochs done (StopAfter epochs: 3)"}
    values = [row for row in straight if "iteration" in row]
    assert [row["iteration"] for row in values] == [0, 10, 20, 30, 40, 45, 50, 60, 70, 80, 90, 100, 110, 120, 130, 135]
    assert [row["epoch"] for row in values if row["epoch"] is not None] == [0, 1, 2, 3]
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

    def start(self, facts, identity):
        self._post({"start": facts.name})
        return facts.name

    def send(self, rows):
        self._post([row.iteration for row in rows])

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

    def make(url, epochs=3, **arguments):
        config = digits_config([{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": epochs}}])
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
        training = post(url)

        def after_stream(stream_name):
            epoch = training.main_loop.training_epochs_done
            if (stream_name, epoch) == ("valid", 0):
                server.is_up = False
            elif (stream_name, epoch) == ("train", 2):
                assert server.refused.wait(60)
                server.is_up = True

        training.main_loop.change_hooks([*training.main_loop.hooks, Calls(after_stream)])
        train(training)
    assert iterations(server) == [0, 15, 30, 45]
    assert server.got[-1] == {"finish": "finished"}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in warnings if "Post" in each] == [
        "Post: the tracker cannot be reached: HTTPError: HTTP Error 503: Service Unavailable; the rows are sent later"
    ]
    assert "Post: the tracker is back" in caplog.text


def test_a_server_that_hangs_does_not_stop_the_run_and_a_resume_sends_the_rest(post, caplog):
    with serving() as (server, url):
        training = post(url, timeout=0.2)
        training.main_loop.change_hooks([*training.main_loop.hooks, Calls(lambda name: server.free.clear())])
        train(training)
        assert training.main_loop.outcome.status == "finished"
        assert "Post: the tracker did not take all rows; `emrun resume" in caplog.text
        server.got.clear()
        server.free.set()
        again = post(url, timeout=60)
        train(again)
        assert iterations(server)[-4:] == [0, 15, 30, 45]
        assert server.got[-1] == {"finish": "finished"}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error(post, hangs):
    with serving() as (server, url):
        server.is_up = hangs
        server.free.clear()
        why = r"no answer in 0\.2 seconds" if hangs else "HTTPError: HTTP Error 503: Service Unavailable"
        with pytest.raises(HookError, match=f"Post cannot reach the tracker: {why}; start it, correct its address"):
            train(post(url, timeout=0.2 if hangs else 60))


def test_a_resume_with_a_tracker_that_is_down_is_a_warning(post, caplog):
    with serving() as (_, url):
        train(post(url))
    train(post(url, epochs=4, timeout=60))  # nobody listens any more
    assert "Post: the tracker cannot be reached: URLError" in caplog.text
    assert "the tracker did not take all rows after iteration 45" in caplog.text


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"every": "2 epochs"}, "every"), ({"every": "5 minutes"}, "every"), ({"timeout": 0}, "timeout"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        Post("http://127.0.0.1:1", **arguments)
    assert caught.value.argument == argument


def test_a_damaged_file_begins_a_new_run_of_the_tracker(post, caplog, tmp_path):
    with serving() as (server, url):
        train(post(url))
        path = tmp_path / "run" / "trackers" / "Post.json"
        written = json.loads(path.read_text())
        assert {**written, "arguments": {}} == {"identity": "run", "epoch": 3, "iteration": 45, "arguments": {}}
        path.write_text("{")
        train(post(url, epochs=4))
    assert f"{path} is damaged; the tracker begins a new run" in caplog.text
    assert iterations(server) == [0, 15, 30, 45, 0, 15, 30, 45, 60]


def test_two_trackers_of_a_class_have_a_file_each(post, tmp_path):
    with serving() as (one, url), serving() as (two, other):
        training = post(url)
        second = Post(other, output_dir=tmp_path / "run")
        training.main_loop.change_hooks([*training.main_loop.hooks, second])
        train(training)
    assert iterations(one) == iterations(two) == [0, 15, 30, 45]
    assert sorted(path.name for path in (tmp_path / "run" / "trackers").iterdir()) == ["Post-2.json", "Post.json"]


def test_trackers_in_another_order_continue_their_own_runs_and_a_new_one_begins_one(post, tmp_path):
    def go(epochs, *urls):
        training = post(urls[0], epochs=epochs)
        others = [Post(url, output_dir=tmp_path / "run") for url in urls[1:]]
        training.main_loop.change_hooks([*training.main_loop.hooks, *others])
        train(training)

    with serving() as (one, url), serving() as (two, other), serving() as (three, new):
        go(3, url, other)
        go(4, new, other, url)
    assert iterations(one) == iterations(two) == iterations(three) == [0, 15, 30, 45, 60]
