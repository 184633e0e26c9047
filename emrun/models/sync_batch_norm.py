"""`sync_batch_norm`: BatchNorm normalises with the statistics of the whole batch, on all ranks."""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from emrun.base.errors import ArgumentError
from emrun.ranks.gather import summed
from emrun.ranks.group import ranks

_LOG = logging.getLogger(__name__)
_KEY = "sync_batch_norm"
_COUNTS = "_rows_count"  # the attribute of a part that says whether this rank has rows of the batch


def batch_norms(module: Module) -> dict[str, _BatchNorm]:
    """Return name -> part, of the parts of a module that normalise with the rows of one rank only."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm)
    }


def warn_of_batch_norm(module: Module) -> None:
    """Warn of BatchNorm that is not synchronised."""
    for name in list(batch_norms(module))[:1]:
        _LOG.warning(
            "%s (BatchNorm) normalises the rows of each rank by themselves, and fails where a rank has a single row; "
            "with `model.sync_batch_norm: true`, it normalises the whole batch, as in one process",
            name or "the module",
        )


class SynchronisedBatchNorm:
    """Makes the BatchNorm layers of a module use the mean and the variance of a batch over all ranks.

    The ranks exchange the number of values, the mean and the variance of each channel, and combine them by the formula
    of Chan, Golub and LeVeque (1979). `torch.nn.SyncBatchNorm` does the same, but on GPUs only.

    Args:
        module: the module; its parts stay, with another `forward`.

    Raises:
        ArgumentError: the module has no BatchNorm, or one with a `forward` of its own.
    """

    def __init__(self, module: Module) -> None:
        found = batch_norms(module)
        if not found and not any(isinstance(part, SyncBatchNorm) for part in module.modules()):
            raise ArgumentError(_KEY, f"{type(module).__name__} has no BatchNorm; remove the key")
        for name, part in found.items():
            if "forward" in part.__dict__ or type(part).forward is not _BatchNorm.forward:
                raise ArgumentError(
                    _KEY,
                    f"{name or 'the module'} is a {type(part).__name__} with its own forward, "
                    "which cannot be synchronised",
                )
        self._parts = list(found.values()) if ranks().several else []
        for part in self._parts:
            # what is compiled ends before a message
            uncompiled: Any = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]
            part.forward = MethodType(uncompiled, part)  # type: ignore[method-assign]  # a deep copy binds its copy
        self._counts = True

    def begin(self, rows: int) -> None:
        """Prepare for a batch of which this rank has some rows, or none; then its row counts nothing."""
        if (rows > 0) is not self._counts:
            self._counts = rows > 0
            for part in self._parts:
                part.__dict__[_COUNTS] = self._counts


def _forward(self: _BatchNorm, input: Tensor) -> Tensor:
    """Normalise an input of shape (B, C, ...); in evaluation mode as BatchNorm itself."""
    forward = type(self).forward.__get__(self)
    if not self.training and self.running_mean is not None:
        return forward(input)  # type: ignore[no-any-return]
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    values = input if input.dtype == torch.float64 else input.float()
    dims = [0, *range(2, input.dim())]
    count = input.numel() // input.size(1) * self.__dict__.get(_COUNTS, True)
    variance, mean = torch.var_mean(values, dims, correction=0)
    own = torch.cat([mean, variance, mean.new_full((1,), count)])
    rows = [own if rank == ranks().rank else torch.zeros_like(own) for rank in range(ranks().size)]
    found = summed(torch.stack(rows))  # of shape (ranks, 2 C + 1)
    means = found[:, : len(mean)]
    variances = found[:, len(mean) : -1]
    counts = found[:, -1:]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    if self.training and self.running_mean is not None:
        _follow(self, mean.detach(), variance.detach() * (total / (total - 1).clamp(min=1)))
    shape = [1, -1, *[1] * (input.dim() - 2)]
    scale = torch.rsqrt(variance + self.eps)
    if self.weight is not None:
        scale = scale * self.weight
    result: Tensor = (values - mean.view(shape)) * scale.view(shape)
    if self.bias is not None:
        result = result + self.bias.view(shape)
    return result.to(input.dtype)


@torch.no_grad()
def _follow(part: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as BatchNorm does, with the unbiased variance."""
    assert part.running_mean is not None
    assert part.running_var is not None
    factor: Any = part.momentum
    if part.num_batches_tracked is not None:
        part.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / part.num_batches_tracked
    for running, new in ((part.running_mean, mean), (part.running_var, variance)):
        running.copy_(running * (1 - factor) + new.to(running.dtype) * factor)
