"""Losses for `model.loss` that torch does not have."""

from __future__ import annotations

import torch
from torch.nn import functional

IGNORED = -100
"""The label of a token that is not trained."""


def next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the tokens of each example, each of which the logits before it tell.

        loss: {import: emrun.losses.next_token, inputs: [logits, labels]}

    The examples are weighted by `trained_tokens`: they are the output `example_weight`. So the loss of an update, and
    the statistics of an epoch, are means over tokens, over all batches of a window, parts of a batch and ranks.

    Args:
        logits: floating point of shape (B, T, tokens); those of 16 bits become float32.
        labels: int64 of shape (B, T), the tokens themselves, not shifted; -100 where a token is not trained.

    Returns:
        A tensor of shape (B,); 0 for an example without a trained token.

    Raises:
        ValueError: the shapes do not fit.
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}: there must be "
            "logits of shape (B, T, tokens) and labels of shape (B, T)"
        )
    following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    exact = logits.float() if logits.itemsize < 4 else logits
    losses = functional.cross_entropy(exact.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(following).sum(dim=1) / trained_tokens(labels).clamp(min=1)


def trained_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of trained tokens of each example: those after the first that are not -100.

    Args:
        labels: int64 of shape (B, T).

    Returns:
        A float32 tensor of shape (B,).
    """
    return (labels[:, 1:] != IGNORED).sum(dim=1).float()


EXAMPLE_WEIGHTS = {next_token: trained_tokens}
"""Loss -> a function that returns the weights of the examples for its second input."""
