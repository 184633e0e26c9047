"""The modules of emrun's bases."""

import pytest
import torch

from emrun.base.errors import ArgumentError
from emrun.models.networks import ImageNet, SeriesNet, TableNet


@pytest.mark.parametrize(("numbers", "categories"), [(3, 0), (0, 2), (3, 2)])
@pytest.mark.parametrize("hidden", [[], [8, 4]])
def test_rows_have_numbers_or_categories_or_both(numbers, categories, hidden):
    net = TableNet(numbers, categories, 5 * categories, 4, hidden)
    rows = torch.zeros(1, numbers), torch.zeros(1, categories, dtype=torch.int64)
    assert net(*rows).shape == (1, 4)
    assert all(each.numel() for each in net.parameters())


def test_rows_have_something():
    with pytest.raises(ArgumentError, match="there is no column to predict from"):
        TableNet(0, 0, 0, 1)


def test_a_series_is_told_in_all_its_columns():
    assert SeriesNet(6, 2, 3, 1, [])(torch.zeros(4, 6, 2)).shape == (4, 3, 1)


@pytest.mark.parametrize("size", [8, 33])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_network_takes_any_size_and_a_batch_of_one(size, channels):
    assert ImageNet(5).train()(torch.zeros(1, channels, size, size)).shape == (1, 5)


def test_the_small_network_has_no_weights_to_begin_with():
    with pytest.raises(ArgumentError, match="no weights of the model 'small'"):
        ImageNet(5, pretrained=True)
    assert ImageNet(5).weights_to_begin_with is None
