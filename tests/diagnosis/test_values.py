"""Values of examples that are not finite, and those that can be shown."""

import numpy as np
import pytest
import torch

from emrun.diagnosis.values import not_finite, scalars

NESTED = torch.nested.nested_tensor([torch.ones(2), torch.tensor([1.0, torch.inf])], layout=torch.jagged)


@pytest.mark.parametrize(
    "values",
    [
        [0.0, float("nan")],
        [np.float32(1), np.float32("inf")],
        [[1, [2.0]], [1, [float("nan")]]],
        [torch.zeros(2), torch.tensor([0.0, torch.nan])],
        np.array([[1.0, 2.0], [np.nan, 1.0]]),
        torch.tensor([1, complex(0, float("inf"))]).conj(),
        torch.tensor([1.0, torch.nan], dtype=torch.bfloat16),
        NESTED,
    ],
    ids=str,
)
def test_examples_with_a_value_that_is_not_finite_are_found(values):
    assert list(not_finite(values)) == [1]


@pytest.mark.parametrize("values", [["a", "b"], [1, 2], np.zeros(2), np.array([None, "nan"], object)], ids=str)
def test_other_values_are_finite(values):
    assert list(not_finite(values)) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([np.int64(3), 4], [3, 4]),
        (["a", np.str_("b")], ["a", "b"]),
        (torch.tensor([True, False]), [True, False]),
        (np.array(["a", 7], object), ["a", 7]),
        (np.zeros(2), None),
        (np.zeros((2, 2), int), None),
        ([1, 2.5], None),
        ({"a": [1]}, None),
    ],
    ids=str,
)
def test_whole_numbers_truth_values_and_texts_are_shown_as_plain_values(values, found):
    assert scalars(values) == found
    assert all(type(each) in (int, str, bool) for each in found or ())
