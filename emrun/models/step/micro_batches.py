"""Micro batches: a train batch is run in several parts, whose gradients add up to those of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from emrun.base.encoding import random_state, set_random_state
from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Values
from emrun.base.wording import did_you_mean
from emrun.models.forward_pass import ForwardPass
from emrun.models.modes import copied_buffers, restore_buffers
from emrun.models.step.accumulated import AccumulatedStep
from emrun.models.step.size_search import ADVICE, free, is_out_of_memory
from emrun.ranks.parts import Joined, Weight, mean, split, weight_of
from emrun.ranks.shares import rows_in

_LOG = logging.getLogger(__name__)
_TRIED = 2  # windows: an optimizer makes its state in the first update, so the second window needs more memory


class MicroBatches:
    """Runs the step of a window once for each part of a batch.

    Args:
        step: the step, which gets each part.
        size: the largest number of examples of a part; `auto` to find it with the first batches.
        forward_pass: has the module, whose buffers a repeated batch must not change.
        note_size: called with a size that was found.

    Raises:
        ArgumentError: the size is neither a positive number nor `auto`.
    """

    def __init__(
        self,
        step: AccumulatedStep,
        size: int | Literal["auto"],
        forward_pass: ForwardPass,
        note_size: Callable[[int], None],
    ) -> None:
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ArgumentError(
                "micro_batch_size",
                f"{size!r} is neither a whole number of at least 1 nor auto{did_you_mean(str(size), ['auto'])}",
            )
        self._step = step
        self._forward_pass = forward_pass
        self._note_size = note_size
        self.size: int | None = None if size == "auto" else size
        """The largest number of examples of a part; None as long as it is not known."""
        self._left = 0 if size != "auto" else _TRIED  # the windows in which the size may still be halved
        self._has_warned = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run each batch whole in the block."""
        size = self.size
        self.size = None
        try:
            yield
        finally:
            self.size = size

    def run(self, inputs: Values, batch: Batch) -> Values:
        """Train on a batch, or on each of its parts.

        Args:
            inputs: source name -> tensor on the model's device, or a mapping of tensors.
            batch: the batch.

        Returns:
            The outputs of the batch, those of parts detached. The minimised loss of the step is that of the batch.

        Raises:
            ArgumentError: the size is `auto`, and not even one example fits into the memory.
            StreamError: the outputs of the parts cannot be joined.
        """
        if self._left and not self._step.is_open and rows_in(batch):
            self._left -= 1
            return self._run_halved(inputs, batch)
        return self._run(inputs, batch)

    def _run_halved(self, inputs: Values, batch: Batch) -> Values:
        """Run the first batch of a window; with half of the size, once more, as long as the memory is full.

        Each time, the random states and the buffers of the module are as before the batch.
        """
        step = self._step
        before = random_state()
        module = self._forward_pass.module
        device = self._forward_pass.device
        buffers = copied_buffers(module)
        known = self.size
        size = known or rows_in(batch)
        while True:
            self.size = size
            try:
                outputs = self._run(inputs, batch)
                break
            except Exception as error:
                if not is_out_of_memory(error) or step.updater.has_updated:
                    raise
                if size == 1:
                    where = "" if device.type == "cpu" else f" of {device}"
                    raise ArgumentError(
                        "micro_batch_size",
                        f"auto: not even one example fits into the memory{where} in a train step; {ADVICE}",
                    ) from error
            # after the error, whose traceback holds tensors
            size //= 2
            step.forget()
            free(device)
            set_random_state(before)
            restore_buffers(module, buffers)
        if size != known:
            _LOG.info("model.micro_batch_size: %d, found with a batch of %d examples", size, rows_in(batch))
            self._note_size(size)
        return outputs

    def _run(self, inputs: Values, batch: Batch) -> Values:
        """Train on a batch, or on each of its parts."""
        examples = rows_in(batch)
        step = self._step
        if self.size is None or examples <= self.size:
            return step.run(inputs, batch)
        if not self._has_warned:
            self._has_warned = True
            _warn_of_batch_norm(self._forward_pass.module)
        # the parts
        joined = Joined("micro_batch_size", "parts of batches")
        losses: list[Tensor] = []
        weights: list[Weight] = []
        step.begin_parts(joined)
        try:
            for part, count in split(inputs, examples, self.size):
                joined.counts.append(count)
                if sum(joined.counts) < examples:
                    step.expect_part()
                outputs = step.run(part, part)
                joined.add(outputs, weight_of(outputs, count))
                del outputs  # frees the graph, whose memory the next part needs
                loss = step.take_loss()
                if loss is not None:
                    losses.append(loss)
                    weights.append(step.weight)
        finally:
            step.end_parts()
        # the batch
        step.take_batch(mean(losses, weights) if losses else None, sum(weights))
        return joined.outputs()


def _warn_of_batch_norm(module: Module) -> None:
    name = next((name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training), None)
    if name is not None:
        _LOG.warning(
            "model.micro_batch_size: %s normalises each part of a batch by itself, so the gradients are not those of "
            "the whole batch; with GroupNorm or LayerNorm they are",
            f"{name or 'the module'} (BatchNorm)",
        )
