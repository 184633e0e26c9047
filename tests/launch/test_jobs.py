"""Processes for trials; how they end with their sweep is tested in test_sweep.py."""

import os
import subprocess
import sys

import pytest
from campaign import thinned

from emrun.launch import jobs
from emrun.launch.jobs import Jobs, threads_per_job


def ended(job):
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)  # leaves the status to `poll`
    return job.poll(), job.output()


def tell(arguments):
    found = (*arguments, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"], os.read(0, 1))
    os.write(1, " ".join(map(str, found)).encode())
    return 7


def test_a_job_gets_its_arguments_its_device_and_its_threads():
    started = Jobs(tell, (), ["0", "GPU-5"], lambda: True)
    assert ended(started.start(["a", "b"], 1, 3)) == (7, "a b GPU-5 3 b''")
    assert ended(started.start(["c"], 2, 1)) == (7, "c 0 1 b''")


def test_a_job_begins_a_new_python_where_a_fork_is_not_safe():
    code = "import sys; print(sys.argv[1:]); sys.exit(5)"
    started = Jobs(tell, (sys.executable, "-c", code), None, lambda: False)
    assert ended(started.start(["a", "b"], 0, None)) == (5, "['a', 'b']\n")


def test_an_error_in_a_job_is_printed(capsys):
    def fail(arguments):
        raise ValueError("wrong")

    with capsys.disabled():
        status, output = ended(Jobs(fail, (), None, lambda: True).start([], 0, None))
    assert status == 1
    assert output.endswith("ValueError: wrong\n")


@pytest.mark.parametrize(
    ("given", "count", "expected"), [("", 1, None), ("", 2, 3), ("", 9, 1), ("5", 2, 5), ("5", 1, 5)]
)
def test_the_cores_are_divided_among_the_jobs(monkeypatch, given, count, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: set(range(6)))
    assert threads_per_job(count) == expected


OPENBLAS = """
import os
import numpy as np
from emrun.launch.jobs import is_fork_safe
np.ones((500, 500)) @ np.ones((500, 500))
print(len(os.listdir("/proc/self/task")) > 1, is_fork_safe())
"""
TORCH = """
import torch
print(is_fork_safe())
torch.set_num_threads(2)
torch.ones(500, 500) @ torch.ones(500, 500)
print(is_fork_safe())
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    thinned([(OPENBLAS, "True True\n"), (OPENBLAS + TORCH, "True True\nTrue\nFalse\n")], [(OPENBLAS, "True True\n")]),
    ids=["OpenBLAS", "PyTorch"],
)
def test_a_fork_is_safe_unless_a_library_has_threads_other_than_those_of_openblas(code, expected):
    several = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=several, capture_output=True, text=True, check=True)
    assert done.stdout == expected
