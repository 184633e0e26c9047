"""Numbers that wait on their device."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from emrun.loop.waiting_numbers import WaitingNumbers, read


class Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the CPU, as one on a GPU does."""

    is_cpu = False


def elsewhere(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype).as_subclass(Elsewhere)


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        3,
        True,
        np.float32(0.1),
        np.array(0.5),
        torch.tensor(0.1),
        torch.tensor([[7]]),
        torch.ones((), dtype=torch.half),
        np.array([0.5]),
        Fraction(1, 2),
        Decimal("0.5"),
    ],
)
def test_a_number_is_kept_exactly(value):
    expected = value.item() if hasattr(value, "item") else value
    assert read([WaitingNumbers().keep(value)]) == [float(expected)]


def test_values_on_a_device_are_copied_and_read_together():
    slots = WaitingNumbers()
    values = [elsewhere(float(number)) for number in range(130)]
    kept = [slots.keep(value) for value in values]
    for value in values:
        value.fill_(-1.0)
    assert all(isinstance(each, torch.Tensor) for each in kept)
    assert read([None, *kept, 0.5]) == [None, *map(float, range(130)), 0.5]


def test_values_of_different_types_keep_their_order_and_their_bits():
    slots = WaitingNumbers()
    values = [elsewhere(0.1), elsewhere(0.1, torch.float64), elsewhere(7, torch.int64), elsewhere([math.inf])]
    kept = [slots.keep(value) for value in values]
    assert read(kept) == [float(torch.tensor(0.1)), 0.1, 7.0, math.inf]


def test_a_kept_value_has_no_graph():
    value = elsewhere(0.5).requires_grad_()
    assert not WaitingNumbers().keep(value * 2).requires_grad


def test_slots_that_were_made_in_inference_mode_can_be_used_outside():
    slots = WaitingNumbers()
    with torch.inference_mode():
        first = slots.keep(elsewhere(1.0))
    assert read([first, slots.keep(elsewhere(2.0))]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"a tensor of shape \(2,\) and torch.float32, not one real number"),
        (torch.tensor(1j), "torch.complex64, not one real number"),
        (torch.zeros((), device="meta"), "not one real number"),
        ("0.5", "is '0.5', not a number"),
        (None, "is None, not a number$"),
        (10**400, "is a number that is too large$"),
        ([1.0], "is list, not a number$"),
        (np.complex64(1), "is a number that no float can have$"),
        (Decimal("1e400"), "is a number that no float can have$"),
    ],
)
def test_what_is_not_a_number_is_an_error(value, message):
    with pytest.raises(TypeError, match=message):
        WaitingNumbers().keep(value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_value_on_a_gpu_waits_there():
    value = torch.tensor(0.1, device="cuda")
    kept = WaitingNumbers().keep(value)
    value.fill_(2.0)
    assert kept.is_cuda
    assert read([kept]) == [float(torch.tensor(0.1))]
