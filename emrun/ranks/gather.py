"""Tensors of all ranks in forward: their sum, and their rows one after the other, both with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.base.sources import examples_of
from emrun.base.types import Batch
from emrun.ranks.group import ranks
from emrun.ranks.shares import Share

_rows = 1  # of the current batch on this rank
calls = 0
"""How often `all_gather` was called in this process."""


def prepare(batch: Batch) -> int:
    """Prepare for a batch; return the number of its rows on this rank. If it has none, `all_gather` gathers none."""
    global _rows  # noqa: PLW0603 - a process is one rank
    rows = 0 if batch.__class__ is Share and not batch.counts else examples_of(batch)
    _rows = rows
    return rows


def all_gather(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks, with gradients; all ranks call this in `forward`.

        features = emrun.all_gather(self.encoder(image))

    A loss that compares the examples of a batch is then that of the whole batch, if each rank calculates it for all
    rows. Gradients reach the rows of every rank. A rank without rows of the batch adds none. In one process, and while
    no ranks train, the result is the tensor itself.

    Args:
        tensor: of shape (B, ...); B may differ between the ranks, the other sizes and the dtype may not.

    Returns:
        A tensor of shape (sum of B, ...).

    Raises:
        ArgumentError: the tensor has no rows, or another shape or dtype than that of another rank.
    """
    global calls  # noqa: PLW0603 - a process is one rank
    calls += 1
    if not isinstance(tensor, Tensor) or not tensor.dim():
        shown = "a tensor of shape ()" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ArgumentError("all_gather", f"{shown} has no rows; give it a tensor of shape (B, ...)")
    members = ranks()
    if not members.several:
        return tensor
    rows_here = tensor if _rows else tensor[:0]
    shapes = members.all_gathered(
        "shape of the rows", (len(rows_here), tuple(rows_here.shape[1:]), str(rows_here.dtype))
    )
    for rank, (_, *kind) in enumerate(shapes):
        if kind != [*shapes[0][1:]]:
            kinds = [f"(B, {', '.join(map(str, shape))}) {dtype}" for _, shape, dtype in (shapes[0], shapes[rank])]
            message = f"the rows of rank {rank} are {kinds[1]}, those of rank 0 {kinds[0]}; pad them to the same sizes"
            raise ArgumentError("all_gather", message)
    counts = [count for count, *_ in shapes]
    before = sum(counts[: members.rank])
    after = sum(counts[members.rank + 1 :])
    values = rows_here.to(torch.uint8) if rows_here.dtype == torch.bool else rows_here
    rows = [values.new_zeros(count, *rows_here.shape[1:]) for count in (before, after)]
    return summed(torch.cat([rows[0], values, rows[1]])).to(rows_here.dtype)


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; its gradient is the sum of their gradients."""
    return _Sum.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        ranks().add_up(total)
        return total

    backward = forward
