"""Pieces of tensors: what ranks have of a tensor, and the whole of it."""

import pytest
import torch
from in_ranks import in_ranks, needs_shards
from torch import nn

from emrun.base.encoding import encode
from emrun.models.sharding import Sharding
from emrun.ranks.group import join
from emrun.ranks.pieces import in_pieces_like, is_in_pieces, norms_of_all, piece, rows_of, whole

WHOLE = torch.arange(12.0, dtype=torch.float64).view(4, 3)


def divided():
    """Return what a rank has of a weight of 4 rows, and what it makes of the whole."""
    ranks = join()
    module = nn.Sequential(nn.Linear(3, 4)).double()
    Sharding(module, {"shard": "0"}, ranks)
    [weight, bias] = module.parameters()
    given = in_pieces_like(WHOLE, weight)
    local = piece(given)
    norms = norms_of_all([local.norm(), torch.tensor(7.0)], [given, torch.ones(2)])
    return (
        [is_in_pieces(each) for each in (weight, bias, given, local)],
        local,
        local.untyped_storage().nbytes(),
        whole(given),
        (rows := rows_of(given)),
        rows.values.data_ptr() == local.data_ptr(),
        encode(rows, "rows", copied=True).values.data_ptr() != local.data_ptr() or not len(local),
        norms,
    )


@needs_shards
def test_each_rank_has_some_rows_and_all_can_have_the_whole():
    found = in_ranks(3, divided)
    for rank, (are_in_pieces, local, size, all_rows, rows, is_same, is_copied, norms) in enumerate(found):
        assert are_in_pieces == [True, True, True, False]
        assert torch.equal(local, WHOLE[2 * rank : 2 * rank + 2])  # the last rank has none
        assert size == local.numel() * 8  # of the whole, it keeps nothing else
        assert torch.equal(all_rows, WHOLE)
        assert torch.equal(rows.values, local)
        assert (rows.shape, rows.begin) == ((4, 3), min(4, 2 * rank))
        assert is_same
        assert is_copied
        assert [each.item() for each in norms] == pytest.approx([WHOLE.norm().item(), 7.0])


def test_other_tensors_and_values_stay_as_they_are():
    tensor = torch.ones(2)
    assert not is_in_pieces(tensor)
    assert whole(tensor) is rows_of(tensor) is piece(tensor) is tensor
    assert rows_of(3) == 3
    norms = [tensor.norm()]
    assert norms_of_all(norms, [tensor]) is norms
