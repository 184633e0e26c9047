"""Batches that are copied to the device while the model still runs on the previous batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import StreamError
from emrun.base.types import Batch, Values
from emrun.models.inputs import Inputs

_LOG = logging.getLogger(__name__)
_WIDENED_THERE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16})


Pinned = list[tuple[dict[Any, Any], Any, Tensor, torch.dtype]]
"""A mapping and a key in it, the tensor in page-locked memory for this place, and its dtype on the device."""


def _places(mapping: dict[Any, Any], source: str = "") -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield (source, mapping, key) of all values in some sources; mappings inside are replaced by copies."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            mapping[key] = dict(value)
            yield from _places(mapping[key], source or key)
        else:
            yield source or key, mapping, key


def can_prefetch(device: torch.device) -> bool:
    """Return whether a device can copy while it computes: an accelerator with streams, so neither a CPU nor MPS."""
    if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "device_index"):  # before torch 2.8
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"


class Prefetcher:
    """Copies the tensors of a batch to the device while the model runs on the previous batch.

    The read-ahead thread calls `pin`, which copies the sources to page-locked memory. The loop calls the function that
    `pin` returned, which starts the copy to the device on a separate stream. `tensors` makes the model's stream wait
    for this copy. At most two batches wait on the device, besides at most two that the model has not finished. If the
    loop is further ahead, it waits for the device, because memory would grow otherwise.

    Args:
        inputs: which sources are needed, and in which dtypes.
        device: an accelerator, see `can_prefetch`.
    """

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._inputs = inputs
        self._device = device
        self._index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._stream = torch.Stream(device)
        self._copies: deque[tuple[Batch, Batch, list[Tensor], torch.Event]] = deque(maxlen=2)
        self._steps: deque[torch.Event] = deque(maxlen=2)  # the model's stream, when it reached a batch
        self._failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefetcher, (self._inputs, self._device)  # streams and events cannot be copied

    def pin(self, batch: Batch) -> Callable[[], None] | None:
        """Copy the sources of a batch that are in CPU memory to page-locked memory; may be called in any thread.

        Returns:
            A function that starts their copy to the device; None if there is nothing to copy, or if a source is wrong,
            which `tensors` reports.
        """
        if self._failed:
            return None
        pinned: Pinned = []
        try:
            sources = {name: batch[name] for name in self._inputs.needed(batch)}
            with torch.accelerator.device_index(self._index):  # otherwise, device 0 gets a context
                for name, mapping, key in _places(sources):
                    if self._inputs.is_list(name, mapping[key]):
                        continue
                    tensor, dtype = self._inputs.read(name, mapping[key])
                    if tensor.is_cpu and not (
                        tensor.layout is not torch.strided or tensor.is_nested or tensor.requires_grad
                    ):
                        widened = tensor.dtype in _WIDENED_THERE and tensor.dtype.itemsize <= dtype.itemsize
                        copied_as = tensor.dtype if widened else dtype  # never more bytes, only dtypes known there
                        pinned.append(
                            (
                                mapping,
                                key,
                                torch.empty_like(tensor, dtype=copied_as, pin_memory=True).copy_(tensor),
                                dtype,
                            )
                        )
        except (StreamError, KeyError, TypeError):
            return None
        except RuntimeError as error:
            self._give_up(error)  # then the function copies nothing
        return partial(self._copy, batch, sources, pinned) if pinned else None

    def tensors(self, batch: Batch) -> Values:
        """Return source -> tensor on the device, or a mapping of tensors, for the sources that are needed.

        Raises:
            StreamError: a source cannot become a tensor.
        """
        found = next((each for each in self._copies if each[0] is batch), None)
        if found is None:
            return self._inputs.tensors(batch)
        while self._copies.popleft() is not found:  # batches that were not run
            pass
        _, sources, tensors, copied = found
        stream = torch.accelerator.current_stream(self._device)
        self._steps.append(stream.record_event())
        stream.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(stream)  # otherwise its memory could be reused before this stream has read it
        return self._inputs.tensors(sources)

    def clear(self) -> None:
        """Drop the copied batches."""
        self._copies.clear()
        self._steps.clear()

    def _copy(self, batch: Batch, sources: Batch, pinned: Pinned) -> None:
        """Start the copy of a batch to the device; `sources` gets the tensors there."""
        if self._failed:
            return
        try:
            if len(self._steps) == self._steps.maxlen:
                self._steps[0].synchronize()
            with self._stream:
                for mapping, key, tensor, dtype in pinned:
                    mapping[key] = tensor.to(self._device, dtype, non_blocking=True)
                self._copies.append(
                    (batch, sources, [mapping[key] for mapping, key, _, _ in pinned], self._stream.record_event())
                )
        except RuntimeError as error:  # no memory, or an error of a previous step, which the next step reports
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        _LOG.warning("batches are no longer copied to the device ahead of time: %s", str(error).splitlines()[0])
