"""The rows of a rank in a batch."""

import pickle

import numpy as np
import pytest
import torch

from emrun.ranks.group import Ranks
from emrun.ranks.shares import Share, like, own_share, rows_in, total_in

BATCH = {"x": np.arange(10).reshape(5, 2), "y": torch.arange(5), "names": list("abcde"), "in": {"z": np.arange(5)}}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_shares_of_all_ranks_make_up_the_batch(size):
    shares = [own_share(BATCH, Ranks(rank, size)) for rank in range(size)]
    assert sum(map(rows_in, shares)) == 5
    assert np.array_equal(np.concatenate([each["x"] for each in shares]), BATCH["x"])
    assert torch.equal(torch.cat([each["y"] for each in shares]), BATCH["y"])
    assert [name for each in shares for name in each["names"]] == BATCH["names"]
    assert np.concatenate([each["in"]["z"] for each in shares]).tolist() == [0, 1, 2, 3, 4]
    assert {total_in(each) for each in shares} == {5}
    assert [rows_in(each) for each in shares] == [len(each["names"]) for each in shares]


def test_a_rank_without_rows_has_a_row_that_counts_nothing():
    shares = [own_share(BATCH, Ranks(rank, 7)) for rank in range(7)]
    assert sorted(map(rows_in, shares)) == [0, 0, 1, 1, 1, 1, 1]
    for each in shares:
        assert len(each["y"]) == 1
    assert all(each["names"] == ["a"] for each in shares if not rows_in(each))


def test_a_batch_of_one_process_counts_its_examples():
    assert rows_in(BATCH) == total_in(BATCH) == 5
    assert own_share({}, Ranks(0, 2)) == {}


def test_a_share_can_be_copied_and_pickled():
    share = own_share(BATCH, Ranks(1, 2), compares=True)
    for copy in (like(share), pickle.loads(pickle.dumps(share))):
        assert isinstance(copy, Share)
        assert (rows_in(copy), copy.total, list(copy)) == (rows_in(share), share.total, list(share))
    assert pickle.loads(pickle.dumps(share)).whole == share.whole
    assert type(like(BATCH)) is dict


def test_the_checksum_is_that_of_the_whole_batch():
    shares = [own_share(BATCH, Ranks(rank, 2), compares=True) for rank in range(2)]
    assert shares[0].whole == shares[1].whole is not None
    other = own_share({**BATCH, "y": torch.arange(5) * 2}, Ranks(0, 2), compares=True)
    assert other.whole != shares[0].whole
    assert own_share(BATCH, Ranks(0, 2)).whole is None
