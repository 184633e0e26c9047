"""A training that is killed at any moment and started again by the same call ends in the same bits.

The children are forked from this process, where torch is imported already. Taken out once by hand, each of these made
tests here fail: restoring the random states; giving a checkpoint the names again that its process did not live to give.
"""

import json
import os
import random
import shutil
import signal
from time import perf_counter

import pytest

from emrun import AbstractHook, create_training, resume_training
from emrun.training import train

STEPS = ("fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")

CONFIG = {
    "seed": 5,
    "dataset": {"class": "Majority", "n": 60, "batch_size": 4},
    "model": {
        "module": {
            "class": "torch.nn.Sequential",
            "args": [
                {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
                {"class": "torch.nn.Dropout", "p": 0.2},
                {"class": "torch.nn.Flatten", "start_dim": 0},
            ],
        },
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.BCEWithLogitsLoss", "inputs": ["logit", "y"]},
        "optimizer": {"class": "Adam", "lr": 0.05},
    },
    "main_loop": {"extra_streams": ["valid"], "buffer": 2, "fixed_epoch_size": 5},
    "hooks": [
        {"ComputeStats": {"variables": ["loss"]}},
        "SaveBest",
        "WriteCSV",
        {"StopAfter": {"epochs": 3}},
    ],
}


class SaveOften(AbstractHook):
    """Asks for checkpoints in the middle of an epoch, so that there are commits of all kinds."""

    def after_batch(self):
        if self.main_loop.training and self.main_loop.iterations_done % 3 == 0:
            self.main_loop.request_checkpoint("often")


def start_or_resume(directory, epochs=3):
    """Do what `train --auto-resume` does."""
    if (directory / "config.yaml").exists():
        training = resume_training(directory)
    else:
        training = create_training(CONFIG, output_dir=directory, overrides=[f"hooks.StopAfter.epochs={epochs}"])
    if training is None:
        return
    training.main_loop.change_hooks([*training.main_loop.hooks, SaveOften()])
    train(training)


def forked(function, *arguments):
    """Run a function in a forked child; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(directory, at, epochs):
    """Start or resume, and die before or after the step of a write that `at` counts."""
    count = 0

    def wrap(real):
        def step(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*arguments, **keywords)
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return step

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    start_or_resume(directory, epochs)
    (directory.parent / "count").write_text(str(count))


def result(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("latest", "best", "often")
    return {
        "metrics": [{**line, "seconds": None} for line in lines],
        "csv": (directory / "training.csv").read_text(),
        **{name: (directory / "checkpoints" / name / "model.safetensors").read_bytes() for name in names},
        "left": sorted(path.name for path in directory.rglob("*") if "tmp" in path.name),
    }


def straight(tmp_path, epochs):
    """Train without a kill; return the result, the number of steps and the seconds it took."""
    began = perf_counter()
    assert forked(killed_at, tmp_path / "straight", 0, epochs) == 0
    return result(tmp_path / "straight"), int((tmp_path / "count").read_text()), perf_counter() - began


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_a_kill_before_and_after_each_step_of_a_write_changes_nothing(tmp_path, part):
    expected, steps, _ = straight(tmp_path, epochs=1)
    assert steps > 100
    last = range(steps - 60, steps + 1)  # every step of the last commits; of those before, which are alike, a sample
    for at in sorted({*range(1, steps, 13), *last})[part::4]:
        directory = tmp_path / "run"
        assert forked(killed_at, directory, at, 1) == -signal.SIGKILL, at
        assert forked(start_or_resume, directory, 1) == 0, at
        assert result(directory) == expected, at
        shutil.rmtree(directory)


@pytest.mark.timeout(600)
def test_fifty_kills_at_random_moments_change_nothing(tmp_path):
    expected, _, seconds = straight(tmp_path, epochs=3)
    directory, draw, kills, rounds = tmp_path / "run", random.Random(), 0, 0

    def run():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process like a kill
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, seconds))
        start_or_resume(directory)

    while kills < 50 and rounds < 500:
        draw.seed(rounds)
        status = forked(run)
        rounds += 1
        assert status in (0, -signal.SIGALRM), rounds
        kills += status != 0
        if status == 0:
            assert result(directory) == expected, rounds
            shutil.rmtree(directory)
    assert kills == 50
    assert forked(start_or_resume, directory) == 0
    assert result(directory) == expected
