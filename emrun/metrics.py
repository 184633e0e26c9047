"""Per-example functions for the `metrics` form of `TorchModel`."""

from __future__ import annotations

import torch


def accuracy(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for each example whose largest logit is that of its label, else 0.0.

    Args:
        logits: floating point of shape (B, classes, ...).
        label: int64 class indices of shape (B, ...).

    Returns:
        A tensor of shape (B, ...), in the dtype of `logits`.
    """
    return (logits.argmax(dim=1) == label).to(logits.dtype)


def errors(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for each example whose largest logit is not that of its label, else 0.0; see `accuracy`."""
    return (logits.argmax(dim=1) != label).to(logits.dtype)


def top_k(logits: torch.Tensor, label: torch.Tensor, k: int = 5) -> torch.Tensor:
    """Return 1.0 for each example whose label is among its `k` largest logits, else 0.0; see `accuracy`.

    Args:
        logits: floating point of shape (B, classes, ...).
        label: int64 class indices of shape (B, ...).
        k: how many of the largest logits count; all logits if there are fewer than `k` classes.
    """
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == label.unsqueeze(1)).any(dim=1).to(logits.dtype)
