"""The running statistics of BatchNorm equal those of torch's `update_bn`, and nothing else changes."""

import copy

import numpy as np
import pytest
import torch
from doubles import SGD, state_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from emrun import TorchModel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        )
        self.frozen = nn.BatchNorm1d(4).eval()
        self.unused = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.own += 1
        return {"loss": self.frozen(self.layers(x)).sum(1) ** 2}


def model_with_averages():
    """Return a model whose statistics and weights are not the first ones, and its averages."""
    torch.manual_seed(0)
    model = TorchModel(Net(), optimizer=SGD, device="cpu")
    for batch in batches():
        model.run(batch, train=True, stream="train")
    averages = {
        name: each + 0.1 if each.is_floating_point() else each + 1 for name, each in state_of(model.module).items()
    }
    model.evaluation_weights = averages
    return model, averages


def batches(count=3):
    rng = np.random.default_rng(0)
    return [{"x": rng.random((size, 3), np.float32)} for size in (4, 4, 2)[:count]]


def test_they_equal_those_of_torch_to_the_last_bit_and_the_training_keeps_its_own():
    model, averages = model_with_averages()
    theirs = AveragedModel(copy.deepcopy(model.module))
    theirs.module.load_state_dict(averages)
    trained, modes = state_of(model.module), [each.training for each in model.module.modules()]
    torch.manual_seed(5)
    model.recompute_batch_norm(batches())
    torch.manual_seed(5)
    update_bn([torch.from_numpy(batch["x"]) for batch in batches()], theirs)
    expected = state_of(theirs.module)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(averages[f"layers.1.{name}"], expected[f"layers.1.{name}"])
        assert torch.equal(averages[f"layers.4.{name}"], expected[f"layers.4.{name}"])
    assert averages["layers.1.num_batches_tracked"] == 3
    assert all(torch.equal(value, trained[name]) for name, value in state_of(model.module).items())
    assert [each.training for each in model.module.modules()] == modes
    assert (model.module.layers[1].momentum, model.module.layers[4].momentum) == (0.1, None)
    assert model.module.own.item() == 3


def test_other_buffers_and_statistics_that_are_frozen_or_not_used_stay():
    model, averages = model_with_averages()
    before = {name: value.clone() for name, value in averages.items()}
    model.recompute_batch_norm(batches())
    changed = {name for name, value in averages.items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[0] for name in changed} == {"layers.1", "layers.4"}


@pytest.mark.parametrize("fails", [True, False], ids=["an error", "no batch"])
def test_a_pass_that_is_not_complete_changes_nothing(fails):
    def some():
        if fails:
            yield from batches(1)
            raise RuntimeError("the end")

    model, averages = model_with_averages()
    before = {name: value.clone() for name, value in averages.items()}
    trained = state_of(model.module)
    model.module.eval()
    try:
        model.recompute_batch_norm(some())
    except RuntimeError:
        assert fails
    assert all(torch.equal(value, before[name]) for name, value in averages.items())
    assert all(torch.equal(value, trained[name]) for name, value in state_of(model.module).items())
    assert not model.module.training
