"""The installed command, run in the process of the tests: half of the CPU seconds of a process that is forked for it.

For tests that are not about processes, signals, imports or what a command leaves behind in its process; and not for
commands that fork, such as a sweep that trains.
"""

import importlib
import io
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from emrun import cli

EMRUN = Path(sys.executable).with_name("emrun")
importlib.import_module("torch")  # a command that imports it says so if that takes long


def run_here(arguments, cwd):
    """Run a command with these arguments in a directory; return the finished process, with its output as text."""
    words = [str(each) for each in arguments]
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before, handler = set(sys.modules), signal.getsignal(signal.SIGUSR1)
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(output), redirect_stderr(errors):
        patched.chdir(cwd)
        patched.setattr(sys, "argv", [str(EMRUN), *words])
        patched.setattr(sys, "path", [str(EMRUN.parent), *sys.path[1:]])
        patched.setattr(sys, "dont_write_bytecode", True)
        patched.delenv("TQDM_DISABLE", raising=False)
        try:
            status = cli._run()
        finally:
            signal.signal(signal.SIGUSR1, handler)
            forget_modules(before, cwd, tempfile.gettempdir())
    texts = [each.buffer.getvalue().decode() for each in (output, errors)]
    return subprocess.CompletedProcess(words, status, *texts)


def forget_modules(before, *places):
    """Remove the modules in these directories that were not there before: the next command imports them again."""
    for name in [name for name in sys.modules if name not in before]:
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(Path(file).is_relative_to(place) for place in places):
            del sys.modules[name]
