"""Worker processes that die, hang or get the signals of their group.

The installed command trains in a process of its own; where processes fork, this process may have been forked too.

Taken out once by hand, each of these made this fail: looking whether the processes are there; looking at the clock;
ignoring the signals of the group in the processes.
"""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from emrun.streams.stream import StreamWrapper

EMRUN = Path(sys.executable).with_name("emrun")
METHODS = ("fork", "forkserver", "spawn")

PARTS = """
import ctypes
import os
import pathlib
import signal
import threading

import numpy as np
from emrun import AbstractDataset


class Data(AbstractDataset):
    def __init__(self, fault: str = "", at: int = 5):
        self.fault, self.at = fault, at
        self.x = np.random.default_rng(0).random((48, 11)).astype(np.float32)
        self.y = (self.x.sum(axis=1) > 5.5).astype(np.float32)

    def train_stream(self, ctx):
        for number, rows in enumerate(ctx.batches(48, 4, shuffle=True)):
            if ctx.epoch == 1 and ctx.start + number == self.at // 2:
                self.happen()
            yield {"x": self.x[rows] + ctx.rng.normal(size=(len(rows), 11)).astype(np.float32) / 9, "y": self.y[rows]}

    def happen(self):
        if self.fault in ("SIGKILL", "SIGSEGV"):
            os.kill(os.getpid(), getattr(signal, self.fault))
        if self.fault == "exit":
            os._exit(3)
        if "hang" in self.fault:
            pathlib.Path("hangs").touch()
        if self.fault == "hang":
            threading.Event().wait()
        if self.fault == "hang in C":
            ctypes.PyDLL(None).pause()  # with the interpreter lock held
        if self.fault == "wait for the group's signal":
            pathlib.Path("here").touch()
            while not pathlib.Path("go on").exists():
                pass
"""

CONFIG = """
seed: 5
dataset: {class: parts.Data}
model:
  module:
    class: torch.nn.Sequential
    args:
      - {class: torch.nn.Linear, in_features: 11, out_features: 1}
      - {class: torch.nn.Dropout, p: 0.2}
      - {class: torch.nn.Flatten, start_dim: 0}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.BCEWithLogitsLoss, inputs: [logit, y]}
  optimizer: {class: Adam, lr: 0.05}
main_loop: {skip_zeroth_epoch: true}
hooks:
  - ComputeStats: {variables: [loss]}
  - SaveLatest
  - StopAfter: {epochs: 2}
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def begun(project, small):
    """Return a function that begins the command in a session of its own; `anew`: imports PyTorch again."""

    def begin(*arguments, anew=False):
        def prepare():
            faulthandler.disable()  # pytest's
            os.setsid()
            if anew:
                os.execv(EMRUN, [EMRUN, *arguments])

        return small.began(arguments, project, prepare)

    return begin


@pytest.fixture
def run(begun, small):
    """Return a function that runs the command, and finds that it leaves no process."""

    def wait(*arguments, anew=False):
        command = begun(*arguments, anew=anew)
        done = small.finished(command)
        left = [each for each in psutil.process_iter(["pid"]) if session_of(each.pid) == command[0]]
        assert psutil.wait_procs(left, timeout=60)[1] == []  # the tracker of multiprocessing ends after its process
        return done.returncode, done.stdout + done.stderr

    return wait


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def digest(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    weights = (directory / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    return [{**line, "seconds": None} for line in lines], weights


@pytest.mark.timeout(600)
@pytest.mark.fault("a worker process is killed, crashes or leaves (fork, forkserver, spawn)")
def test_a_worker_that_ends_before_its_time_is_reported_with_pid_and_how(run, trials):
    cases = [(method, fault) for fault in ("SIGKILL", "SIGSEGV", "exit") for method in METHODS]
    for trial in trials(cases, small=[("fork", "SIGKILL"), ("fork", "SIGSEGV"), ("fork", "exit")]):
        method, fault = trial.case
        with trial:
            status, text = run("train", "-q", "config.yaml", f"dataset.fault={fault}", "main_loop.workers=2",
                               f"main_loop.start_method={method}", anew=method != "fork")  # fmt: skip
            with trial.telling():
                assert status == 1
                told = "ended by itself with exit status 3" if fault == "exit" else f"was killed by {fault}"
                assert "stream 'train': worker process" in text
                assert told in text
                assert "(pid " in text
                assert ("memory" in text) == (fault == "SIGKILL")


@pytest.mark.timeout(600)
@pytest.mark.fault("a stream hangs in a thread, a worker or a C call, with stream_timeout")
def test_a_stream_that_hangs_is_reported_with_its_stacks_and_the_process_ends(project, run, trials, monkeypatch):
    mark, watch = project / "hangs", StreamWrapper._watch
    monkeypatch.setattr(StreamWrapper, "_watch", lambda self, seconds: watch(self, seconds) if mark.exists() else None)
    cases = [("hang", "buffer=2"), ("hang", "workers=2"), ("hang in C", "workers=1")]
    for trial in trials(cases, small=cases[1:]):
        fault, reader = trial.case
        mark.unlink(missing_ok=True)  # the time limit counts from when it is there
        with trial:
            status, text = run("train", "-q", "config.yaml", f"dataset.fault={fault}", f"main_loop.{reader}",
                               "main_loop.stream_timeout=1", "--output-dir", f"run-{fault}-{reader}",
                               anew=reader == "buffer=2")  # fmt: skip
            log = (project / f"run-{fault}-{reader}" / "train.log").read_text()
            with trial.telling():
                assert status == 1
                assert "stream 'train' yielded no batch for 1 seconds" in text
                assert ("in happen" in log) == (reader == "buffer=2")


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.fault("SIGINT, SIGTERM to the process group of a training with workers")
def test_a_signal_to_the_group_ends_the_run_gracefully(project, small, begun, run, trials):
    straight = run("train", "-q", "config.yaml", "--output-dir", "straight")
    assert straight[0] == 0, straight[1]
    expected = digest(project / "straight")
    cases = [(method, number, policy) for number in (signal.SIGINT, signal.SIGTERM) for policy in ("batch", "epoch")
             for method in METHODS]  # fmt: skip
    few = [("fork", signal.SIGTERM, "epoch")]
    for trial in trials(cases, small=few):
        method, number, policy = trial.case
        name = f"run-{method}-{number.name}-{policy}"
        settings = ["main_loop.workers=2", f"main_loop.start_method={method}", f"main_loop.on_interrupt={policy}"]
        with trial:
            for flag in ("here", "go on"):
                (project / flag).unlink(missing_ok=True)
            command = begun("train", "config.yaml", "dataset.fault=wait for the group's signal", "--output-dir", name,
                            *settings, anew=method != "fork")  # fmt: skip
            while not (project / "here").exists():
                assert os.waitpid(command[0], os.WNOHANG) == (0, 0)
            os.killpg(command[0], number)
            (project / "go on").touch()
            done = small.finished(command)
            with trial.telling():
                assert done.returncode == -number, done.stderr
                assert "Traceback" not in done.stderr
            with trial.reading():
                assert run("resume", "-q", name, anew=method != "fork")[0] == 0
            assert digest(project / name) == expected


@pytest.mark.timeout(600)
@pytest.mark.fault("the same training with fork, forkserver and spawn, with 0 and 2 workers")
def test_every_way_of_reading_gives_the_same_bits(project, run, trials):
    cases = [(method, count) for count in (2, 0) for method in METHODS]
    digests = []
    for trial in trials(cases, small=[("fork", 2), ("fork", 0), ("spawn", 1)]):
        method, count = trial.case
        with trial:
            name = f"run-{method}-{count}"
            status, text = run("train", "-q", "config.yaml", "--output-dir", name, f"main_loop.workers={count}",
                               f"main_loop.start_method={method}", anew=method == "forkserver")  # fmt: skip
            assert status == 0, text
            digests.append(digest(project / name))
            assert digests[-1] == digests[0]
