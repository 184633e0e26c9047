"""Whether a loss is finite, and what is said of one that is not."""

from __future__ import annotations

import math
from typing import Any


def as_number(loss: Any) -> float:
    """Return a loss as a number, which waits for its device; 0 for what is none, such as None or a complex loss."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return 0.0


def is_finite(loss: Any) -> bool:
    """Return whether a loss is finite, or none."""
    return math.isfinite(as_number(loss))


def kind_of(number: float) -> str:
    """Return `NaN` or `infinite`."""
    return "NaN" if math.isnan(number) else "infinite"


def not_finite(loss: float, iteration: int) -> str:
    """Return the beginning of the message about the loss of an iteration, counted from 1."""
    return f"the loss is {kind_of(loss)} at iteration {iteration} (main_loop.on_nan_loss)"
