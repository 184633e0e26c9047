"""Facts about a model as it is: its parameters, and what takes memory after a step."""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch

from emrun.model import AbstractModel


def parameters(model: AbstractModel) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of a torch module that has parameters of its own; shared ones count once."""
    module = getattr(model, "module", None)
    if not isinstance(module, torch.nn.Module):
        return
    seen: set[int] = set()
    for name, part in module.named_modules():
        own = [(key, each) for key, each in part.named_parameters(recurse=False) if id(each) not in seen]
        seen.update(id(each) for _, each in own)
        if own:
            trained = sum(each.numel() for _, each in own if each.requires_grad)
            count = sum(each.numel() for _, each in own)
            yield {
                "module": name or "(itself)",
                "class": type(part).__name__,
                "shapes": {key: list(each.shape) for key, each in own},
                "count": count,
                "bytes": sum(_bytes(each) for _, each in own),
                "trained": trained,
            }


def memory(model: AbstractModel) -> dict[str, int]:
    """Return what takes memory after a step: what -> bytes."""
    found: dict[str, int] = {}
    module = getattr(model, "module", None)
    if isinstance(module, torch.nn.Module):
        parameters = list(module.parameters())
        found["parameters"] = sum(map(_bytes, parameters))
        found["buffers"] = sum(map(_bytes, module.buffers()))
        found["gradients"] = sum(_bytes(each.grad) for each in parameters if each.grad is not None)
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, torch.optim.Optimizer):
        states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
        found["optimizer"] = sum(_bytes(each) for each in states if isinstance(each, torch.Tensor))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["peak on the GPU (of two models)"] = torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    found["peak of the process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
