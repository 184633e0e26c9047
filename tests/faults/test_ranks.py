"""A run of several ranks of which one is killed at any moment, and that is started again, ends in the same bits."""

import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import psutil
import pytest
from projects import SEVERAL, SEVERAL_PARTS
from warm import stand_by

PATIENCE = 60  # seconds that the others have to end

CONFIG = f"""{SEVERAL}
hooks:
  - ComputeStats
  - SaveEvery: {{every: 5 updates, keep: 2}}
  - StopAfter: {{epochs: 60}}
"""


def result(directory):
    metrics = [{**json.loads(line), "seconds": None} for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return metrics, (directory / "checkpoints" / "latest" / "model.safetensors").read_bytes()


def ranks_of(command):
    """Return the process numbers of the ranks that a command has started."""
    found = []
    with suppress(OSError):  # it has ended
        for each in Path(f"/proc/{command.pid}/task").glob("*/children"):
            found += map(int, each.read_text().split())
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list the children of a process")
@pytest.mark.timeout(7200)
@pytest.mark.fault("a random one of two or three ranks is killed, and the run is resumed until done", share=6)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_a_rank_that_is_killed_at_a_random_moment_changes_nothing(tmp_path, small, trials, size):
    (tmp_path / "parts.py").write_text(SEVERAL_PARTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    errors = None

    def start(directory):
        """Start the command; its ranks are processes that stand by, since each would import PyTorch."""
        words = ["train", "-q", "config.yaml", "--nproc", str(size), "--output-dir", directory, "--auto-resume"]
        child, place, _ = small.began(words, tmp_path, prepare=partial(stand_by, size))
        nonlocal errors
        errors = place / "err"
        return psutil.Process(child)

    def finish():
        assert start("run").wait(PATIENCE + seconds) == 0, errors.read_text()
        assert result(tmp_path / "run") == expected
        (tmp_path / "run").rename(tmp_path / f"run-{perf_counter()}")

    seconds = -perf_counter()
    assert start("straight").wait(600) == 0
    seconds += perf_counter()
    expected = result(tmp_path / "straight")
    since_finished = 0
    for trial in trials(range(100), small=1):
        with trial:
            command = start("run")
            with suppress(psutil.TimeoutExpired):
                command.wait(trial.random.uniform(0.2, 1) * seconds)
            killed = ranks_of(command)
            for number in trial.random.sample(killed, k=min(1, len(killed))):
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(number, signal.SIGKILL)
            status = command.wait(PATIENCE)
            said = errors.read_text()
            with trial.telling():
                assert status in ((0,) if not killed else (0, 128 + signal.SIGKILL)), said
                assert not status or "was killed by SIGKILL" in said
            since_finished += 1
            if status == 0 or since_finished == 3:
                since_finished = 0
                finish()
    finish()
