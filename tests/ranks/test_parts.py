"""Rows of a batch, and outputs of parts joined."""

import numpy as np
import pytest
import torch

from emrun.base.errors import StreamError
from emrun.ranks.parts import Joined, mean, rows_of


def test_rows_of_arrays_lists_and_mappings():
    assert rows_of(np.arange(6), 1, 3).tolist() == [1, 2]
    assert rows_of(list("abcdef"), 0, 2) == ["a", "b"]
    assert {name: each.tolist() for name, each in rows_of({"a": torch.arange(6), "b": np.arange(6)}, 4, 6).items()} == {
        "a": [4, 5],
        "b": [4, 5],
    }


def test_entries_are_joined_and_scalars_are_weighted_means():
    joined = Joined("key", "parts")
    for values, scalar in (([1.0, 2.0], 3.0), ([3.0], 6.0)):
        joined.counts.append(len(values))
        joined.add({"entries": torch.tensor(values), "scalar": torch.tensor(scalar)}, len(values))
    outputs = joined.outputs()
    assert outputs["entries"].tolist() == [1, 2, 3]
    assert outputs["scalar"].item() == 4


def test_an_output_that_a_part_lacks_is_an_error():
    joined = Joined("several ranks", "several ranks")
    for outputs in ({"a": torch.ones(1)}, {}):
        joined.counts.append(1)
        joined.add(outputs, 1)
    with pytest.raises(StreamError, match="several ranks: only some parts of the batch have the output 'a'"):
        joined.outputs()


def test_the_weighted_mean_of_tensors():
    assert mean([torch.tensor(1.0), torch.tensor(4.0)], [2.0, 1.0]).item() == 2


def test_an_output_that_is_read_on_demand_is_an_error_only_then():
    joined = Joined("several ranks", "several ranks")
    for count in (1, 2):
        joined.counts.append(count)
        joined.add({"a": torch.ones(count), "views": torch.ones(2 * count)}, count)
    batch = joined.on_demand()
    batch["b"] = 3
    assert list(batch) == ["a", "views", "b"]
    assert (batch["a"].tolist(), batch["b"], batch.get("c")) == ([1, 1, 1], 3, None)
    with pytest.raises(StreamError, match=r"the output 'views' is a Tensor of shape \(2,\) for a part of 1 examples"):
        dict(batch)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_entries_of_different_lengths_are_padded_with_zeros(kind):
    joined = Joined("key", "parts")
    for values in (np.ones((1, 2, 3)), np.ones((2, 4, 1))):
        joined.counts.append(len(values))
        joined.add({"padded": kind(values)}, len(values))
    found = joined.outputs()["padded"]
    assert type(found) is type(kind(values))
    assert found.shape == (3, 4, 3)
    assert found.sum() == 14
