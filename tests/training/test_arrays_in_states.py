"""Arrays, generators and collections in the states of hooks, streams and modules: a resume is exact."""

import json
import signal

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun import AbstractHook, create_training, load_run, resume_training

PARTS = '''
from collections import Counter, defaultdict, deque

import numpy as np
import torch

from emrun import AbstractHook


class Walk:
    """An environment with a position and a generator of its own: each batch depends on all before."""

    def __init__(self):
        self.random, self.position, self.steps = np.random.default_rng(7), np.zeros(3, np.float32), 0

    def __iter__(self):
        while self.steps < 6:
            self.steps += 1
            self.position += self.random.normal(size=3).astype(np.float32)
            yield {"x": self.position[None] + self.random.random((4, 1), np.float32)}
        self.steps = 0

    def state_dict(self):
        return {"random": self.random, "position": self.position, "steps": self.steps}

    def load_state_dict(self, state):
        self.random, self.position, self.steps = state["random"], state["position"], state["steps"]


class Data:
    def __init__(self):
        self.walk = Walk()

    def train_stream(self):
        return self.walk


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.seen = np.zeros(3)

    def forward(self, x):
        if self.training:
            self.seen = self.seen + x.detach().sum(0).numpy()
        return {"loss": super().forward(x)[:, 0] ** 2}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        assert type(state) is np.ndarray
        self.seen = state


class Noise(AbstractHook):
    writes = ["noise", "drawn", "counted"]

    def __init__(self):
        super().__init__()
        self.numpy, self.torch = np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.total = np.zeros(2)
        self.counts, self.last, self.rows, self.seen = Counter(), deque(maxlen=4), defaultdict(list), {0}

    def after_batch(self, batch_data):
        if self.main_loop.training:
            done = self.main_loop.iterations_done
            self.counts[done % 2] += 1
            self.last.append(done)
            self.rows[done % 3].append(done)
            self.seen.add(sum(self.last))
            self.total += self.numpy.normal(), torch.rand((), generator=self.torch).item()

    def after_epoch(self, epoch_data):
        counted = len(self.seen) + 10 * self.counts.most_common(1)[0][1] + 1000 * sum(map(len, self.rows.values()))
        epoch_data["train"] |= {"noise": self.total[0], "drawn": self.total[1], "counted": counted}

    def state_dict(self):
        collected = {"counts": self.counts, "last": self.last, "rows": self.rows, "seen": self.seen}
        return {"numpy": self.numpy, "torch": self.torch, "total": self.total, **collected}

    def load_state_dict(self, state):
        self.numpy, self.torch, self.total = state["numpy"], state["torch"], state["total"]
        self.counts, self.last, self.rows, self.seen = (state[each] for each in ("counts", "last", "rows", "seen"))
'''
CONFIG = {
    "seed": 1,
    "dataset": {"class": "walks.Data"},
    "model": {"module": {"class": "walks.Net"}, "optimizer": {"class": "SGD", "lr": 0.01}, "device": "cpu"},
    "main_loop": {"skip_zeroth_epoch": True},
    "hooks": ["ComputeStats", "walks.Noise", {"StopAfter": {"epochs": 3}}],
}


class Stops(AbstractHook):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def after_batch(self):
        if self.main_loop.iterations_done == self.at:
            signal.raise_signal(signal.SIGTERM)


def streams_of(place):
    return [json.loads(line)["streams"] for line in (place / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("at", thinned([6, 9], [6]))
def test_a_resume_with_arrays_and_generators_is_exact(tmp_path, monkeypatch, at):
    (tmp_path / "walks.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    create_training(CONFIG, output_dir=tmp_path / "straight").main_loop.run_training()
    stopped = create_training(CONFIG, output_dir=tmp_path / "stopped")
    stopped.main_loop.change_hooks([*stopped.hooks, Stops(at)])
    stopped.main_loop.run_training()
    resume_training(tmp_path / "stopped").main_loop.run_training()
    assert streams_of(tmp_path / "stopped") == streams_of(tmp_path / "straight")
    one, other = (load_run(tmp_path / each).model.module for each in ("straight", "stopped"))
    np.testing.assert_array_equal(one.seen, other.seen)
    assert torch.equal(one.weight, other.weight)
