"""What tests share: the installed command in a process of its own, and small configs."""

import os
import subprocess
import sys
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
def run_directory():
    """Return the only run directory below a root."""

    def find(root):
        (trace,) = Path(root).glob("*/trace.yaml")
        return trace.parent

    return find
