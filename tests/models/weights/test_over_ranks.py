"""The parameters and buffers of all ranks stay the same."""

from functools import partial

import pytest
import torch
from in_ranks import all_in_ranks

from emrun.models.weights.over_ranks import broadcast, check_equal_on_ranks
from emrun.ranks.group import join


def copied():
    rank = join().rank
    buffers = {"b": torch.full((2,), rank), "a": torch.tensor(rank + 0.5), "empty": torch.zeros(0)}
    buffers["c"] = (torch.arange(4.0).view(2, 2) + rank * 1j).t()
    buffers["d"] = torch.tensor([rank == 0])
    broadcast(buffers, join())
    return [each.tolist() for each in buffers.values()]


def test_buffers_become_those_of_rank_0(of_three):
    assert of_three["copied"] == [[[0, 0], 0.5, [], [[0, 2], [1, 3]], [True]]] * 3


def compared(changed, dtype):
    joined = join()
    module = {"a": torch.zeros(3, dtype=dtype), "b": torch.ones((), dtype=dtype), "empty": torch.zeros(0)}
    if joined.rank == 1 and changed:
        module[changed] = module[changed] + torch.finfo(dtype).eps
    check_equal_on_ranks(module, joined)
    return "alike"


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(scope="module")
def of_three():
    """Return what three ranks say whose parameters are equal, or of which one differs, and what they have copied."""
    calls = {"copied": copied}
    calls |= {dtype: partial(compared, None, dtype) for dtype in DTYPES}
    calls |= {name: partial(compared, name, torch.float32) for name in "ab"}
    return all_in_ranks(3, calls, failing=("a", "b"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_that_are_equal_on_all_ranks(of_three, dtype):
    assert of_three[dtype] == ["alike"] * 3


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_parameter_that_differs_in_its_last_bit_is_named_on_all_ranks(of_three, name):
    for each in of_three[name]:
        assert each.kind == "DifferentRanks"
        assert each.message.startswith(f"parameter {name!r} differs between rank 0 and rank 1: code that changes it")
