"""`emrun.all_gather`: the rows of all ranks with gradients, beside the same in one process."""

import numpy as np
import pytest
import torch
from in_ranks import Failed, all_in_ranks, in_ranks, results_of
from torch import nn

import emrun
from emrun import MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.hooks import ComputeStats, StopAfter
from emrun.ranks import gather
from emrun.ranks.group import join

COUNTS = (2, 0, 3)


def gathered():
    """Return the rows of three ranks of different lengths, and the gradient of those of this rank."""
    rank = join().rank
    found = []
    for dtype in (torch.float32, torch.int64, torch.bool):
        values = (torch.arange(2 * COUNTS[rank]).view(-1, 2) + 10 * rank).to(dtype)
        found.append(emrun.all_gather(values).tolist())
    values = torch.full((COUNTS[rank], 2), float(rank), requires_grad=True)
    (emrun.all_gather(values).square().sum() * (rank + 1)).backward()
    return found, values.grad


def test_rows_come_in_the_order_of_the_ranks_and_gradients_of_all_ranks_are_added_up():
    rows = [[0, 1], [2, 3], [20, 21], [22, 23], [24, 25]]
    for rank, ((floats, integers, booleans), gradient) in enumerate(in_ranks(3, gathered)):
        assert floats == integers == rows
        assert booleans == [[False, True], *[[True, True]] * 4]
        assert torch.equal(gradient, torch.full((COUNTS[rank], 2), 2.0 * rank * (1 + 2 + 3)))


def test_one_process_gets_the_tensor_itself():
    tensor = torch.rand(3, 2)
    assert emrun.all_gather(tensor) is tensor


def test_what_has_no_rows_is_an_error():
    with pytest.raises(ArgumentError, match=r"all_gather: a tensor of shape \(\) has no rows; give it a tensor of sh"):
        emrun.all_gather(torch.tensor(1.0))
    with pytest.raises(ArgumentError, match="a list has no rows"):
        emrun.all_gather([1.0])


def unlike():
    emrun.all_gather(torch.zeros(2, 3 + join().rank))


def test_rows_of_other_shapes_are_an_error_on_all_ranks():
    for each in results_of(2, unlike):
        assert isinstance(each, Failed)
        assert "the rows of rank 1 are (B, 4) torch.float32, those of rank 0 (B, 3) torch.float32; pad" in each.message


class Contrastive(nn.Module):
    """SimCLR: each view is compared with those of all other examples."""

    def __init__(self, gathers=True):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.gathers = gathers

    def forward(self, x, other):
        views = [nn.functional.normalize(self.layers(each), dim=1) for each in (x, other)]
        first, second = [emrun.all_gather(each) if self.gathers else each for each in views]
        return {"loss": nn.functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))}


class Views:
    """Batches of which some have no rows for the last rank."""

    def train_stream(self):
        rng = np.random.default_rng(0)
        for rows in (6, 5, 1, 7):
            yield {"x": rng.normal(size=(rows, 4)), "other": rng.normal(size=(rows, 4))}

    valid_stream = train_stream


class Gradients(emrun.AbstractHook):
    """Notes the gradients of each update."""

    every_rank = True

    def __init__(self):
        super().__init__()
        self.found = []

    def before_update(self, model):
        self.found.append(torch.cat([each.grad.flatten() for each in model.module.parameters()]).clone())


class Losses(emrun.AbstractHook):
    """Notes the losses of the epochs."""

    reads = ()

    def __init__(self):
        super().__init__()
        self.found = []

    def after_epoch(self, epoch_data):
        self.found += [epoch_data[stream]["loss"]["mean"] for stream in ("train", "valid")]


def trained(gathers=True, **arguments):
    """Return the gradients of the updates, the losses of the epochs and the weights."""
    join()
    torch.manual_seed(0)
    model = TorchModel(Contrastive(gathers), optimizer=lambda each: torch.optim.SGD(each, lr=0.1), **arguments)
    gradients, losses = Gradients(), Losses()
    hooks = [gradients, ComputeStats({"loss": ["mean"]}), losses, StopAfter(epochs=1)]
    MainLoop(model, Views(), hooks, extra_streams=["valid"], skip_zeroth_epoch=True).run_training()
    return torch.stack(gradients.found).numpy(), losses.found


@pytest.fixture(scope="module")
def alone():
    """Return what one process trains."""
    return in_ranks(1, trained)[0]


@pytest.fixture(scope="module")
def of_two():
    """Return what two ranks train, with and without it, and in parts."""
    calls = {
        "with": trained,
        "without": lambda: trained(gathers=False),
        "in parts": lambda: trained(micro_batch_size=2),
    }
    return all_in_ranks(2, calls, failing=["in parts"])


def check_that_gradients_are_those_of(alone, of_ranks):
    gradients, losses = alone
    assert np.abs(gradients).max() > 0.01
    for rank, (its_gradients, its_losses) in enumerate(of_ranks):
        np.testing.assert_allclose(its_gradients, gradients, rtol=0, atol=1e-12)
        assert rank or its_losses == pytest.approx(losses, abs=1e-12)


def test_a_contrastive_loss_is_that_of_one_process_with_its_gradients(alone, of_two):
    check_that_gradients_are_those_of(alone, of_two["with"])


@pytest.mark.campaign
def test_a_contrastive_loss_is_that_of_one_process_with_its_gradients_on_three_ranks(alone):
    check_that_gradients_are_those_of(alone, in_ranks(3, trained))


def test_without_it_the_ranks_train_something_else(alone, of_two):
    assert np.abs(of_two["without"][0][0] - alone[0]).max() > 0.01


def test_parts_of_a_batch_cannot_be_gathered(of_two):
    for each in of_two["in parts"]:
        assert each.message == (
            "model.micro_batch_size: cannot be used with emrun.all_gather: a rank has its own parts"
        ) or each.message.startswith("micro_batch_size: cannot be used with emrun.all_gather")


def test_a_rank_without_rows_is_known_by_its_batch():
    gather.prepare({"x": np.zeros((0, 2))})
    assert gather._rows == 0
    gather.prepare({"x": np.zeros((1, 2))})
    assert gather._rows == 1
