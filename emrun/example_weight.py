"""The output `example_weight`: how much examples count in means; those of weight 0 do not, even if they have NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def weighted(values: Any, weights: float | Tensor) -> Any:
    """Return values times their weights; 0 where the weight is 0, for NaN too, and so are the gradients.

    Args:
        values: a number or a tensor, such as a loss, which is NaN as the mean over no examples.
        weights: a number, or a tensor whose shape fits the values.
    """
    if isinstance(weights, Tensor):
        return torch.where(weights != 0, values * weights, 0.0)
    return values * weights if weights else 0.0


def weighs_nothing(outputs: Mapping[str, Any]) -> bool:
    """Return whether the examples of a batch all have the weight 0, so that its means are NaN; waits for the device."""
    weights = outputs.get("example_weight")
    return isinstance(weights, Tensor | np.ndarray) and not weights.any()
