"""Numbers that wait on their device until many of them are read at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emrun.epoch_data import number

_TOGETHER = 64  # slots that are allocated together


class WaitingNumbers:
    """Keeps the values of one-element tensors without waiting for their device.

    A tensor on a GPU is copied to a slot, a tensor without dimensions on the same device, because the model may reuse
    its memory. A tensor on the CPU is read at once, which takes less time than a copy.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def keep(self, value: Any) -> float | Tensor:
        """Return the number, or a slot with it, which `read` reads later.

        Args:
            value: a number, or a tensor with one element.

        Raises:
            TypeError: the value is not a real number.
        """
        if value.__class__ is float:
            return value
        if not isinstance(value, Tensor):
            try:
                found = number(value)
                if found is not None:
                    return float(found)
            except OverflowError as error:
                raise TypeError("is a number that is too large") from error
            except ValueError as error:
                raise TypeError(str(error)) from error
            what = f"{value!r:.80}" if isinstance(value, str | bytes | None) else type(value).__name__
            raise TypeError(f"is {what}, not a number")
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise TypeError(f"is a tensor of shape {tuple(value.shape)} and {value.dtype}, not one real number")
        if value.is_cpu:
            return float(value.item())
        key = value.dtype, value.device
        if not self._free.get(key):
            with torch.inference_mode(mode=False):
                self._free[key] = list(torch.empty(_TOGETHER, dtype=value.dtype, device=value.device).unbind())
        slot = self._free[key].pop()
        slot.copy_(value.detach().reshape(()))
        return slot


def read(values: Sequence[float | Tensor | None]) -> list[float | None]:
    """Return the numbers, with those in slots; this waits once for each device."""
    found: list[Any] = list(values)
    waiting: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            waiting.setdefault((value.dtype, value.device), []).append(index)
    for indices in waiting.values():
        numbers = torch.stack([found[index] for index in indices]).cpu().double().tolist()
        for index, each in zip(indices, numbers, strict=True):
            found[index] = each
    return found
