"""The gradients of all ranks are summed, while the rest of them is still being calculated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError, StreamError
from emrun.base.types import Batch
from emrun.models.laziness import in_evaluation_mode
from emrun.models.optimizer import parameters_of
from emrun.models.step.gradients import gradient_of, set_gradients
from emrun.models.step.plain import Closure, Parameters, TrainStep, backward, refuse_closure
from emrun.models.step.windows import Windows
from emrun.ranks.gather import prepare as prepare_to_gather
from emrun.ranks.group import Ranks
from emrun.ranks.parts import weighted

_MOST = 25 * 2**20  # bytes of a bucket, as in DistributedDataParallel
_LEAST = 2**20  # a smaller message takes as long
_PARTS = 4  # buckets of a small model
EXTRA = 3
"""Numbers before the flags of gradients: the weight, the loss times the weight, the number of rows."""
_STRIDED = {torch.strided}
_layout_of, _is_trained = map(attrgetter, ("layout", "requires_grad"))
_PRECISE = (torch.float32, torch.float64)  # the dtypes in which a weight is exact


class SummedWindows(Windows):
    """Sums the gradients of a window over all ranks, and divides them by the weight of the window on all ranks.

    Args:
        ranks: the ranks.
        carries_loss: whether the sums of an update also have the loss: if a window has one part.
        sends: whether the gradients of the only optimizer may be sent while others are calculated: several optimizers,
            and a subclass that trains in its own way, could send in another order on each rank.
        exchanges: whether forward and backward exchange messages, so that a rank without rows runs both, too.
    """

    def __init__(
        self, *arguments: Any, accumulate: int, ranks: Ranks, carries_loss: bool, sends: bool, exchanges: bool
    ) -> None:
        super().__init__(*arguments, accumulate=accumulate)
        self._ranks, self._carries_loss, self._sends, self.exchanges = ranks, carries_loss, sends, exchanges
        self._here = 0  # the rows of this rank in the current batch
        self._examples = self._rows = 0  # of the current part, and of the window so far
        self._sums: dict[torch.optim.Optimizer, GradientSums] = {}
        self._only: torch.optim.Optimizer | None = None  # whose gradients are sent during the backward pass
        self._mean_loss: Tensor | None = None  # of the last update, if the sums have it

    def list_optimizers(self) -> None:
        """Note which optimizers there are."""
        super().list_optimizers()
        self._only = self._model.optimizer if self._sends else None

    def prepare(self, batch: Batch, *_: object) -> None:
        """Count the rows of this rank in a batch, before the model runs on it, to train or to evaluate."""
        self._here = prepare_to_gather(batch)

    def run(self, train_step: TrainStep, inputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Any]:
        """Run the train step on the rows of this rank."""
        rows, module = self._here, self._model.module
        if rows or self.exchanges or not module.training:
            return self.run_part(train_step, inputs, rows)
        with in_evaluation_mode(module):  # no statistics of a row that counts nothing
            return self.run_part(train_step, inputs, 0)

    def run_part(
        self, train_step: TrainStep, inputs: Mapping[str, Tensor], examples: int, *, is_last: bool = True
    ) -> Mapping[str, Any]:
        """Run the train step on a part of a window; see `Windows`."""
        self._examples = examples
        self._rows = self._rows + examples if self.is_open else examples
        return super().run_part(train_step, inputs, examples, is_last=is_last)

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted loss; those of the last part are sent as they arrive."""
        if self._examples or self.exchanges:
            if self.is_ending and self._only is not None:
                self._sums_of(self._only).begin_backward()
            backward(loss * self.weight, of)

    def update(self, optimizer: Any, closure: Closure | None = None, reason: str | None = None) -> None:
        """Note that the window makes an update at its end; see `Windows`."""
        refuse_closure(closure, "optimizer", "several ranks")
        super().update(optimizer)

    def complete(self, optimizer: torch.optim.Optimizer, weight: float | Tensor) -> bool:
        """Make the gradients those of the mean loss of the window on all ranks."""
        loss = self._model._minimised if self._carries_loss else None
        mean = self._sums_of(optimizer).reduce(weight, loss, self._rows)
        self._mean_loss = mean if loss is not None else None
        return True

    def take_mean(self, *_: Any) -> None:
        """Give the model the mean loss of the current batch on all ranks; all ranks call this."""
        loss, mean, self._mean_loss = self._model._minimised, self._mean_loss, None
        if mean is None and loss is not None:
            weight = torch.as_tensor(self.weight).to(loss)
            sums = torch.stack([weighted(loss, weight), weight])
            self._ranks.add_up(sums)
            mean = sums[0] / sums[1]
        self._model._minimised = mean

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> GradientSums:
        """Return the sums of the gradients of an optimizer over all ranks."""
        sums = self._sums.get(optimizer)
        if sums is None:
            sums = self._sums[optimizer] = GradientSums(parameters_of(optimizer), self._ranks)
        return sums


class _Bucket:
    """Gradients that are sent together.

    Args:
        members: their parameters, of the same device and dtype.
        extra: the number of further elements, at the end.
    """

    def __init__(self, members: Sequence[torch.nn.Parameter], extra: int = 0) -> None:
        self.members = members
        self.waiting = set(members)
        """The parameters whose gradients the backward pass has not calculated yet."""
        count = sum(each.numel() for each in members)
        self._flat = torch.zeros(count + extra, device=members[0].device, dtype=members[0].dtype)
        self.sums, self.extra = self._flat[:count], self._flat[count:]
        self.views = [
            _like(part, each)
            for part, each in zip(
                torch.split(self._flat[:count], [each.numel() for each in members]), members, strict=True
            )
        ]
        """For each gradient its part of the bucket, of the same shape."""
        self.receive: Callable[[], None] = lambda: None
        """Waits for the sums."""

    def send(self, ranks: Ranks) -> None:
        """Begin to add up the gradients, of which some may be missing."""
        grads = list(map(gradient_of, self.members))
        is_complete = NoneType not in set(map(type, grads))
        if is_complete and set(map(_layout_of, grads)) == _STRIDED:  # the usual case
            torch._foreach_copy_(self.views, grads)
            self.receive = ranks.begin_sum(self._flat)
            return
        if any(each is not None and each.layout is not torch.strided for each in grads):
            message = "a gradient is sparse, which several ranks do not support; set sparse=False"
            raise ArgumentError("optimizer", message)
        given = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [grad for _, grad in given])
        if len(given) < len(grads):
            torch._foreach_zero_([view for view, grad in zip(self.views, grads, strict=True) if grad is None])
        self.receive = ranks.begin_sum(self._flat)


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

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._trained: list[torch.nn.Parameter] = []  # in the order of the buckets
        self._views: Sequence[Tensor | None] = []  # their parts of the buckets
        self._are_trained: list[bool] = []  # of all parameters, at that time
        self._buckets: list[_Bucket] = []
        self._extra: Tensor | None = None  # the weight, the loss and the flags, in the last bucket; None without it
        self._next = 0  # the bucket to send
        self._listens = False
        self._sends = False  # whether buckets are sent during a backward pass
        self._has_looked = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin_backward(self) -> None:
        """Prepare for a backward pass after which `reduce` is called, before another one.

        The first such pass shows whether each gradient arrives once. A checkpoint with `use_reentrant` may calculate
        that of a shared parameter in several parts; then this rank sends at the end.
        """
        self._lay_out()
        for bucket in self._buckets[:-1]:
            bucket.waiting.update(bucket.members)
        self._listens = True

    def reduce(self, weight: float | Tensor, loss: Tensor | None = None, rows: int = 1) -> Tensor:
        """Replace the gradients by their sums over all ranks, divided by the sum of the weights unless this is 0.

        Args:
            weight: the weight of the examples of this rank in the window.
            loss: the mean loss of these examples, of shape (); None if it is not wanted.
            rows: the number of these examples.

        Returns:
            The mean of the losses of all ranks, of shape ().

        Raises:
            ArgumentError: a gradient is sparse.
            StreamError: no rank has an example.
        """
        if not self._listens:
            self._lay_out()
        elif not self._has_looked:
            self._has_looked = self._sends = True
        self._listens = False
        extra, grads = self._extra, list(map(gradient_of, self._trained))
        if extra is None:
            extra = torch.zeros(EXTRA + len(grads), dtype=torch.float64)
        extra[0] = weight
        extra[1] = 0.0 if loss is None else weighted(loss, weight)
        extra[2] = rows
        is_complete = NoneType not in set(map(type, grads))
        extra[EXTRA:] = 1.0 if is_complete else torch.tensor([each is not None for each in grads])
        for bucket in self._buckets[self._next :]:
            bucket.send(self._ranks)
        if self._extra is None:
            self._ranks.add_up(extra)
        for bucket in self._buckets:
            bucket.receive()
        self._next = 0
        if not rows and not extra[2]:  # this waits for the device, on ranks without rows
            raise StreamError("the batch is empty on all ranks (see main_loop.on_empty_batch)")
        sums = self._views
        if not is_complete:  # another rank may have a gradient where this one has none
            are_given = (extra[EXTRA:] > 0).tolist()
            sums = [each if is_given else None for each, is_given in zip(sums, are_given, strict=True)]
        set_gradients(self._trained, sums)
        total = extra[0].clone()
        divisor = total.where(total != 0, 1)  # of gradients that are 0, it is 1
        for bucket in self._buckets:
            bucket.sums.div_(divisor)
        return extra[1] / total

    def _lay_out(self) -> None:
        """Lay out the buckets for the parameters that are trained now: a hook may freeze some, or thaw them."""
        are_trained = list(map(_is_trained, self._parameters))
        if are_trained == self._are_trained:
            return
        self._are_trained = are_trained
        trained = list(compress(self._parameters, are_trained))
        for handle in self._handles:
            handle.remove()
        size = sum(each.numel() * each.element_size() for each in trained)
        limit = min(_MOST, max(_LEAST, size // _PARTS))
        groups: list[list[torch.nn.Parameter]] = []
        open_groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for each in reversed(trained):
            kind = each.device, each.dtype
            group = open_groups.get(kind)
            if group is None:
                group = open_groups[kind] = []
                groups.append(group)
            group.append(each)
            if sum(each.numel() * each.element_size() for each in group) >= limit:
                del open_groups[kind]
        last = next((each for each in reversed(groups) if each[0].dtype in _PRECISE), None)
        if last is not None:
            groups = [*(each for each in groups if each is not last), last]
        self._buckets = [_Bucket(each, (EXTRA + len(trained)) * (each is last)) for each in groups]
        self._trained = [each for group in groups for each in group]
        self._views = [view for bucket in self._buckets for view in bucket.views]
        self._extra = self._buckets[-1].extra if last is not None else None
        self._handles = [
            each.register_post_accumulate_grad_hook(partial(self._take, bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets[:-1]  # the last one is sent after the backward pass in any case
            for each in bucket.members
        ]

    def _take(self, bucket: _Bucket, parameter: torch.nn.Parameter) -> None:
        """Note that the gradient of a parameter is calculated; send what is complete, but not the last bucket."""
        if self._listens and parameter in bucket.waiting:
            bucket.waiting.remove(parameter)
            while self._sends and self._next < len(self._buckets) - 1 and not self._buckets[self._next].waiting:
                self._buckets[self._next].send(self._ranks)
                self._next += 1
        elif self._listens:
            self._take_again(bucket)

    def _take_again(self, bucket: _Bucket) -> None:
        """Stop sending during the backward pass: a gradient is calculated in several parts."""
        self._has_looked = True
        if self._sends and bucket in self._buckets[: self._next]:
            raise ArgumentError(
                "module",
                "a gradient was calculated in several parts, after its first part was sent to the other ranks; "
                "call torch.utils.checkpoint with use_reentrant=False",
            )
        self._sends = False
