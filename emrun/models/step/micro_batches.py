"""Micro batches: a train batch is run in several parts, whose gradients add up to those of the whole batch."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from emrun.base.encoding import random_state, set_random_state
from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Values
from emrun.base.wording import did_you_mean
from emrun.models.modes import copied_buffers, restore_buffers
from emrun.models.step.plain import TrainStep
from emrun.models.step.size_search import ADVICE, free, is_out_of_memory
from emrun.models.step.windows import Windows
from emrun.ranks.parts import Joined, mean, split, weight_of
from emrun.ranks.shares import rows_in

_LOG = logging.getLogger(__name__)
_TRIED = 2  # windows: an optimizer makes its state in the first update, so the second window needs more memory


class MicroBatches:
    """Runs the train step of a model once for each part of a batch.

    Args:
        model: a `TorchModel`, whose file needs this one.
        window: runs each part.
        size: the largest number of examples of a part; `auto` to find it with the first batches.

    Raises:
        ArgumentError: the size is neither a positive number nor `auto`.
    """

    def __init__(self, model: Any, window: Windows, size: int | Literal["auto"]) -> None:
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            message = f"{size!r} is neither a whole number of at least 1 nor auto{did_you_mean(str(size), ['auto'])}"
            raise ArgumentError("micro_batch_size", message)
        self._model = model
        self._window = window
        self.backward = window.backward
        self.update = window.update
        self.size: int | None = None if size == "auto" else size
        """The largest number of examples of a part; None as long as it is not known."""
        self._left = 0 if size != "auto" else _TRIED  # the windows in which the size may still be halved
        self._joined: Joined | None = None  # the outputs of the parts of the current batch that were run
        self._has_warned = False

    def run(self, train_step: TrainStep, inputs: Values, batch: Batch) -> Values:
        """Run the train step on a batch, or on each of its parts.

        Args:
            train_step: the train step.
            inputs: source name -> tensor on the model's device, or a mapping of tensors.
            batch: the batch.

        Returns:
            The outputs of the batch, those of parts detached. The minimised loss of the model is that of the batch.

        Raises:
            ArgumentError: the size is `auto`, and not even one example fits into the memory.
            StreamError: the outputs of the parts cannot be joined.
        """
        if self._left and not self._window.is_open and rows_in(batch):
            self._left -= 1
            return self._run_halved(train_step, inputs, batch)
        return self._run(train_step, inputs, batch)

    def _run_halved(self, train_step: TrainStep, inputs: Values, batch: Batch) -> Values:
        """Run the first batch of a window; with half of the size, once more, as long as the memory is full.

        Each time, the random states and the buffers of the module are as before the batch.
        """
        model = self._model
        before = random_state()
        known = self.size
        size = known or rows_in(batch)
        buffers = copied_buffers(model.module)
        while True:
            self.size = size
            try:
                outputs = self._run(train_step, inputs, batch)
                break
            except Exception as error:
                if not is_out_of_memory(error) or self._window.has_updated:
                    raise
                if size == 1:
                    device = "" if model.device.type == "cpu" else f" of {model.device}"
                    message = f"auto: not even one example fits into the memory{device} in a train step; {ADVICE}"
                    raise ArgumentError("micro_batch_size", message) from error
            # After the error, whose traceback holds tensors
            size //= 2
            model.step_outputs = None
            self._window.forget()
            free(model.device)
            set_random_state(before)
            restore_buffers(model.module, buffers)
        if size != known:
            _LOG.info("model.micro_batch_size: %d, found with a batch of %d examples", size, rows_in(batch))
            if model.write_setting is not None:
                model.write_setting("micro_batch_size", size)
        return outputs

    def _run(self, train_step: TrainStep, inputs: Values, batch: Batch) -> Values:
        """Run the train step on a batch, or on each of its parts."""
        examples = rows_in(batch)
        model = self._model
        window = self._window
        if self.size is None or examples <= self.size:
            return window.run(train_step, inputs, batch)
        if not self._has_warned:
            self._has_warned = True
            _warn_of_batch_norm(model.module)
        _taken(model)
        joined = self._joined = Joined("micro_batch_size", "parts of batches")
        minimised: list[tuple[Tensor, float | Tensor]] = []
        try:
            for part, count in split(inputs, examples, self.size):
                joined.counts.append(count)
                window.left += sum(joined.counts) < examples
                outputs = window.run(train_step, part, part)
                joined.add(outputs, weight_of(outputs, count))
                minimised += [(loss, window.weight) for loss in _taken(model)]
                del outputs  # frees the graph, whose memory the next part needs
        finally:
            self._joined = None
        model._minimised = mean(*zip(*minimised, strict=True)) if minimised else None
        window.weight = sum(weight for _, weight in minimised)  # that of the batch, for the mean of ranks
        return joined.outputs()

    def look(self, outputs: Values) -> None:
        """Show hooks the outputs of the whole batch, detached, at an update, not only those of its last part."""
        if self._joined is not None and self._window.is_ending:
            weight = weight_of(outputs, self._joined.counts[-1])
            self._model.step_outputs = self._joined.with_last(outputs, weight)


def _taken(model: Any) -> list[Tensor]:
    """Return the minimised loss of the last part, if there is one, and forget it."""
    loss, model._minimised = model._minimised, None
    return [] if loss is None else [loss]


def _warn_of_batch_norm(module: torch.nn.Module) -> None:
    name = next((name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training), None)
    if name is not None:
        _LOG.warning(
            "model.micro_batch_size: %s normalises each part of a batch by itself, so the gradients are not those of "
            "the whole batch; with GroupNorm or LayerNorm they are",
            f"{name or 'the module'} (BatchNorm)",
        )
