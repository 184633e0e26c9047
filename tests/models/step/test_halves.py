"""Losses that look at the whole batch are found with the first batch, and said once."""

import logging

import numpy as np
import pytest
import torch
from in_ranks import all_in_ranks, in_ranks
from torch import nn

from emrun import MainLoop, TorchModel
from emrun.hooks import StopAfter
from emrun.ranks.group import join


def of_examples(found, y):
    return (found - y) ** 2


def scalar(found, y):
    return ((found - y) ** 2).mean()


def total(found, y):
    return ((found - y) ** 2).sum()


def contrastive(found, y):
    return nn.functional.cross_entropy(found[:, None] * y, torch.arange(len(y)))


def over_positives(found, y):
    return ((found - y) ** 2).sum() / (y > 0.7).sum()


class Net(nn.Module):
    def __init__(self, loss, weighs=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))
        self.loss, self.weighs = loss, weighs

    def forward(self, x, y):
        self.calls += 1
        found = {"loss": self.loss(self.layers(x).squeeze(1), y)}
        return {**found, "example_weight": (y > 0.3) * 2.0} if self.weighs else found


class Data:
    def train_stream(self):
        rng = np.random.default_rng(1)
        for _ in range(3):
            yield {"x": rng.random((9, 3), np.float32), "y": rng.random(9, np.float32)}


def trained(loss, *, weighs=False, epochs=2, **arguments):
    """Return the module after a training, and the warnings of its loss."""
    join()
    torch.manual_seed(0)
    model = TorchModel(Net(loss, weighs), optimizer=lambda each: torch.optim.SGD(each, lr=0.1), **arguments)
    handler = logging.Handler()
    found = []
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("emrun.models.step.halves").addHandler(handler)
    try:
        MainLoop(model, Data(), [StopAfter(epochs=epochs)], skip_zeroth_epoch=True, on_nan_loss="ignore").run_training()
    finally:
        logging.getLogger("emrun.models.step.halves").removeHandler(handler)
    return model.module.calls.item(), found


def fails_on_halves(found, y):
    if len(y) not in (9, 5, 4):
        raise ValueError("no")
    return scalar(found, y)


@pytest.fixture(scope="module")
def of_two():
    """Return what two ranks say of losses."""
    calls = {
        "of examples": lambda: trained(of_examples, weighs=True, epochs=1),
        "scalar": lambda: trained(scalar, epochs=1),
        "total": lambda: trained(total, epochs=1),
        "over positives": lambda: trained(over_positives, epochs=1),
        "fails on halves": lambda: trained(fails_on_halves, epochs=1),
        ("contrastive", False): lambda: trained(contrastive),
        ("contrastive", True): lambda: trained(contrastive, sync_batch_norm=True),
    }
    return all_in_ranks(2, calls)


@pytest.mark.parametrize("loss", ["of examples", "scalar"])
def test_means_over_examples_are_silent_also_weighted_beside_batch_norm_and_dropout(of_two, loss):
    assert [found for _, found in of_two[loss]] == [[], []]


@pytest.mark.parametrize("loss", ["total", "over positives"])
def test_sums_are_said_too(of_two, loss):
    assert [len(found) for _, found in of_two[loss]] == [1, 1]


def test_nothing_is_compared_in_one_process():
    for arguments in ({}, {"accumulate": 3}, {"micro_batch_size": 5}):
        assert trained(contrastive, **arguments)[1] == []


@pytest.mark.parametrize("synchronises", [False, True])
def test_it_is_said_on_several_ranks_and_sync_batch_norm_does_not_silence_it(of_two, synchronises):
    for calls, found in of_two["contrastive", synchronises]:
        assert calls == 6
        (message,) = found
        assert message.startswith("several ranks: the loss looks at the whole batch: it is ")
        assert message.endswith("emrun.all_gather in forward makes them so")


@pytest.mark.campaign
def test_means_over_examples_are_silent_beside_sync_batch_norm_too():
    assert [found for _, found in in_ranks(2, trained, of_examples, sync_batch_norm=True)] == [[], []]


def test_a_loss_that_fails_on_halves_is_left_to_the_step(of_two):
    assert [found for _, found in of_two["fails on halves"]] == [[], []]
