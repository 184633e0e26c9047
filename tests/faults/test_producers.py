"""A stream that raises at any batch, read ahead or not, fails the training with its own error, never silently.

Taken out once by hand, the exception's way through the queue of the reader made this fail.
"""

from itertools import product

import pytest
from ruamel.yaml import YAML

BATCHES = 20
MODULE = """
import time
from emrun import AbstractHook


def work(seconds):
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at:
        sum(range(100))


class Failing:
    def __init__(self, fail_at, stream, slow=0.0):
        self.fail_at, self.stream, self.slow = fail_at, stream, slow

    def batches(self, name):
        for index in range(20):
            work(self.slow)
            if name == self.stream and index == self.fail_at:
                raise OSError(f"cannot read row {index}")
            yield {"x": [[0.0] * 11] * 2, "y": [0.0, 1.0]}
        if name == self.stream and self.fail_at == 20:
            raise OSError("cannot read row 20")

    def train_stream(self):
        return self.batches("train")

    def valid_stream(self):
        return self.batches("valid")


class Slow(AbstractHook):
    def before_batch(self):
        work(0.002)
"""
WHERE = {"0": lambda size: 0, "1": lambda size: 1, "buffer-1": lambda size: size - 1, "buffer": lambda size: size}
WHERE |= {"buffer+1": lambda size: size + 1, "last": lambda size: BATCHES}
CASES = [
    (stream, where, size, slow)
    for stream, where, size, slow in product(("train", "valid"), WHERE, (0, 1, 4, 16), ("model", "producer"))
    if WHERE[where](size) >= 0
]
FEW = [
    ("train", "0", 0, "model"), ("valid", "last", 0, "producer"), ("train", "buffer-1", 1, "producer"),
    ("valid", "buffer", 1, "model"), ("train", "last", 4, "model"), ("valid", "buffer-1", 4, "producer"),
    ("train", "buffer", 4, "producer"), ("train", "buffer+1", 16, "producer"), ("valid", "1", 16, "model"),
]  # fmt: skip


@pytest.mark.timeout(7200)
@pytest.mark.fault("a stream raises at a batch, read ahead or not")
def test_a_producer_that_raises_ends_the_training_with_its_error_stream_and_batch(project, small, trials):
    (project / "failing.py").write_text(MODULE)
    for number, trial in enumerate(trials(CASES, small=FEW)):
        stream, where, size, slow = trial.case
        at = WHERE[where](size)
        seconds = 0.002 if slow == "producer" else 0.0
        data = f"dataset={{class: failing.Failing, fail_at: {at}, stream: {stream}, slow: {seconds}}}"
        loop = f"main_loop={{buffer: {size}, extra_streams: [valid], skip_zeroth_epoch: true, fixed_epoch_size: null}}"
        hooks = ["hooks=[failing.Slow, {StopAfter: {epochs: 2}}]"] if slow == "model" else []
        with trial, trial.telling():
            done = small.command(
                "train", "-q", "config.yaml", "--output-dir", f"run{number}", data, loop, *hooks, cwd=project
            )
            assert done.returncode == 1, done.stderr
            lines = done.stderr.splitlines()
            assert f"OSError: cannot read row {at}" in lines
            assert f"in stream '{stream}', batch {at} of the pass" in lines
            assert "in batches" in done.stderr  # the frame of the traceback in which it was raised
            trace = YAML(typ="safe", pure=True).load(project / f"run{number}" / "trace.yaml")
            assert (trace["status"], trace["exit_status"], trace["epochs_done"]) == ("failed", 1, 0)
            assert trace["reason"] == f"OSError: cannot read row {at}"
            assert trace["iterations_done"] == (at if stream == "train" else BATCHES)
            assert not (project / f"run{number}" / "metrics.jsonl").exists()
