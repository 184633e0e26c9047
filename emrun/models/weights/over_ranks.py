"""The parameters and buffers of all ranks stay the same: parameters are compared, buffers are those of rank 0."""

from __future__ import annotations

import zlib

from torch import Tensor, uint8

from emrun.base.errors import DifferentRanks
from emrun.models.modes import Tensors
from emrun.ranks.group import Ranks


def check_equal_on_ranks(parameters: Tensors, ranks: Ranks) -> None:
    """Check that parameters have the same values on all ranks, bit for bit.

    Raises:
        DifferentRanks: one of them differs; the message names the first.
    """
    first, *others = ranks.all_gathered("parameters", [_checksum(parameter) for parameter in parameters.values()])
    for rank, of_rank in enumerate(others, 1):
        for name, of_first, of_other in zip(parameters, first, of_rank, strict=True):
            if of_first != of_other:
                raise DifferentRanks(
                    f"parameter {name!r} differs between rank 0 and rank {rank}: code that changes it, such as a hook, "
                    "has run on some ranks only, or differently; a hook that changes the model needs "
                    "`every_rank = True`"
                )


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).cpu().view(uint8).numpy().data)


def broadcast(tensors: Tensors, ranks: Ranks) -> None:
    """Replace tensors by those of rank 0, such as the running statistics of BatchNorm, which each rank has its own."""
    for name in sorted(tensors):
        if tensors[name].numel():
            ranks.copy_from_first(tensors[name])
