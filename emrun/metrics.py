"""Per-example functions for the `metrics` form of `TorchModel`."""

from __future__ import annotations

import torch


def accuracy(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for each example whose largest logit is that of its label, else 0.0.

    A label outside the classes counts as wrong, even -100, which losses ignore. For padding, use
    `ClassificationMetrics` with `mask_name`.

    Args:
        logits: floating point of shape (B, classes, ...), of at least two classes.
        label: int64 class indices of shape (B, ...).

    Returns:
        A tensor of shape (B, ...), in the dtype of `logits`.

    Raises:
        ValueError: the shapes are others, which torch would broadcast.
    """
    _check(logits, label)
    return (logits.argmax(dim=1) == label).to(logits.dtype)


def errors(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for each example whose largest logit is not that of its label, else 0.0; see `accuracy`."""
    return 1 - accuracy(logits, label)


def top_k(logits: torch.Tensor, label: torch.Tensor, k: int = 5) -> torch.Tensor:
    """Return 1.0 for each example whose label is among its `k` largest logits, else 0.0; see `accuracy`.

    Args:
        logits: floating point of shape (B, classes, ...).
        label: int64 class indices of shape (B, ...).
        k: how many of the largest logits count; all logits if there are fewer than `k` classes.
    """
    _check(logits, label)
    if k < 1:
        raise ValueError(f"k is {k}; at least the largest logit must count")
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == label.unsqueeze(1)).any(dim=1).to(logits.dtype)


def _check(logits: torch.Tensor, label: torch.Tensor) -> None:
    if logits.dim() < 2 or logits.shape[1] < 2 or label.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(label.shape)}: axis 1 must have "
            "a logit for each of at least two classes, and the labels all other axes; for one logit of two classes, "
            "write a metric that compares it with 0"
        )
