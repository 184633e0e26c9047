"""On several ranks, losses that look at the whole batch are found with the first one: its halves have other losses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ArgumentError
from emrun.base.randomness import preserved_randomness
from emrun.base.types import Values
from emrun.models.modes import copied_buffers, in_mode, restore_buffers
from emrun.models.outputs import mean_loss
from emrun.models.precision import Precision
from emrun.models.step.micro_batches import MicroBatches
from emrun.ranks import gather
from emrun.ranks.parts import loss_weights, mean, rows_of

_LOG = logging.getLogger(__name__)
ROUNDED = {"bf16": 3e-2, "fp16": 3e-2, "tf32": 1e-2}
"""Precision -> a relative difference that is no more than rounding."""


def compare_halves(
    module: Module,
    forward: Callable[[Values], Values],
    inputs: Values,
    examples: int,
    *,
    precision: Precision,
    micro_batches: MicroBatches | None,
) -> bool:
    """Warn if the loss of a batch is not the mean of those of its halves; return whether forward gathers rows of ranks.

    The module runs three times in evaluation mode, on a rank without rows too, so that all ranks exchange the same
    messages.

    Args:
        module: the module, on several ranks.
        forward: returns the outputs of the module for a batch.
        inputs: source name -> tensor of the batch.
        examples: the number of its examples, at least 1.
        precision: the precision of the model, whose rounding does not count.
        micro_batches: runs the parts of a batch; None if a batch is run whole.

    Raises:
        ArgumentError: forward gathers rows of all ranks, which cannot be done with parts of batches.
    """
    # the losses of the batch and of its halves
    calls = gather.calls
    count = examples
    if micro_batches is not None:
        count = min(examples, max(2, micro_batches.size or 2))
    middle = count // 2
    losses: list[Tensor] = []
    weights: list[Any] = []
    with suppress(Exception), without_traces(module):  # the step itself raises what is wrong, with its inputs
        for begin, end in ((0, count), (0, middle or count), (middle, count)):
            outputs = forward({name: rows_of(values, begin, end) for name, values in inputs.items()})
            losses.append(mean_loss(outputs).float())
            given = loss_weights(outputs)
            weights.append(end - begin if given is None else given.sum())
    # what they tell
    gathers = gather.calls > calls
    if micro_batches is not None and gathers:
        raise ArgumentError("micro_batch_size", "cannot be used with emrun.all_gather: a rank has its own parts")
    if len(losses) < 3 or gathers:
        return gathers
    whole = losses[0].item()
    halves = float(mean(losses[1:], weights[1:]))
    if math.isfinite(whole) and not math.isclose(
        whole, halves, rel_tol=ROUNDED.get(str(precision), 1e-3), abs_tol=1e-6
    ):
        _LOG.warning(
            "several ranks: the loss looks at the whole batch: it is %.4g for %d examples, but %.4g as the mean of "
            "their halves. Each rank runs its part of a batch, so the updates are not those of whole batches; "
            "emrun.all_gather in forward makes them so",
            whole,
            count,
            halves,
        )
    return gathers


@contextmanager
def without_traces(module: Module) -> Iterator[None]:
    """A block in which a module runs in evaluation mode, without gradients; its buffers and random states come back."""
    before = copied_buffers(module)
    try:
        with in_mode(module, train=False), preserved_randomness(), torch.no_grad():
            yield
    finally:
        restore_buffers(module, before)
