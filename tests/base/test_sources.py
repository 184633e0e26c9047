"""The sources of a batch: their lengths, the parts of mappings, nested tensors."""

from collections import UserDict

import numpy as np
import pytest
import torch

from emrun.base.sources import examples_of, is_nested, length, parts


def nested(*lengths, layout=torch.jagged):
    return torch.nested.nested_tensor([torch.full((each, 2), float(each)) for each in lengths], layout=layout)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(([1, 2], 2), ("ab", 2), (np.zeros((3, 2)), 3), (torch.zeros(0, 2), 0), (np.float32(1), -1), (3, -1)),
        ({"ids": np.zeros((3, 2)), "mask": [1, 2, 3]}, 3),
        (UserDict(ids=[1], inner={"w": torch.zeros(1)}), 1),
        ({"ids": np.zeros(3), "mask": [1, 2]}, -1),
        ({"ids": np.zeros(3), "name": 5}, -1),
        ({}, -1),
    ],
)
def test_the_length_of_a_source_is_the_number_of_its_examples(values, expected):
    assert length(values) == expected


def test_the_length_of_a_nested_tensor_is_the_number_of_its_parts():
    assert length(nested(3, 1, 2)) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_nested_tensor_of_the_old_layout_has_a_length_too():
    assert length(nested(3, 1, layout=torch.strided)) == 2


def test_the_parts_of_a_mapping_are_named_after_it():
    batch = {"x": 1, "tokens": UserDict(ids=2, inner={"w": 3}), "none": {}}
    assert list(parts(batch)) == [("x", 1), ("tokens.ids", 2), ("tokens.inner.w", 3)]


def test_only_a_nested_tensor_is_one():
    assert is_nested(nested(1, 2))
    assert not any(map(is_nested, (torch.zeros(2), [1], {}, np.zeros(2))))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_number_of_examples_of_a_batch(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for values in (nested, torch.ones(2, 3), np.ones(2), [1, 2], {"a": [1, 2]}):
        assert examples_of({"x": values}) == 2
