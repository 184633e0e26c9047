"""The tensors of all ranks: the gradients of an update are added up, buffers are copied from rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from emrun.errors import ArgumentError, DifferentRanks
from emrun.ranks import Ranks

_EXTRA = 2  # numbers before the flags: the weight, the loss times the weight
_PRECISE = (torch.float32, torch.float64)  # the dtypes in which a weight is exact


def add_up_gradients(
    parameters: Sequence[torch.nn.Parameter], weight: float | Tensor, loss: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Replace the gradients of parameters by the sums over all ranks; all ranks call this alike.

    One reduction for each device and dtype carries the gradients, a flag for each of them, the weight and the loss, so
    that a step needs no other unless all parameters have a dtype of less precision than float32. A parameter without a
    gradient on any rank stays without: an optimizer leaves it out, as in one process.

    Args:
        parameters: the parameters of an optimizer, the same ones on each rank.
        weight: the weight of the examples of this rank in the window.
        loss: the mean loss of these examples, of shape (); None if it is not wanted.
        ranks: the ranks.

    Returns:
        The sum of the weights of all ranks, and the mean of their losses, both of shape ().

    Raises:
        ArgumentError: a gradient is sparse.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
    for each in parameters:
        if each.requires_grad:
            kinds.setdefault((each.device, each.dtype), []).append(each)
    sums: Tensor | None = None
    for (device, dtype), members in kinds.items():
        if any(each.grad is not None and each.grad.layout is not torch.strided for each in members):
            raise ArgumentError(
                "optimizer", "a gradient is sparse, which several ranks do not support; set sparse=False"
            )
        count = len(members)
        flat = torch.zeros(sum(each.numel() for each in members) + count + _EXTRA, device=device, dtype=dtype)
        views = torch.split(flat[count + _EXTRA :], [each.numel() for each in members])
        own = [(view.view_as(each), each.grad) for view, each in zip(views, members, strict=True)]
        given = [(view, grad) for view, grad in own if grad is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [grad for _, grad in given])
        flat[0] = weight
        if loss is not None:
            flat[1] = loss.detach() * weight
        flat[_EXTRA : count + _EXTRA] = torch.tensor([grad is not None for _, grad in own], dtype=dtype)
        ranks.add_up(flat)
        if sums is None and dtype in _PRECISE:
            sums = flat[:_EXTRA]
        if given:
            torch._foreach_copy_([grad for _, grad in given], [view for view, _ in given])
        if len(given) < count:  # another rank may have a gradient where this one has none
            has_gradient = (flat[_EXTRA : count + _EXTRA] > 0).tolist()
            for each, (view, grad), is_given in zip(members, own, has_gradient, strict=True):
                if grad is None and is_given:
                    each.grad = view.clone()
    if sums is None:
        sums = torch.stack(
            [torch.as_tensor(each, dtype=torch.float64).cpu() for each in (weight, (loss or 0) * weight)]
        )
        ranks.add_up(sums)
    return sums[0], sums[1] / sums[0]


def check_alike(parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Check that parameters have the same values on all ranks, bit for bit.

    Raises:
        DifferentRanks: one of them differs; the message names the first.
    """
    own = [zlib.crc32(each.detach().reshape(-1).cpu().view(torch.uint8).numpy().data) for each in parameters.values()]
    for rank, found in enumerate(ranks.all_gathered(own)):
        if rank == 0:
            first = found
        for name, one, other in zip(parameters, first, found, strict=True):
            if one != other:
                raise DifferentRanks(
                    f"parameter {name!r} differs between rank 0 and rank {rank}: code that changes it, such as a hook, "
                    "has run on some ranks only, or differently; a hook that changes the model needs "
                    "`every_rank = True`"
                )


def copy_from_first(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Replace tensors by those of rank 0, such as the running statistics of BatchNorm, which each rank has its own."""
    for name in sorted(tensors):
        if tensors[name].numel():
            ranks.copy_from_first(tensors[name])
