"""BatchNorm that is synchronised over ranks is the BatchNorm of one process on the whole batch."""

import copy
import itertools

import pytest
import torch
from campaign import thinned
from in_ranks import all_in_ranks, in_ranks
from torch import nn

from emrun.base.errors import ArgumentError
from emrun.models.sync_batch_norm import SynchronisedBatchNorm
from emrun.ranks.group import join

SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 2), nn.BatchNorm3d: (3, 2, 2, 2)}  # without the rows


def result(layer, batch, own=slice(None), **arguments):
    """Return the outputs, the gradients and the running statistics of two steps, and outputs in evaluation mode."""
    torch.manual_seed(0)
    before = nn.Linear(batch.size(-1), batch.size(-1), dtype=batch.dtype)
    norm = layer(3, dtype=batch.dtype, **arguments)
    if norm.affine:
        nn.init.normal_(norm.weight)
    module = nn.Sequential(before, norm)
    ranks = join()
    synchronised = SynchronisedBatchNorm(module)
    begin, end = ranks.share(len(batch)) if ranks.several else (0, len(batch))
    outputs = []
    for factor in (1, 2):
        rows = batch[begin:end] if begin < end else batch[:1]
        synchronised.begin(end - begin)
        found = module(rows * factor + factor)
        (found**3 * (begin < end)).sum().backward()
        outputs.append(found[: end - begin].detach())
    module.eval()
    outputs.append(module(batch)[begin:end].detach())
    gradients = [each.grad for each in module.parameters()]
    for each in gradients if ranks.several else ():
        ranks.add_up(each)
    return outputs, gradients, [each.clone() for each in module.buffers()]


ARGUMENTS = ({}, {"momentum": None, "affine": False}, {"track_running_stats": False})


def results(layer, batch):
    """Return the `result` of all layers that are made with `ARGUMENTS`."""
    return [result(layer, batch, **arguments) for arguments in ARGUMENTS]


@pytest.mark.parametrize(
    ("layer", "rows", "size"),
    thinned(
        [*itertools.product(SHAPES, (5,), (2, 7)), (nn.BatchNorm2d, 2, 3)],
        [(nn.BatchNorm2d, 2, 3)],  # of which the last rank has none
    ),
)
def test_it_is_the_batch_norm_of_torch_on_the_whole_batch_also_if_ranks_have_no_rows(layer, rows, size):
    batch = torch.rand((rows, *SHAPES[layer]), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    of_ranks = zip(*in_ranks(size, results, layer, batch), strict=True)
    for (outputs, gradients, buffers), found in zip(results(layer, batch), of_ranks, strict=True):
        close = {"rtol": 1e-12, "atol": 1e-12}
        for number, expected in enumerate(outputs):
            torch.testing.assert_close(torch.cat([each[0][number] for each in found]), expected, **close)
        for _, own_gradients, own_buffers in found:
            torch.testing.assert_close(own_gradients, gradients, **close)
            torch.testing.assert_close(own_buffers, buffers, **close)


def in_bf16():
    ranks = join()
    values = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    norm = nn.BatchNorm1d(2)
    SynchronisedBatchNorm(norm)
    found = norm(values[slice(*ranks.share(4))])
    return found.dtype, norm.running_mean.tolist()


@pytest.fixture(scope="module")
def of_two():
    """Return what layers on two ranks give, in 16 bits and copied."""
    return all_in_ranks(2, {"bf16": in_bf16, "copied": copied_and_compiled})


def test_16_bits_come_back_and_the_statistics_are_float32(of_two):
    for dtype, mean in of_two["bf16"]:
        assert dtype == torch.bfloat16
        assert mean == pytest.approx([0.3, 0.4])


def copied_and_compiled(backend=None):
    """Return what a copy gives, and a compiled copy, if there is a backend, or the module itself."""
    ranks = join()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    SynchronisedBatchNorm(module)
    rows = torch.arange(8.0).view(4, 2)[slice(*ranks.share(4))]
    found = []
    other = module if backend is None else torch.compile(copy.deepcopy(module), backend=backend)
    for each in (copy.deepcopy(module), other):
        each(rows).sum().backward()
        found.append([value.detach().clone() for value in (*each.buffers(), *(p.grad for p in each.parameters()))])
    return found


def test_copies_are_synchronised_too(of_two):
    for found, others in of_two["copied"]:
        torch.testing.assert_close(others, found)


@pytest.mark.campaign
def test_compiled_modules_are_synchronised_too():
    for plain, compiled in in_ranks(2, copied_and_compiled, "aot_eager"):
        torch.testing.assert_close(compiled, plain)


class WithActivation(nn.BatchNorm2d):
    def forward(self, values):
        return super().forward(values).relu()


def test_a_module_without_batch_norm_and_one_with_its_own_forward_are_errors():
    with pytest.raises(ArgumentError, match="sync_batch_norm: Linear has no BatchNorm; remove the key"):
        SynchronisedBatchNorm(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="sync_batch_norm: 0 is a WithActivation with its own forward"):
        SynchronisedBatchNorm(nn.Sequential(WithActivation(2)))
