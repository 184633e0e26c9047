"""The gradients of sharded weights, which are summed in the backward pass."""

from functools import cache, partial

import pytest
import torch
from campaign import thinned
from in_ranks import Failed, all_in_ranks, needs_shards, results_of
from torch import nn
from torch.optim import SGD

from emrun import TorchModel
from emrun.models.sharding import Sharding
from emrun.models.step.sharded import ShardSums
from emrun.ranks.group import join
from emrun.ranks.pieces import whole


class Chooses(nn.Module):
    """Uses `one`, and `two` or `never` only where asked; all are in one shard."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.never = (nn.Linear(3, 3, bias=False) for _ in range(3))
        layer = nn.Linear(3, 3)
        self.layers = nn.Sequential(layer, nn.Tanh(), layer)  # used twice, and has two names
        self.last = nn.Linear(3, 3)
        self.double()

    def forward(self, x, with_two):
        x = self.layers(self.one(x))
        return self.last(self.two(x) if with_two else x)


def gradients(weights, uses_two):
    """Return the whole gradients of all parameters, and the mean loss of all ranks."""
    ranks = join()
    torch.manual_seed(0)
    module = Chooses()
    names = [name for name, _ in module.named_parameters()]
    if ranks.several:
        sharding = Sharding(module, {"shard": "layers.*"}, ranks)
    weight = weights[ranks.rank]
    loss = module(torch.eye(3, dtype=torch.float64)[ranks.rank : ranks.rank + 1], uses_two[ranks.rank]).sum()
    (loss * weight).backward()
    sums = ShardSums(dict(module.named_parameters()), ranks, sharding.given)
    mean = sums.reduce(weight, loss.detach())
    found = {name: whole(each.grad) for name, each in zip(names, module.parameters(), strict=True)}
    return found, mean.item()


def expected(weights, uses_two):
    torch.manual_seed(0)
    module = Chooses()
    losses = [module(torch.eye(3, dtype=torch.float64)[i : i + 1], uses_two[i]).sum() for i in range(len(weights))]
    loss = sum(map(torch.mul, losses, map(torch.tensor, weights))) / sum(weights)
    loss.backward()
    return {name: each.grad for name, each in module.named_parameters()}, loss.item()


CASES = [
    ((1.0, 3.0), (True, False)),
    ((2.0, 0.0), (False, False)),
    ((2.0, 0.0, 1.0), (False, False, False)),
]


@pytest.fixture(scope="module")
def of_ranks():
    """Return what a number of ranks find: the gradients of each case, and what two optimizers update."""

    @cache
    def found(size):
        calls = {weights: partial(gradients, weights, uses_two) for weights, uses_two in CASES if len(weights) == size}
        return all_in_ranks(size, {**calls, "two optimizers": with_two_optimizers} if size == 2 else calls)

    return found


@needs_shards
@pytest.mark.parametrize(("weights", "uses_two"), thinned(CASES, CASES[1:2]))
def test_gradients_are_those_of_the_weighted_mean_and_none_where_no_rank_has_one(of_ranks, weights, uses_two):
    wanted, mean = expected(weights, uses_two)
    assert wanted["never.weight"] is None
    for found, loss in of_ranks(len(weights))[weights]:
        assert loss == pytest.approx(mean, abs=1e-12)
        for name, gradient in wanted.items():
            assert (found[name] is None) is (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


def no_rows():
    module = nn.Sequential(nn.Linear(2, 2))
    Sharding(module, {"shard": "0"}, join())
    ShardSums(dict(module.named_parameters()), join(), set()).reduce(0.0, None)


@needs_shards
@pytest.mark.campaign
def test_a_batch_without_rows_on_any_rank_is_an_error():
    for each in results_of(2, no_rows):
        assert isinstance(each, Failed)
        assert each.message == "the batch is empty on all ranks (see main_loop.on_empty_batch)"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return {"loss": self.second(self.first(x).tanh()).square().sum(1)}


def with_two_optimizers():
    """Return the weights after an update of two optimizers on two rows, of which a rank has one."""
    ranks = join()
    torch.manual_seed(0)
    forms = {"one": SGDWith("first"), "other": SGDWith("second")}
    model = TorchModel(Two(), optimizer=forms, device="cpu", strategy={"shard": "first"})
    model.run({"x": torch.tensor([[1.0, 2.0], [3.0, 5.0]])[slice(*ranks.share(2))]}, True, "train")
    return [whole(each).detach() for each in model.module.parameters()]


class SGDWith:
    """The form of an optimizer of the parameters that match."""

    def __init__(self, match):
        self.options = {"match": match}

    def __call__(self, parameters):
        return SGD(parameters, lr=0.1)


@needs_shards
def test_several_optimizers_update_their_shards(of_ranks):
    wanted = with_two_optimizers()
    for found in of_ranks(2)["two optimizers"]:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
