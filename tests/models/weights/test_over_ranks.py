"""The parameters and buffers of all ranks stay the same."""

import pytest
import torch
from in_ranks import in_ranks, results_of

from emrun.models.weights.over_ranks import broadcast, check_equal_on_ranks
from emrun.ranks.group import join


def copied():
    rank = join().rank
    buffers = {"b": torch.full((2,), rank), "a": torch.tensor(rank + 0.5), "empty": torch.zeros(0)}
    buffers["c"] = (torch.arange(4.0).view(2, 2) + rank * 1j).t()
    buffers["d"] = torch.tensor([rank == 0])
    broadcast(buffers, join())
    return [each.tolist() for each in buffers.values()]


def test_buffers_become_those_of_rank_0():
    assert in_ranks(3, copied) == [[[0, 0], 0.5, [], [[0, 2], [1, 3]], [True]]] * 3


def compared(changed, dtype):
    joined = join()
    module = {"a": torch.zeros(3, dtype=dtype), "b": torch.ones((), dtype=dtype), "empty": torch.zeros(0)}
    if joined.rank == 1 and changed:
        module[changed] = module[changed] + torch.finfo(dtype).eps
    check_equal_on_ranks(module, joined)
    return "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_that_are_equal_on_all_ranks(dtype):
    assert in_ranks(2, compared, None, dtype) == ["alike"] * 2


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_parameter_that_differs_in_its_last_bit_is_named_on_all_ranks(name):
    for each in results_of(3, compared, name, torch.float32):
        assert each.kind == "DifferentRanks"
        assert each.message.startswith(f"parameter {name!r} differs between rank 0 and rank 1: code that changes it")
