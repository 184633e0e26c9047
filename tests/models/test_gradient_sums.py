"""The gradients of all ranks are added up, and their parameters and buffers stay the same."""

import pytest
import torch
from in_ranks import Failed, in_ranks, results_of
from torch import nn

from emrun.models.gradient_sums import add_up_gradients, check_alike, copy_from_first
from emrun.ranks import join


def parameters(*dtypes):
    return [nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]


def added(dtypes, given, weight, loss):
    """Return the sums on a rank; `given` has, for each rank, which parameters have a gradient."""
    joined = join()
    members = parameters(*dtypes)
    for number, each in enumerate(members):
        if number in given[joined.rank]:
            each.grad = torch.full_like(each, (number + 1) * 10 ** float(joined.rank))
    weight_sum, mean = add_up_gradients(members, weight[joined.rank], loss and torch.tensor(loss[joined.rank]), joined)
    grads = [None if each.grad is None else each.grad.unique().tolist() for each in members]
    return (
        grads,
        [each.grad is None or each.grad.dtype == each.dtype for each in members],
        weight_sum.item(),
        mean.item(),
    )


def test_gradients_weights_and_losses_of_three_ranks():
    everyone = [(0, 1)] * 3
    for grads, fits, weight, mean in in_ranks(3, added, [torch.float32] * 2, everyone, (1, 2, 5), (8.0, 4.0, 0.0)):
        assert grads == [[111], [222]]
        assert all(fits)
        assert (weight, mean) == (8, 2)


def test_parameters_of_several_dtypes_keep_them():
    dtypes = [torch.float64, torch.bfloat16, torch.float32]
    for grads, fits, weight, _ in in_ranks(2, added, dtypes, [(0, 1, 2)] * 2, (3, 1), None):
        assert grads == [[11], [22], [33]]
        assert all(fits)
        assert weight == 4


def test_weights_are_exact_if_all_parameters_are_bfloat16():
    for grads, fits, weight, mean in in_ranks(2, added, [torch.bfloat16], [(0,)] * 2, (256, 1), (1.0, 258.0)):
        assert grads == [[11]]
        assert all(fits)
        assert (weight, mean) == (257, 2)


def test_a_gradient_of_one_rank_is_that_of_all_and_one_of_none_stays_none():
    for grads, _, _, _ in in_ranks(2, added, [torch.float32] * 3, [(0, 1), (0,)], (1, 1), None):
        assert grads == [[11], [2], None]


def test_a_rank_without_rows_counts_nothing():
    for grads, _, weight, mean in in_ranks(2, added, [torch.float32], [(0,), ()], (4, 0), (3.0, 0.0)):
        assert grads == [[1]]
        assert (weight, mean) == (4, 3)


def test_without_trained_parameters_the_loss_is_still_the_mean():
    for _, _, weight, mean in in_ranks(2, added, [], [(), ()], (1, 3), (4.0, 8.0)):
        assert (weight, mean) == (4, 7)


def sparse():
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.eye(3, 2).to_sparse()
    add_up_gradients([parameter], 1, None, join())


def test_a_sparse_gradient_is_an_error():
    for each in results_of(2, sparse):
        assert isinstance(each, Failed)
        assert each.message == "optimizer: a gradient is sparse, which several ranks do not support; set sparse=False"


def copied():
    rank = join().rank
    buffers = {"b": torch.full((2,), rank), "a": torch.tensor(rank + 0.5), "empty": torch.zeros(0)}
    copy_from_first(buffers, join())
    return buffers["a"].item(), buffers["b"].tolist()


def test_buffers_become_those_of_rank_0():
    assert in_ranks(3, copied) == [(0.5, [0, 0])] * 3


def compared(changed, dtype):
    joined = join()
    module = {"a": torch.zeros(3, dtype=dtype), "b": torch.ones((), dtype=dtype), "empty": torch.zeros(0)}
    if joined.rank == 1 and changed:
        module[changed] = module[changed] + torch.finfo(dtype).eps
    check_alike(module, joined)
    return "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_that_are_equal_on_all_ranks(dtype):
    assert in_ranks(2, compared, None, dtype) == ["alike"] * 2


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_parameter_that_differs_in_its_last_bit_is_named_on_all_ranks(name):
    for each in results_of(3, compared, name, torch.float32):
        assert each.kind == "DifferentRanks"
        assert each.message.startswith(f"parameter {name!r} differs between rank 0 and rank 1: code that changes it")
