"""The sums of gradients over all ranks, which are sent while the rest of the gradients is still being calculated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from emrun.base.errors import ArgumentError, StreamError
from emrun.models.step.gradients import gradient_of, set_gradients
from emrun.ranks.group import Ranks, answered, end_sums
from emrun.ranks.parts import Weight, weighted

_MOST = 25 * 2**20  # bytes of a bucket, as in DistributedDataParallel
_LEAST = 2**20  # a smaller message takes as long
_PARTS = 4  # buckets of a small model
EXTRA = 3
"""Numbers before the flags of gradients: the weight, the loss times the weight, the number of rows."""
EMPTY = "the batch is empty on all ranks (see main_loop.on_empty_batch)"
_is_trained = attrgetter("requires_grad")
_PRECISE = (torch.float32, torch.float64)  # the dtypes in which a weight is exact


class _Bucket:
    """Gradients that are sent together.

    Args:
        members: their parameters, of the same device and dtype.
        extra: the number of further elements, at the end.
        ranks: the ranks.
    """

    def __init__(self, members: Sequence[Parameter], extra: int, ranks: Ranks) -> None:
        self.members = members
        self.waiting: set[object] = set(members)
        """The parameters whose gradients the backward pass has not calculated yet."""
        sizes = [each.numel() for each in members]
        kind = members[0] if members else torch.empty(0, dtype=torch.float64)
        flat = torch.zeros(sum(sizes) + extra, device=kind.device, dtype=kind.dtype)
        self.sums = flat[: sum(sizes)]
        self.extra = flat[sum(sizes) :]
        self.views = [_like(*each) for each in zip(torch.split(self.sums, sizes), members, strict=True)]
        """For each gradient its part of the bucket, of the same shape."""
        self.begin = ranks.summing(flat)
        """Begins to add up the bucket over all ranks; returns what waits for the sums."""


def _copied(grads: list[Tensor | None], views: list[Tensor]) -> Tensor:
    """Copy gradients, of which some may be missing, to their parts of buckets; return whether each one is there.

    Raises:
        ArgumentError: a gradient is sparse.
    """
    if any(each is not None and each.layout is not torch.strided for each in grads):
        raise ArgumentError("optimizer", "a gradient is sparse, which several ranks do not support; set sparse=False")
    for grad, view in zip(grads, views, strict=True):
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
    return torch.tensor([each is not None for each in grads])


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor with the shape and, unless elements share memory, the strides of a parameter in a flat one."""
    like = torch.empty_like(parameter, device="meta")
    return part.as_strided(like.size(), like.stride())


class GradientSums:
    """Replaces the gradients of parameters by their sums over all ranks; all ranks do this alike.

    The parameters are laid out in buckets from the last one to the first, as their gradients arrive. The buckets are
    sent in this order, each as soon as it is complete, so that the sums do not depend on the time. The last bucket also
    carries the weight, the loss, the number of rows, and a flag for each gradient: a step needs no other message unless
    all parameters have a dtype of less precision than float32. A parameter without a gradient on any rank stays
    without: an optimizer leaves it out, as in one process.

    This is the algorithm of Li et al., "PyTorch Distributed" (2020), without its conditions on how often and on how
    many rows a module is called.

    Args:
        parameters: the parameters of an optimizer, the same ones on each rank.
        ranks: the ranks.
    """

    def __init__(self, parameters: Sequence[Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._layout: _Layout | None = None
        self._sent: list[Any] = []  # works of torch: of the buckets that are sent already, in their order
        self._listens = False
        self._sends = False  # whether buckets are sent during a backward pass
        self._has_looked = False

    @property
    def is_parted(self) -> bool:
        """Whether some gradients can be sent while others are calculated."""
        return len(self._laid_out().buckets) > 1

    def begin_backward(self) -> None:
        """Prepare for a backward pass after which `reduce` is called, before another one.

        The first such pass shows whether each gradient arrives once. A checkpoint with `use_reentrant` may calculate
        that of a shared parameter in several parts; then this rank sends at the end.
        """
        for bucket in self._laid_out().buckets:
            bucket.waiting.update(bucket.members)
        self._listens = True

    def reduce(self, weight: Weight, loss: Tensor | None = None) -> Tensor | None:
        """Replace the gradients by their sums over all ranks, divided by the sum of the weights unless this is 0.

        Args:
            weight: the weight of the examples of this rank in the window; the number 0 if it has none.
            loss: the mean loss of these examples, of shape (); None if it is not wanted.

        Returns:
            The mean of the losses of all ranks, of shape (); None if it is not wanted.

        Raises:
            ArgumentError: a gradient is sparse.
            StreamError: no rank has an example.
        """
        # where the gradients go
        layout = self._layout
        sent = self._sent
        if layout is None or layout.may_change:
            layout = self._laid_out()
        views = layout.views
        extra = layout.extra
        begins = layout.begins
        grads = [*map(gradient_of, layout.trained)]
        filled = views
        # those that the backward pass has not sent
        if self._listens:
            self._listens = False
            self._sends = self._sends or not self._has_looked
            self._has_looked = True
            self._sent = []
            first = sum(len(each.members) for each in layout.buckets[: len(sent)])
            grads = grads[first:]
            filled = views[first:]
            begins = begins[len(sent) :]
        try:
            torch._foreach_copy_(filled, grads)
            are_there: Any = 1.0
        except (RuntimeError, TypeError):  # one is missing, or sparse
            if self._laid_out() is not layout:  # a hook has frozen some
                return self.reduce(weight, loss)
            are_there = torch.cat([torch.ones(len(views) - len(filled)), _copied(grads, filled)])
        # the numbers beside them
        is_number = weight.__class__ is float and weight > 0
        extra[0] = weight
        extra[1] = 0.0 if loss is None else loss * weight if is_number else weighted(loss, weight)
        extra[2] = is_number or weight.__class__ is Tensor
        extra[EXTRA:] = are_there
        # the sums, divided
        end_sums(begins, sent)
        total = divisor = extra[0]
        if not is_number:
            if weight.__class__ is float and not extra[2]:  # this waits for the device, on ranks without rows
                raise StreamError(EMPTY)
            divisor = total.where(total != 0, 1)  # of gradients that are 0, it is 1
        torch._foreach_div_(layout.sums, divisor)
        if are_there.__class__ is Tensor:  # another rank may have a gradient where this one has none
            given = zip((extra[EXTRA:] > 0).tolist(), views, strict=True)
            set_gradients(layout.trained, [view if is_given else None for is_given, view in given])
        else:
            set_gradients(layout.trained, views)
        return None if loss is None else extra[1] / total

    def _laid_out(self) -> _Layout:
        """Return the layout for the parameters that are trained now: a hook may freeze some, or thaw them."""
        are_trained = list(map(_is_trained, self._parameters))
        layout = self._layout
        if layout is None or layout.are_trained != are_trained:
            if layout is not None:
                for handle in layout.handles:
                    handle.remove()
            layout = self._layout = _Layout(self._parameters, are_trained, self._ranks, self._take)
        return layout

    def _take(self, bucket: _Bucket, parameter: Parameter) -> None:
        """Note that the gradient of a parameter is calculated; send what is complete, but not the last bucket."""
        if self._listens and parameter in bucket.waiting and self._layout is not None:
            bucket.waiting.remove(parameter)
            while self._sends and not (following := self._layout.buckets[len(self._sent)]).waiting:
                _copied(list(map(gradient_of, following.members)), following.views)
                with answered(()):
                    self._sent.append(following.begin())
        elif self._listens:
            self._take_again(bucket)

    def _take_again(self, bucket: _Bucket) -> None:
        """Stop sending during the backward pass: a gradient is calculated in several parts."""
        self._has_looked = True
        if self._sends and self._layout is not None and bucket in self._layout.buckets[: len(self._sent)]:
            raise ArgumentError(
                "module",
                "a gradient was calculated in several parts, after its first part was sent to the other ranks; "
                "call torch.utils.checkpoint with use_reentrant=False",
            )
        self._sends = False


class _Layout:
    """The buckets of the parameters that are trained.

    Args:
        parameters: all parameters.
        are_trained: which of them are.
        ranks: the ranks.
        take: called with the bucket and the parameter when a gradient is calculated, but for the last bucket, which is
            sent after the backward pass in any case.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        are_trained: list[bool],
        ranks: Ranks,
        take: Callable[[_Bucket, Parameter], None],
    ) -> None:
        self.are_trained = are_trained
        self.may_change = not all(are_trained)
        # the groups of parameters, from the last one to the first
        trained = list(compress(parameters, are_trained))
        limit = min(_MOST, max(_LEAST, sum(each.nbytes for each in trained) // _PARTS))
        groups: list[list[Parameter]] = []
        open_groups: dict[tuple[torch.device, torch.dtype], list[Parameter]] = {}
        for each in reversed(trained):
            kind = each.device, each.dtype
            group = open_groups.get(kind)
            if group is None:
                group = open_groups[kind] = []
                groups.append(group)
            group.append(each)
            if sum(each.nbytes for each in group) >= limit:
                del open_groups[kind]
        last = next((each for each in reversed(groups) if each[0].dtype in _PRECISE), [])
        groups = [*(each for each in groups if each is not last), last]  # of its own if no dtype is precise
        # their buckets
        self.buckets = [_Bucket(each, (EXTRA + len(trained)) * (each is last), ranks) for each in groups]
        self.buckets[-1].waiting.add(None)
        self.trained = [each for group in groups for each in group]
        self.views = [view for bucket in self.buckets for view in bucket.views]
        """The places of their gradients."""
        self.sums = [each.sums for each in self.buckets]
        self.begins = [each.begin for each in self.buckets]
        self.extra = self.buckets[-1].extra
        """The weight, the loss, the flag for rows, and a flag for each gradient."""
        self.handles = [
            each.register_post_accumulate_grad_hook(partial(take, bucket))  # type: ignore[no-untyped-call]
            for bucket in self.buckets[:-1]
            for each in bucket.members
        ]
