"""What the tests of this folder share."""

import importlib
import io
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from stored_runs import make_run

from emrun import cli

__all__ = ["make_run"]
ROOT = Path(__file__).parent.parent.parent
EMRUN = Path(sys.executable).with_name("emrun")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of a sample with code of its own, the current directory; commands may be run in this process."""
    place = shutil.copytree(ROOT / "sample_configs" / "my_project", tmp_path / "project")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return place


def forget_modules(before, *places):
    """Remove the modules in these directories that were not there before: the next command imports them again."""
    for name in [name for name in sys.modules if name not in before]:
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(Path(file).is_relative_to(place) for place in places):
            del sys.modules[name]


@pytest.fixture
def emrun_here(tmp_path, tmp_path_factory, monkeypatch):
    """Run a command in this process, which takes half of the time of `emrun`; return what `emrun` returns.

    It is for tests that are not about processes, signals, imports or what a command leaves behind in its process.
    """

    def run(*arguments, cwd=tmp_path):
        words = [str(each) for each in arguments]
        output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        before, handler = set(sys.modules), signal.getsignal(signal.SIGUSR1)
        importlib.invalidate_caches()
        with monkeypatch.context() as patched, redirect_stdout(output), redirect_stderr(errors):
            patched.chdir(cwd)
            patched.setattr(sys, "argv", [str(EMRUN), *words])
            patched.setattr(sys, "path", [str(EMRUN.parent), *sys.path[1:]])
            patched.setattr(sys, "dont_write_bytecode", True)
            patched.delenv("TQDM_DISABLE", raising=False)
            try:
                status = cli._run()
            finally:
                signal.signal(signal.SIGUSR1, handler)
                forget_modules(before, cwd, tmp_path_factory.getbasetemp())
        texts = [each.buffer.getvalue().decode() for each in (output, errors)]
        return subprocess.CompletedProcess(words, status, *texts)

    return run
