"""When a rank is killed, the others end at once, in every phase of a training."""

import os
import signal
from itertools import product

import numpy as np
import pytest
from in_ranks import results_of
from torch import nn

from emrun import AbstractHook, create_training
from emrun.ranks.group import ranks
from emrun.training.create import train

PHASES = ("build", "first batch", "step", "update", "evaluation", "epoch", "commit", "end")
WAYS = {"plain": {}, "windows": {"accumulate": 2}, "sharded": {"strategy": {"shard": "0"}}}


def die(phase):
    """End this rank as a lack of memory does, if the environment says so."""
    if os.environ.get("DIES") == f"{phase} {ranks().rank}":
        os.kill(os.getpid(), signal.SIGKILL)


class Data:
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")

    def train_stream(self, ctx):
        for rows in ctx.batches(8, 2):
            die("first batch")
            yield {"x": self.x[rows], "y": self.x[rows].sum(axis=1, keepdims=True)}

    def valid_stream(self, ctx):
        for rows in ctx.batches(8, 2):
            die("evaluation")
            yield {"x": self.x[rows], "y": self.x[rows].sum(axis=1, keepdims=True)}


class Net(nn.Sequential):
    def __init__(self):
        die("build")
        super().__init__(nn.Linear(4, 3), nn.Linear(3, 1))

    def forward(self, x):
        if self.training:
            die("step")
        return super().forward(x)


class Dies(AbstractHook):
    every_rank = True
    reads = ()

    def before_update(self):
        die("update")

    def after_epoch(self, epoch_id):
        die("epoch")

    def state_dict(self):
        die("commit")
        return {}

    def merge(self, states):
        pass

    def load_state_dict(self, state):
        pass

    def after_training(self, success):
        die("end")


def config_of(way):
    here = Data.__module__
    return {
        "dataset": {"class": f"{here}.Data"},
        "model": {
            "module": {"class": f"{here}.Net"},
            "inputs": ["x"],
            "outputs": ["out"],
            "loss": {"class": "torch.nn.MSELoss", "inputs": ["out", "y"], "reduction": "none"},
            "optimizer": {"class": "SGD", "lr": 0.1},
            "device": "cpu",
            **WAYS[way],
        },
        "main_loop": {"extra_streams": ["valid"], "rank_timeout": 1000},
        "hooks": ["ComputeStats", f"{here}.Dies", {"SaveEvery": {"every": "2 updates"}}, {"StopAfter": {"epochs": 2}}],
    }


def trained(way, dies, directory):
    os.environ["DIES"] = dies
    return train(create_training(config_of(way), output_dir=directory)).status


IN_SHORT = [("sharded", "commit", 0)]


@pytest.mark.parametrize(
    ("way", "phase", "rank"),
    [
        pytest.param(*each, marks=[] if each in IN_SHORT else pytest.mark.campaign)
        for each in product(WAYS, PHASES, (0, 1))
    ],
)
def test_the_others_end_at_once(tmp_path, way, phase, rank):
    found = results_of(2, trained, way, f"{phase} {rank}", tmp_path / "run")
    assert found.pop(rank) == -signal.SIGKILL
    if phase == "end":
        assert found == ["finished"]
    else:
        assert [(each.kind, each.message) for each in found] == [("RankFailed", "another rank has ended")]
