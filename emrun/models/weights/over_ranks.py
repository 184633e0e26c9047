"""The parameters and buffers of all ranks stay the same: parameters are compared, buffers are copied from rank 0."""

from __future__ import annotations

import zlib

from torch import uint8

from emrun.base.errors import DifferentRanks
from emrun.models.modes import Tensors
from emrun.ranks.group import Ranks


def check_alike(parameters: Tensors, ranks: Ranks) -> None:
    """Check that parameters have the same values on all ranks, bit for bit.

    Raises:
        DifferentRanks: one of them differs; the message names the first.
    """
    own = [zlib.crc32(each.detach().reshape(-1).cpu().view(uint8).numpy().data) for each in parameters.values()]
    for rank, found in enumerate(ranks.all_gathered("parameters", own)):
        if rank == 0:
            first = found
        for name, one, other in zip(parameters, first, found, strict=True):
            if one != other:
                raise DifferentRanks(
                    f"parameter {name!r} differs between rank 0 and rank {rank}: code that changes it, such as a hook, "
                    "has run on some ranks only, or differently; a hook that changes the model needs "
                    "`every_rank = True`"
                )


def copy_from_first(tensors: Tensors, ranks: Ranks) -> None:
    """Replace tensors by those of rank 0, such as the running statistics of BatchNorm, which each rank has its own."""
    for name in sorted(tensors):
        if tensors[name].numel():
            ranks.copy_from_first(tensors[name])
