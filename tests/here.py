"""The installed command, run in the process of the tests: half of the CPU seconds of a process that is forked for it.

For tests that are not about processes, signals, imports or what a command leaves behind in its process; and not for
commands that fork, such as a sweep that trains.
"""

import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from emrun import cli

ROOT = Path(__file__).parent.parent
FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("hooks", "datasets"))  # no command finds them under these names
EMRUN = Path(sys.executable).with_name("emrun")
OTHERS = {}  # modules by name that are neither of a test or a sample nor of the folders
importlib.import_module("torch")  # a command that imports it says so if that takes long


def run_here(arguments, cwd):
    """Run a command with these arguments in a directory; return the finished process, with its output as text."""
    words = [str(each) for each in arguments]
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handler = signal.getsignal(signal.SIGUSR1)
    path = [place for place in sys.path[1:] if place not in ("", str(ROOT)) and not is_of_a_test(place)]
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(output), redirect_stderr(errors):
        patched.chdir(cwd)
        patched.setattr(sys, "argv", [str(EMRUN), *words])
        patched.setattr(sys, "path", [str(EMRUN.parent), *path])
        patched.setattr(sys, "dont_write_bytecode", True)
        for name in modules_in((*FOLDERS, *places_of_tests())):
            patched.delitem(sys.modules, name)
        patched.delenv("TQDM_DISABLE", raising=False)
        try:
            status = cli._run()
        finally:
            signal.signal(signal.SIGUSR1, handler)
    forget_modules()
    texts = [each.buffer.getvalue().decode() for each in (output, errors)]
    return subprocess.CompletedProcess(words, status, *texts)


def forget_modules():
    """Remove the modules of tests and samples: the next command imports its own."""
    for name in modules_in(places_of_tests()):
        del sys.modules[name]


def modules_in(places):
    """Return the names of the modules in directories, which are of a test or a sample or in the folders.

    A module that is neither is looked at once: there are some thousands.
    """
    new = [(name, module) for name, module in sys.modules.items() if OTHERS.get(name) is not module]
    found = {name: str(getattr(module, "__file__", "")) for name, module in new}
    for name, module in new:
        if not found[name].startswith((*FOLDERS, *places_of_tests())):
            OTHERS[name] = module
    return [name for name, file in found.items() if file.startswith(places)]


def is_of_a_test(path):
    """Return whether a path is that of a file or directory of a test or a sample."""
    return path.startswith(places_of_tests())


def places_of_tests():
    return f"{tempfile.gettempdir()}{os.sep}", f"{ROOT / 'sample_configs'}{os.sep}"
