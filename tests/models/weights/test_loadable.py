"""Structures of modules: what is compared, and what a file of weights cannot hold."""

import pytest
import torch

from emrun.models.weights.loadable import differences, structure, what_cannot_be_held


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (torch.zeros(1, dtype=torch.complex128), "'a' is complex128"),
        (torch.eye(2).to_sparse(), "'a' is sparse_coo"),
        (torch.ones(1).to("meta"), "'a' is on the device meta, without values"),
    ],
    ids=["complex128", "coo", "meta"],
)
def test_what_safetensors_cannot_hold_is_named(tensor, reason):
    assert what_cannot_be_held({"a": tensor, "b": torch.ones(1)}) == [reason]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_what_safetensors_can_hold_is_not_refused(dtype):
    assert what_cannot_be_held({"a": torch.zeros(2, dtype=dtype)}) == []


def test_structures_are_compared_by_name_shape_and_dtype():
    before = structure({name: torch.zeros(2) for name in "abcd"})
    now = structure({"a": torch.zeros(3), "b": torch.zeros(2).int(), "c": torch.zeros(2), "e": torch.zeros(2)})
    expected = ["'e' is new", "'d' is missing", "'a' had shape (2,), has (3,)", "'b' was float32, is int32"]
    assert differences(before, now) == expected
    assert differences(before, now, of_dtypes=False) == expected[:3]
    assert differences(before, before) == []
