"""The comparison of a program with its model."""

import numpy as np
import pytest
import torch

from emrun.errors import ExportError
from emrun.exports.comparison import Case, compare, difference, tolerances


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0], 0.0),
        ([np.nan], [1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([True, False], [True, True], 1.0),
        ([1, 2], [1, 5], 3.0),
        ([[1.0]], [1.0], np.inf),
        ([], [], 0.0),
        ([1j], [0j], 1.0),
    ],
)
def test_the_largest_difference_of_two_arrays(one, other, expected):
    assert difference(np.array(one), np.array(other)) == expected


def test_the_tolerance_is_a_share_of_the_largest_finite_value():
    cases = [Case({}, {"a": torch.tensor([-4.0, torch.inf]), "b": torch.tensor([True])}, "batch 0")]
    assert tolerances(cases, None, is_16_bits=False) == {"a": (4e-4, 4.0), "b": (1e-4, 1.0)}
    assert tolerances(cases, None, is_16_bits=True)["a"] == (0.08, 4.0)
    assert tolerances(cases, 0.5, is_16_bits=True)["a"] == (0.5, 4.0)


def test_a_branch_that_the_trace_has_frozen_is_found_by_a_batch_that_takes_the_other():
    cases = [Case({}, {"a": torch.tensor([1.0])}, "batch 0"), Case({}, {"a": torch.tensor([2.0])}, "batch 1")]
    found = [{"a": np.array([1.0])}, {"a": np.array([3.0])}]
    with pytest.raises(
        ExportError, match=r"on batch 1 it differs by 1, .*on batch 0 it is the same, .*frozen a branch"
    ):
        compare(cases, found, tolerances(cases, None, is_16_bits=False))
