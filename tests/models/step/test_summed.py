"""The gradients of all ranks are added up."""

from functools import partial

import pytest
import torch
from in_ranks import Failed, all_in_ranks, in_ranks, results_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from emrun.models.step import gradient_sums
from emrun.models.step.gradient_sums import GradientSums
from emrun.ranks.group import join


def parameters(*dtypes):
    return [nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]


def added(dtypes, given, weight, loss):
    """Return what a rank gets; `given` has, for each rank, which parameters have a gradient."""
    joined = join()
    members = parameters(*dtypes)
    for number, each in enumerate(members):
        if number in given[joined.rank]:
            each.grad = torch.full_like(each, (number + 1) * 10 ** float(joined.rank))
    sums = GradientSums(members, joined)
    mean = sums.reduce(weight[joined.rank], loss and torch.tensor(loss[joined.rank]))
    total = sum(weight)
    grads = [None if each.grad is None else (each.grad.unique() * total).round().tolist() for each in members]
    return (
        grads,
        [each.grad is None or each.grad.dtype == each.dtype for each in members],
        None if mean is None else mean.item(),
    )


def test_gradients_weights_and_losses_of_three_ranks():
    everyone = [(0, 1)] * 3
    for grads, fits, mean in in_ranks(3, added, [torch.float32] * 2, everyone, (1, 2, 5), (8.0, 4.0, 0.0)):
        assert grads == [[111], [222]]
        assert all(fits)
        assert mean == 2


OF_TWO = {
    "several dtypes": partial(added, [torch.float64, torch.bfloat16, torch.float32], [(0, 1, 2)] * 2, (3, 1), None),
    "bfloat16": partial(added, [torch.bfloat16], [(0,)] * 2, (256, 1), (1.0, 258.0)),
    "of one rank and of none": partial(added, [torch.float32] * 3, [(0, 1), (0,)], (1, 1), None),
    "without rows": partial(added, [torch.float32], [(0,), ()], (4, 0), (3.0, 0.0)),
    "without parameters": partial(added, [], [(), ()], (1, 3), (4.0, 8.0)),
    "strides": lambda: strided(),
    "passes": lambda: backward_passes((None, None)),
    "left out on one rank": lambda: backward_passes((5, None)),
    "left out on all ranks": lambda: backward_passes((2, 2)),
    "frozen": lambda: backward_passes((None, None), frozen=3),
    "in parts": lambda: backward_passes((None, None), twice=True),
    "sparse": lambda: sparse(),
}


@pytest.fixture(scope="module")
def of_two():
    """Return what two ranks get of each call."""
    return all_in_ranks(2, OF_TWO, failing=["sparse"])


def test_parameters_of_several_dtypes_keep_them(of_two):
    for grads, fits, _ in of_two["several dtypes"]:
        assert grads == [[11], [22], [33]]
        assert all(fits)


def test_weights_are_exact_if_all_parameters_are_bfloat16(of_two):
    for grads, fits, mean in of_two["bfloat16"]:
        assert grads == [[11]]
        assert all(fits)
        assert mean == 2


def test_a_gradient_of_one_rank_is_that_of_all_and_one_of_none_stays_none(of_two):
    for grads, _, _ in of_two["of one rank and of none"]:
        assert grads == [[11], [2], None]


def test_a_rank_without_rows_counts_nothing(of_two):
    for grads, _, mean in of_two["without rows"]:
        assert grads == [[1]]
        assert mean == 3


def test_without_trained_parameters_the_loss_is_still_the_mean(of_two):
    for _, _, mean in of_two["without parameters"]:
        assert mean == 7


def sparse():
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.eye(3, 2).to_sparse()
    GradientSums([parameter], join()).reduce(1)


def test_a_sparse_gradient_is_an_error(of_two):
    for each in of_two["sparse"]:
        assert isinstance(each, Failed)
        assert each.message == "optimizer: a gradient is sparse, which several ranks do not support; set sparse=False"


class Deep(nn.Module):
    """Several layers of 64 kB, of which one may be left out, and one may be used twice."""

    def __init__(self, twice=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(6)])
        self.twice = twice

    def forward(self, values, without=None):
        for number, layer in enumerate(self.layers):
            if number != without:
                values = layer(values).tanh()
        if self.twice:
            values = checkpoint(self.layers[5], values, use_reentrant=True)
            values = checkpoint(self.layers[5], values, use_reentrant=True)
        return values


def backward_passes(without, twice=False, frozen=None):
    """Return the sums of three passes, what they should be, and how many buckets were sent during each pass."""
    ranks = join()
    gradient_sums._LEAST = 2**16
    torch.manual_seed(0)
    module = Deep(twice).double()
    sums = GradientSums(list(module.parameters()), ranks)
    found, during = [], []
    for number in range(3):
        if frozen is not None:
            module.layers[frozen].requires_grad_(number == 1)
        module.zero_grad()
        values = torch.rand(4, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks.rank))
        sums.begin_backward()
        module(values.requires_grad_(), without[ranks.rank]).sum().backward()
        during.append(len(sums._sent))
        expected = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in module.parameters()]
        sums.reduce(0.5)
        for each in expected:
            ranks.add_up(each)
        found.append([(each.grad, other) for each, other in zip(module.parameters(), expected, strict=True)])
    for grad, other in [pair for each in found for pair in each]:
        assert (other == 0).all() if grad is None else grad.shape == other.shape
    torch.testing.assert_close(
        [grad for grad, _ in found[2] if grad is not None], [o for g, o in found[2] if g is not None]
    )
    return during, [grad is None for grad, _ in found[2]]


def test_buckets_are_sent_during_the_backward_pass_after_the_first_one(of_two):
    for during, missing in of_two["passes"]:
        assert during[0] == 0
        assert during[1] == during[2] >= 2
        assert not any(missing)


def test_a_layer_that_one_rank_leaves_out_delays_only_what_that_rank_sends(of_two):
    (first, missing), (second, others) = of_two["left out on one rank"]
    assert first[1:] == [0, 0]
    assert second[1] >= 2
    assert not any(missing + others)


def test_a_layer_that_all_ranks_leave_out_has_no_gradient(of_two):
    for _, missing in of_two["left out on all ranks"]:
        assert missing == [number // 2 == 2 for number in range(12)]


def test_frozen_parameters_are_laid_out_anew(of_two):
    for _, missing in of_two["frozen"]:
        assert missing == [number // 2 == 3 for number in range(12)]


def test_gradients_that_arrive_in_parts_are_sent_at_the_end(of_two):
    for during, _ in of_two["in parts"]:
        assert during == [0, 0, 0]


def in_parts_later():
    ranks = join()
    gradient_sums._LEAST = gradient_sums._MOST = 2**16  # a layer is a bucket
    module = Deep()
    sums = GradientSums(list(module.parameters()), ranks)
    for module.twice in (False, True):
        sums.begin_backward()
        module(torch.rand(4, 128, requires_grad=True)).sum().backward()
        sums.reduce(0.5)


def test_a_gradient_whose_first_part_was_sent_is_an_error():
    for each in results_of(2, in_parts_later):
        assert each.message.startswith("module: a gradient was calculated in several parts, after its first part was")


def strided():
    layer = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    layer(torch.ones(1, 3, 4, 4)).sum().backward()
    sums = GradientSums(list(layer.parameters()), join())
    expected = layer.weight.grad * 2
    sums.reduce(0.5)
    return layer.weight.grad.stride() == layer.weight.stride(), torch.equal(layer.weight.grad, expected)


def test_gradients_keep_the_strides_of_the_parameters(of_two):
    assert of_two["strides"] == [(True, True)] * 2
