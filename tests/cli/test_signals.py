"""Signals while PyTorch is imported, sent from within the import; and what is said before the import."""

import ast
import json
import signal

import pytest
from campaign import thinned

SENDS = """
import _frozen_importlib, os, sys

count, real = 0, _frozen_importlib._lock_unlock_module

def counted(name):  # torch's extension calls this, and loses a KeyboardInterrupt or ends by SIGABRT
    global count
    count += "torch" in sys.modules
    if count == 100:
        os.kill(os.getpid(), int(os.environ["SENDS"]))
    return real(name)

_frozen_importlib._lock_unlock_module = counted
"""
EARLY = """
import importlib.abc, os, signal, sys

class Sends(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MODULE"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Sends())
"""
REFUSES = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch is imported")

sys.meta_path.insert(0, Refuses())
"""
CONFIG = {
    "dataset": {"class": "Majority", "n": 50},
    "model": {
        "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
        "inputs": ["x"],
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "hooks": [{"StopAfter": {"epochs": 1}}],
}


@pytest.fixture
def beginning_with(tmp_path, emrun):
    """Return a function that runs the command in a Python process that first runs some code."""
    (tmp_path / "c.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "site").mkdir()

    def run(code, *arguments, **env):
        (tmp_path / "site" / "sitecustomize.py").write_text(code)
        return emrun(*arguments, env={"PYTHONPATH": str(tmp_path / "site"), **env})

    return run


@pytest.mark.campaign
@pytest.mark.parametrize("command", ["train", "check"])
def test_sigint_while_torchs_extension_is_imported_ends_the_process_by_it(beginning_with, tmp_path, command):
    done = beginning_with(SENDS, command, "c.yaml", SENDS=str(int(signal.SIGINT)))
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert done.stderr.replace("importing PyTorch...", "").strip() == "interrupted by SIGINT"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("module", thinned(["click", "emrun.cli.train", "numpy"], ["emrun.cli.train"]))
def test_sigint_in_any_import_is_one_line_and_ends_the_process_by_it(beginning_with, module):
    done = beginning_with(EARLY, "train", "c.yaml", MODULE=module)
    shown = done.stderr.replace("importing PyTorch...", "").strip()  # after a while, on a slow machine
    assert (done.returncode, done.stdout, shown) == (-signal.SIGINT, "", "interrupted by SIGINT")


WRONG_DIRECTORIES = [
    ("error: run already holds a run", ["train", "c.yaml", "--output-dir", "run"]),
    ("error: nosuch is not a run directory", ["resume", "nosuch"]),
    ("error: nosuch is not a run directory", ["eval", "nosuch", "valid"]),
]


@pytest.fixture
def with_run(tmp_path):
    """Make a run in `run`."""
    (tmp_path / "c.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.yaml").write_text("status: finished\nreason: done\n")
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize(("message", "arguments"), WRONG_DIRECTORIES)
def test_a_wrong_run_directory_is_reported_before_torch_would_be_imported(
    with_run, emrun_here, monkeypatch, message, arguments
):
    for command in ("train", "resume", "eval"):
        monkeypatch.setattr(f"emrun.cli.{command}.import_torch", lambda *config: pytest.fail("torch is imported"))
    done = emrun_here(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)


@pytest.mark.campaign
def test_a_wrong_run_directory_is_reported_before_torch_is_imported(beginning_with, with_run):
    for message, arguments in WRONG_DIRECTORIES:
        done = beginning_with(REFUSES, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(message)
    done = beginning_with(REFUSES, "train", "c.yaml")
    assert "torch is imported" in done.stderr


CHILDREN = """
import multiprocessing, os, signal, subprocess, sys, threading
from concurrent.futures import ProcessPoolExecutor
import numpy as np
from emrun import AbstractHook

FOREVER = ["sh", "-c", "echo; exec tail -f /dev/null"]


def wait(pipe=None):
    if pipe is not None:
        pipe.send(0)
    threading.Event().wait()


def started(method):
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=wait, args=(theirs,), daemon=True)
    process.start()
    mine.recv()
    return process


def ended(process):
    process.terminate()
    while process.exitcode is None:  # the thread of an executor may have waited for the process, and is to note it yet
        process.join()
    return -process.exitcode


def forked():
    pid = os.fork()
    if not pid:
        threading.Event().wait()
    os.kill(pid, signal.SIGTERM)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def of_pool():
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, [1, -1])
    pool.terminate()
    pool.join()
    return 15


def of_executor():
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(abs, 1).result()
        (process,) = pool._processes.values()
        return ended(process)


def of_program(**options):
    with subprocess.Popen(FOREVER, stdout=subprocess.PIPE, **options) as program:
        program.stdout.readline()
        program.terminate()
        return -program.wait()


def of_group(process):
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(process.pid, number)
    return process.is_alive() and ended(process)


def all_kinds():
    return {
        "fork": ended(started("fork")), "forkserver": ended(started("forkserver")), "os.fork": forked(),
        "pool": of_pool(), "executor": of_executor(), "program": of_program(),
        "preexec_fn": of_program(preexec_fn=os.getpid),
    }


def tell(where, found):
    os.write(1, f"{where} {found}\\n".encode())


class Data:
    def __init__(self):
        tell("constructor", all_kinds())

    def train_stream(self):
        tell("stream", {**all_kinds(), "group": of_group(started("fork"))})
        yield {"x": np.zeros((2, 1), np.float32)}

    def valid_stream(self):
        yield {"x": np.zeros((2, 1), np.float32)}


class Starts(AbstractHook):
    def before_training(self):
        tell("hook", all_kinds())
"""


OPTIONS = [[], ["main_loop.buffer=2"], ["main_loop.on_interrupt=epoch", "--nproc=2"]]


@pytest.mark.parametrize("options", thinned(OPTIONS, [[]]))
def test_children_of_the_users_code_end_when_they_are_told_to(tmp_path, emrun, options):
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "config.yaml").write_text(
        "dataset: {class: children.Data}\nmodel:\n  module: {class: torch.nn.Linear, in_features: 1, out_features: 1}\n"
        "  inputs: [x]\n  outputs: [loss]\n  optimizer: {class: SGD, lr: 0.1}\n"
        "main_loop: {extra_streams: [valid], report: false}\nhooks: [children.Starts, {StopAfter: {epochs: 1}}]\n"
    )
    done = emrun("train", "config.yaml", "-q", *options)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if "{" in line)
    kinds = ["fork", "forkserver", "os.fork", "pool", "executor", "program", "preexec_fn"]
    assert lines.keys() == {"constructor", "hook", "stream"}
    for where, found in lines.items():
        expected = dict.fromkeys([*kinds, "group"] if where == "stream" else kinds, 15)
        assert ast.literal_eval(found) == expected, where
