"""Signals while PyTorch is imported, sent from within the import; and what is said before the import."""

import json
import signal

import pytest

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


@pytest.mark.parametrize("command", ["train", "check"])
def test_sigint_while_torchs_extension_is_imported_ends_the_process_by_it(beginning_with, tmp_path, command):
    done = beginning_with(SENDS, command, "c.yaml", SENDS=str(int(signal.SIGINT)))
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert done.stderr.replace("importing PyTorch...", "").strip() == "interrupted by SIGINT"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("module", ["click", "emrun.cli.train", "numpy"])
def test_sigint_in_any_import_is_one_line_and_ends_the_process_by_it(beginning_with, module):
    done = beginning_with(EARLY, "train", "c.yaml", MODULE=module)
    shown = done.stderr.replace("importing PyTorch...", "").strip()  # after a while, on a slow machine
    assert (done.returncode, done.stdout, shown) == (-signal.SIGINT, "", "interrupted by SIGINT")


def test_a_wrong_run_directory_is_reported_before_torch_is_imported(beginning_with, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.yaml").write_text("status: finished\nreason: done\n")
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(CONFIG))
    for message, *arguments in (
        ("error: run already holds a run", "train", "c.yaml", "--output-dir", "run"),
        ("error: nosuch is not a run directory", "resume", "nosuch"),
        ("error: nosuch is not a run directory", "eval", "nosuch", "valid"),
    ):
        done = beginning_with(REFUSES, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(message)
    done = beginning_with(REFUSES, "train", "c.yaml")
    assert "torch is imported" in done.stderr
