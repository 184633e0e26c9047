"""`memory_format`: how the weights and inputs of images and volumes lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError
from emrun.base.sources import changed
from emrun.base.types import Batch, Values

Name = Literal["channels_last", "channels_last_3d"]
_RANKS = {"channels_last": 4, "channels_last_3d": 5}


class MemoryFormat:
    """Puts the channels of tensors last in memory; shapes and values stay, and so do checkpoints.

    Args:
        name: `channels_last` for tensors of 4 dimensions, `channels_last_3d` for those of 5.

    Raises:
        ArgumentError: there is no such format.
    """

    def __init__(self, name: str) -> None:
        check_choice("memory_format", name, Name)
        self._name = name
        self._rank = _RANKS[name]
        self._format: torch.memory_format = getattr(torch, name)

    def apply(self, module: Module) -> None:
        """Change the parameters and buffers of a module that have as many dimensions as the format.

        Raises:
            ArgumentError: there are none.
        """
        found = [each for each in (*module.parameters(), *module.buffers()) if each.dim() == self._rank]
        if not found:
            raise ArgumentError(
                "memory_format",
                f"{self._name} has no effect: no parameter of {type(module).__name__} has {self._rank} dimensions, "
                f"as those of Conv{self._rank - 2}d have; remove it",
            )
        for each in found:
            each.data = each.data.contiguous(memory_format=self._format)

    def tensors(self, read: Callable[[Batch], Values], batch: Batch) -> Values:
        """Return the tensors of a batch, those with as many dimensions as the format in this format.

        Args:
            read: the function that makes tensors of a batch.
            batch: the batch.
        """
        return changed(read(batch), self._changed)  # type: ignore[no-any-return]

    def _changed(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_nested and value.dim() == self._rank:
            return value.contiguous(memory_format=self._format)
        return value
