"""Trainings with workers by the installed command, in a shell that lets a process open a few files.

Taken out once by hand, this made it fail: naming the limit.
"""

import subprocess
import sys
from pathlib import Path

import pytest

EMRUN = Path(sys.executable).with_name("emrun")


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.fault("8 or 16 file descriptors and worker processes")
def test_too_few_file_descriptors_are_told_with_the_limit(project, trials):
    cases = [
        (limit, workers, method)
        for limit in (8, 16)
        for workers in (2, 3)
        for method in ("fork", "forkserver", "spawn")
    ]
    cases.insert(0, (20, 2, "spawn"))  # enough for the first process
    for number, trial in enumerate(trials(cases, small=[(8, 2, "fork")])):
        limit, workers, method = trial.case
        arguments = ["train", "-q", "config.yaml", "--output-dir", f"run-{number}", f"main_loop.workers={workers}"]
        arguments += [f"main_loop.start_method={method}", "~main_loop.buffer"]
        with trial:
            done = subprocess.run(["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', EMRUN, *arguments], cwd=project,
                                  capture_output=True, text=True, timeout=100)  # fmt: skip
            with trial.telling():
                assert done.returncode == 1, done.stderr
                assert f"may open {limit} (`ulimit -n`); raise the limit" in done.stderr, done.stderr
                assert "AttributeError" not in done.stderr
