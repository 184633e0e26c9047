"""Runs a model without what changes how a step is calculated, and not what it calculates; for comparisons."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from emrun.models.recomputation import keeps_activations, recomputed


def shortcuts(model: Any) -> list[str]:
    """Return those of the keys `compile`, `precision`, `micro_batch_size` and `recompute` that a `TorchModel` uses."""
    used = {
        "compile": model._compilation is not None,
        "precision": model._autocast is not None,
        "micro_batch_size": model._parts is not None,
        "recompute": bool(recomputed(model.module)),
    }
    return [key for key, is_used in used.items() if is_used]


@contextmanager
def plainly(model: Any, keys: Collection[str]) -> Iterator[None]:
    """Run a model without some of its `shortcuts` in the block."""
    keys = {*keys} & {*shortcuts(model)}
    module = model.module
    before = model._call, module._compiled_call_impl, model._parts and model._parts.size
    with ExitStack() as stack:
        if "recompute" in keys:
            stack.enter_context(keeps_activations(module))
        try:
            if "compile" in keys:
                model._call, module._compiled_call_impl = model._inputs.call, None
            if "precision" in keys:
                model._autocast.enabled = False
            if "micro_batch_size" in keys:
                model._parts.size = None
            yield
        finally:
            model._call, module._compiled_call_impl = before[:2]
            if "precision" in keys:
                model._autocast.enabled = True
            if "micro_batch_size" in keys:
                model._parts.size = before[2]


@contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Run a model in float64 in the block, instead of in float32: its weights, buffers, sources and losses."""
    parts = [model.module, *(each for each in model.losses.values() if isinstance(each, torch.nn.Module))]
    tensors = [each for part in parts for each in (*part.parameters(), *part.buffers()) if each.dtype is torch.float32]
    convert = model._tensors
    model._tensors = lambda batch: _doubled(convert(batch))
    try:
        for each in tensors:
            each.grad, each.data = None, each.data.double()
        yield
    finally:
        model._tensors = convert
        for each in tensors:
            each.grad, each.data = None, each.data.float()


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype is torch.float32 else value
    return {name: _doubled(each) for name, each in value.items()} if isinstance(value, dict) else value
