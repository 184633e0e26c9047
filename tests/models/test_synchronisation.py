"""A step does not wait for the device: nothing in it asks for a tensor's value, unless a hook wants one.

Counted are the ways to a value on the host: `item` and what is made of it, copies to the CPU, arrays, lists. The model
is on the CPU, where none of them waits; on a GPU each would.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emrun import create_training
from emrun.training.create import train

WAYS = ("cpu", "numpy", "tolist", "__array__", "nonzero")


class Syncs(TorchDispatchMode):
    """Counts what would wait for a device, in the whole process."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def syncs(monkeypatch):
    counting = Syncs()

    def counted(real):
        def call(tensor, *arguments, **keywords):
            counting.count += tensor.shape != torch.get_rng_state().shape  # which is on the host
            return real(tensor, *arguments, **keywords)

        return call

    for name in WAYS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    with counting:
        yield counting


def config(batches, hooks):
    module = {
        "class": "torch.nn.Sequential",
        "args": [
            {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
            {"class": "torch.nn.Dropout", "p": 0.2},
            {"class": "torch.nn.Flatten", "start_dim": 0},
        ],
    }
    return {
        "seed": 0,
        "dataset": {"class": "Majority", "n": 5 * batches, "batch_size": 4},
        "model": {
            "module": module,
            "inputs": ["x"],
            "outputs": ["logit"],
            "loss": {"class": "torch.nn.BCEWithLogitsLoss", "reduction": "none", "inputs": ["logit", "y"]},
            "metrics": {"distance": {"class": "torch.nn.L1Loss", "reduction": "none", "inputs": ["logit", "y"]}},
            "optimizer": {"class": "SGD", "lr": 0.05, "momentum": 0.9},
        },
        "main_loop": {"extra_streams": ["valid"], "skip_zeroth_epoch": True},
        "hooks": [*hooks, {"StopAfter": {"epochs": 1}}],
    }


USUAL = [
    {"ComputeStats": {"variables": [{"loss": ["mean", "std", "max"]}, "distance"]}},
    "LogVariables",
    "ShowProgress",
    "SaveBest",
    "WriteCSV",
    "StopOnNaN",
]


def syncs_of(syncs, tmp_path, batches, hooks):
    training = create_training(config(batches, hooks), output_dir=tmp_path / f"run-{batches}")
    before = syncs.count
    train(training)
    return syncs.count - before


def test_the_number_of_steps_changes_nothing(syncs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # otherwise losses are read at once
    few, many = (syncs_of(syncs, tmp_path, batches, USUAL) for batches in (4, 12))
    assert few > 0  # what the epoch's results cost: the count works
    assert many == few


def test_a_hook_that_looks_at_each_batch_waits_for_each(syncs, tmp_path):
    hooks = [{"StopOnNaN": {"after_batch": True, "variables": ["loss"]}}]
    few, many = (syncs_of(syncs, tmp_path, batches, hooks) for batches in (4, 12))
    assert many - few >= 8


ASKING = {
    "float": float,
    "bool": bool,
    "int": int,
    "array": np.asarray,
    "tolist": lambda value: value.tolist(),
    "item": lambda value: value.item(),
    "cpu": lambda value: value.cpu(),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING.keys())
def test_each_way_to_a_value_is_counted(syncs, ask):
    value = torch.ones(1)
    before = syncs.count
    ask(value)
    assert syncs.count > before


def test_what_needs_no_value_is_not_counted(syncs):
    value = torch.ones(3, requires_grad=True)
    before = syncs.count
    torch.where(value > 0, value * 2, value).square().mean().backward()
    assert syncs.count == before
