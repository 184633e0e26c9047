"""Whether a loss is finite."""

import pytest
import torch

from emrun.base.finite import as_number, is_finite, not_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [float, torch.tensor, lambda value: torch.tensor([value], dtype=torch.bfloat16)])
def test_nan_and_infinity_are_not_finite(kind, value):
    assert not is_finite(kind(value))


@pytest.mark.parametrize("loss", [None, 0.5, torch.tensor(0.5), torch.tensor(1j), torch.ones(2)])
def test_a_finite_loss_and_what_is_no_loss_pass(loss):
    assert is_finite(loss)


def test_the_message_says_which_kind_and_at_which_iteration():
    assert (
        not_finite(as_number(torch.tensor(float("nan"))), 7) == "the loss is NaN at iteration 7 (main_loop.on_nan_loss)"
    )
    assert not_finite(-float("inf"), 1).startswith("the loss is infinite at iteration 1")
