"""What tests share: the installed command in a process of its own, and small configs."""

import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EMRUN = Path(sys.executable).with_name("emrun")

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests run side by side


@pytest.fixture
def emrun(tmp_path):
    """Run the installed command in `tmp_path`, or in `cwd`; return the finished process with its output as text."""

    def run(*arguments, cwd=tmp_path, env=None, timeout=100):
        return subprocess.run(
            [str(EMRUN), *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def emrun_on_terminal(tmp_path):
    """Run the installed command with standard error on a terminal; return exit status, output, what that shows."""

    def run(*arguments, env=None):
        leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 80))
        process = subprocess.Popen(
            [str(EMRUN), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "TERM": "xterm", **(env or {})},
            stdin=follower,
            stdout=subprocess.PIPE,
            stderr=follower,
        )
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # how Linux tells that nobody has the terminal open any more
                break
            if not part:
                break
            parts.append(part)
        os.close(leader)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output.decode(), b"".join(parts).decode()

    return run


@pytest.fixture
def run_directory():
    """Return the only run directory below a root."""

    def find(root):
        (trace,) = Path(root).glob("*/trace.yaml")
        return trace.parent

    return find


@pytest.fixture
def doomed(tmp_path):
    """Return a project whose training fails in many ways, by the arguments of its parts."""
    shutil.copytree(ROOT / "tests" / "doomed", tmp_path, dirs_exist_ok=True)
    return tmp_path
