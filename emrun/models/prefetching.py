"""Batches that wait on the device already when the model comes to them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emrun.errors import StreamError
from emrun.models.inputs import Inputs
from emrun.types import Batch

_LOG = logging.getLogger(__name__)
_WIDENED_THERE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16})


def can_prefetch(device: torch.device) -> bool:
    """Tell whether a device copies while it computes: an accelerator with streams, which CPUs and MPS have not."""
    if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "device_index"):  # before torch 2.8
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"


class Prefetcher:
    """Copies the tensors of a batch to the device while the model is busy with the batch before it.

    Who reads ahead calls `pin`, which brings the sources into page-locked memory; the loop calls what that returns,
    which starts the copy on a stream of its own; `tensors` lets the model's stream wait for it. At most two batches
    wait on the device, beside two at most that the model has not done: a loop that is further ahead of the device waits
    for it, as memory would grow otherwise.

    Args:
        inputs: which sources are needed, and in which types.
        device: an accelerator, see `can_prefetch`.
    """

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._inputs = inputs
        self._device = device
        self._index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._stream = torch.Stream(device)
        self._copies: deque[tuple[Batch, dict[str, Tensor], torch.Event]] = deque(maxlen=2)
        self._steps: deque[torch.Event] = deque(maxlen=2)  # what the model's stream had done when it came to a batch
        self._failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefetcher, (self._inputs, self._device)  # streams and events cannot be copied

    def pin(self, batch: Batch) -> Callable[[], None] | None:
        """Copy the sources of a batch that lie in the CPU's memory to page-locked memory; may be called in any thread.

        Returns:
            What starts their copy to the device; None when there is none, or something is wrong with them, which
            `tensors` tells.
        """
        if self._failed:
            return None
        pinned: dict[str, tuple[Tensor, torch.dtype]] = {}
        try:
            with torch.accelerator.device_index(self._index):  # or the memory would be a context's on device 0
                for name in self._inputs.needed(batch):
                    tensor, dtype = self._inputs.read(name, batch[name])
                    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
                        continue
                    widened = tensor.dtype in _WIDENED_THERE and tensor.dtype.itemsize <= dtype.itemsize
                    copied_as = tensor.dtype if widened else dtype  # never in more bytes, nor in types not known there
                    pinned[name] = torch.empty_like(tensor, dtype=copied_as, pin_memory=True).copy_(tensor), dtype
        except (StreamError, KeyError, TypeError):
            return None
        except RuntimeError as error:
            self._give_up(error)
            return None
        return partial(self._copy, batch, pinned) if pinned else None

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Return source -> tensor on the device, for the sources that are needed.

        Raises:
            StreamError: a source cannot become a tensor.
        """
        found = next((each for each in self._copies if each[0] is batch), None)
        if found is None:
            return self._inputs.tensors(batch)
        while self._copies.popleft() is not found:  # batches that were not run
            pass
        _, tensors, copied = found
        stream = torch.accelerator.current_stream(self._device)
        self._steps.append(stream.record_event())
        stream.wait_event(copied)
        for tensor in tensors.values():
            tensor.record_stream(stream)  # or its memory would be used again before this stream has read it
        return self._inputs.tensors({**batch, **tensors})

    def clear(self) -> None:
        """Let go of what was copied."""
        self._copies.clear()
        self._steps.clear()

    def _copy(self, batch: Batch, pinned: dict[str, tuple[Tensor, torch.dtype]]) -> None:
        """Start the copy of a batch."""
        if self._failed:
            return
        try:
            if len(self._steps) == self._steps.maxlen:
                self._steps[0].synchronize()
            with self._stream:
                tensors = {
                    name: tensor.to(device=self._device, dtype=dtype, non_blocking=True)
                    for name, (tensor, dtype) in pinned.items()
                }
                self._copies.append((batch, tensors, self._stream.record_event()))
        except RuntimeError as error:  # no memory, or what a step before did to the device, which the next one tells
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        _LOG.warning("batches are not copied to the device ahead any more: %s", str(error).splitlines()[0])
