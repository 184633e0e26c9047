"""Ways to calculate the same step: compiled, in 16 bits, in parts, with recomputed activations, or none of these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from emrun.models.recomputation import keeps_activations, recomputed


@dataclass(frozen=True, slots=True)
class Ways:
    """Runs a model without some of the ways, to compare the two.

    Args:
        model: a `TorchModel`, whose file needs this one.
    """

    model: Any

    @property
    def used(self) -> Sequence[str]:
        """Those of `compile`, `precision`, `micro_batch_size` and `recompute` that the model uses."""
        used = {
            "compile": self.model._compilation,
            "precision": self.model._autocast,
            "micro_batch_size": self.model._parts,
            "recompute": recomputed(self.model.module) or None,
        }
        return [key for key, part in used.items() if part is not None]

    @contextmanager
    def without(self, keys: Collection[str]) -> Iterator[None]:
        """Run the model without some of the ways in the block; keys that it does not use have no effect."""
        model = self.model
        off = {*keys} & {*self.used}
        replaced: dict[str, list[tuple[Any, str, Any]]] = {
            "compile": [(model, "_call", model._inputs.passing.call), (model.module, "_compiled_call_impl", None)],
            "precision": [(model._autocast, "enabled", False)],
            "micro_batch_size": [(model._parts, "size", None)],
        }
        with ExitStack() as stack:
            if "recompute" in off:
                stack.enter_context(keeps_activations(model.module))
            for owner, name, value in chain.from_iterable(replaced[key] for key in replaced if key in off):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield

    @contextmanager
    def in_float64(self, rounded: torch.dtype = torch.float32) -> Iterator[None]:
        """Run the model in float64 in the block, instead of in float32: its weights, buffers, sources and losses.

        Args:
            rounded: the dtype to whose values all of them are rounded.
        """
        model = self.model
        parts = [model.module, *(each for each in model.losses.values() if isinstance(each, torch.nn.Module))]
        tensors = [each for part in parts for each in (*part.parameters(), *part.buffers())]
        tensors = [each for each in tensors if each.dtype is torch.float32]
        before = [each.data for each in tensors]
        convert = model._tensors
        model._tensors = lambda batch: _doubled(convert(batch), rounded)
        try:
            for each in tensors:
                each.grad = None
                each.data = _doubled(each.data, rounded)
            yield
        finally:
            model._tensors = convert
            for each, data in zip(tensors, before, strict=True):
                each.grad = None
                each.data = data


def _doubled(value: Any, rounded: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(rounded).double() if value.dtype is torch.float32 else value
    return {name: _doubled(each, rounded) for name, each in value.items()} if isinstance(value, dict) else value
