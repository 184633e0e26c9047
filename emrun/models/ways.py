"""Ways to calculate the same step: compiled, in 16 bits, in parts, with recomputed activations, or none of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module, ModuleList

from emrun.models.forward_pass import ForwardPass
from emrun.models.recomputation import keeps_activations, recomputed
from emrun.models.step.micro_batches import MicroBatches
from emrun.models.weights.saving import tensors_of


@dataclass(frozen=True, slots=True)
class Ways:
    """Runs a model without some of the ways, to compare the two.

    Args:
        forward_pass: runs the module.
        micro_batches: runs the parts of a batch; None without parts.
    """

    forward_pass: ForwardPass
    micro_batches: MicroBatches | None

    @property
    def _off(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Each way that the model uses -> what switches the way off in a block."""
        forward_pass = self.forward_pass
        module = forward_pass.module
        off: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        if forward_pass.compilation is not None:
            off["compile"] = partial(forward_pass.compilation.off, module)
        if forward_pass.autocast is not None:
            off["precision"] = forward_pass.autocast.disabled
        if self.micro_batches is not None:
            off["micro_batch_size"] = self.micro_batches.off
        if recomputed(module):
            off["recompute"] = partial(keeps_activations, module)
        return off

    @property
    def used(self) -> Sequence[str]:
        """Those of `compile`, `precision`, `micro_batch_size` and `recompute` that the model uses."""
        return list(self._off)

    @contextmanager
    def without(self, keys: Collection[str]) -> Iterator[None]:
        """Run the model without some of the ways in the block; keys that it does not use have no effect."""
        with ExitStack() as stack:
            for key, off in self._off.items():
                if key in keys:
                    stack.enter_context(off())
            yield

    @contextmanager
    def in_float64(self, rounded: torch.dtype = torch.float32) -> Iterator[None]:
        """Run the model in float64 in the block, instead of in float32: its weights, buffers, sources and losses.

        Args:
            rounded: the dtype to whose values all of them are rounded.
        """
        # the tensors of the module and of its losses
        losses = [term.function for term in self.forward_pass.outputs.terms.values()]
        modules = ModuleList([self.forward_pass.module, *(loss for loss in losses if isinstance(loss, Module))])
        tensors = [each for each in tensors_of(modules).values() if each.dtype is torch.float32]
        before = [each.data for each in tensors]
        # the block
        with self.forward_pass.changing(partial(_doubled, rounded=rounded)):
            try:
                for each in tensors:
                    each.grad = None
                    each.data = _doubled(each.data, rounded)
                yield
            finally:
                for each, data in zip(tensors, before, strict=True):
                    each.grad = None
                    each.data = data


def _doubled(value: Any, rounded: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(rounded).double() if value.dtype is torch.float32 else value
    return {name: _doubled(each, rounded) for name, each in value.items()} if isinstance(value, dict) else value
