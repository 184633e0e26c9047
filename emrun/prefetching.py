"""Batches that wait on the device already when the model comes to them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from emrun.errors import StreamError
from emrun.torch_inputs import Inputs
from emrun.types import Batch

_LOG = logging.getLogger(__name__)
_WIDENED_THERE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16})


def can_prefetch(device: torch.device) -> bool:
    """Tell whether a device copies while it computes: an accelerator with streams, which CPUs and MPS have not."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"


class Prefetcher:
    """Copies the tensors of a batch to the device while the model is busy with the batch before it.

    Who reads ahead calls `pin`, which brings the sources into page-locked memory; the loop calls what that returns,
    which starts the copy on a stream of its own; `tensors` lets the model's stream wait for it. No more than two
    batches are on the device beside the one that is run.

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
        self._failed = False

    def pin(self, batch: Batch) -> Callable[[], None] | None:
        """Copy the sources of a batch that lie in the CPU's memory to page-locked memory; may be called in any thread.

        Returns:
            What starts their copy to the device; None when there is none, or something is wrong with them, which
            `tensors` tells.
        """
        pinned: dict[str, tuple[Tensor, torch.dtype]] = {}
        try:
            with torch.accelerator.device_index(self._index):  # or the memory would be a context's on device 0
                for name in self._inputs.needed(batch):
                    tensor, dtype = self._inputs.read(name, batch[name])
                    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                        continue
                    if tensor.dtype not in _WIDENED_THERE or tensor.dtype.itemsize > dtype.itemsize:
                        tensor = tensor.to(dtype)  # what makes it smaller, and what devices cannot
                    pinned[name] = tensor.detach().pin_memory(), dtype
        except (StreamError, KeyError, TypeError):
            return None
        except RuntimeError as error:
            self._warn("page-locked memory", error)
            return None
        return partial(self._copy, batch, pinned) if pinned else None

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Return source -> tensor on the device, for the sources that are needed.

        Raises:
            StreamError: a source cannot become a tensor.
        """
        copies = self._copies
        while copies:
            copied, tensors, event = copies.popleft()
            if copied is batch:
                stream = torch.accelerator.current_stream(self._device)
                stream.wait_event(event)
                for tensor in tensors.values():
                    tensor.record_stream(stream)  # or its memory would be used again before this stream has read it
                return self._inputs.tensors({**batch, **tensors})
        return self._inputs.tensors(batch)

    def _copy(self, batch: Batch, pinned: dict[str, tuple[Tensor, torch.dtype]]) -> None:
        """Start the copy of a batch."""
        try:
            with self._stream:
                tensors = {
                    name: tensor.to(device=self._device, dtype=dtype, non_blocking=True)
                    for name, (tensor, dtype) in pinned.items()
                }
                self._copies.append((batch, tensors, self._stream.record_event()))
        except torch.OutOfMemoryError as error:
            self._warn("the device's memory", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            reason = str(error).splitlines()[0]
            _LOG.warning("batches are not copied to the device ahead, %s does not suffice: %s", what, reason)
