"""Facts about a model: its parameters, its memory after a step, the time of a step."""

from __future__ import annotations

import itertools
import resource
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emrun.base.types import Batch, Json
from emrun.model import AbstractModel


def parameters(model: AbstractModel) -> Iterator[Json]:
    """Yield a row for each submodule that has its own parameters; a shared parameter counts once."""
    module = getattr(model, "module", None)
    if not isinstance(module, torch.nn.Module):
        return
    by_submodule: dict[str, dict[str, torch.Tensor]] = {}
    for path, parameter in module.named_parameters():
        submodule, _, name = path.rpartition(".")
        by_submodule.setdefault(submodule, {})[name] = parameter
    for submodule, of_submodule in by_submodule.items():
        yield {
            "module": submodule or "(itself)",
            "class": type(module.get_submodule(submodule)).__name__,
            "shapes": {name: list(parameter.shape) for name, parameter in of_submodule.items()},
            "count": sum(parameter.numel() for parameter in of_submodule.values()),
            "bytes": sum(map(_bytes, of_submodule.values())),
            "trained": sum(parameter.numel() for parameter in of_submodule.values() if parameter.requires_grad),
        }


def optimizers(model: AbstractModel) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a model by name; the only one is named `optimizer`."""
    named = getattr(model, "optimizers", {"optimizer": getattr(model, "optimizer", None)})
    if not isinstance(named, Mapping):
        return {}
    return {name: optimizer for name, optimizer in named.items() if isinstance(optimizer, torch.optim.Optimizer)}


def parameter_groups(model: AbstractModel) -> Iterator[Json]:
    """Yield a row for each parameter group of each optimizer: its rate (unscheduled), weight decay, what it trains."""
    module = getattr(model, "module", None)
    names = (
        {id(parameter): name for name, parameter in module.named_parameters()}
        if isinstance(module, torch.nn.Module)
        else {}
    )
    for name, optimizer in optimizers(model).items():
        for index, group in enumerate(optimizer.param_groups):
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            yield {
                "optimizer": name,
                "class": type(optimizer).__name__,
                "group": index,
                "lr": _number(group.get("initial_lr", group.get("lr"))),
                "weight_decay": _number(group.get("weight_decay")),
                "parameters": [names.get(id(parameter), "?") for parameter in trained],
                "count": sum(parameter.numel() for parameter in trained),
            }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def memory(model: AbstractModel) -> dict[str, int]:
    """Return the memory in use after a step: what uses it -> bytes."""
    sizes: dict[str, int] = {}
    module = getattr(model, "module", None)
    if isinstance(module, torch.nn.Module):
        sizes = {
            "parameters": sum(map(_bytes, module.parameters())),
            "buffers": sum(map(_bytes, module.buffers())),
            "gradients": sum(_bytes(parameter.grad) for parameter in module.parameters() if parameter.grad is not None),
        }
    for name, optimizer in optimizers(model).items():
        states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
        sizes["optimizer" if name == "optimizer" else f"optimizer {name}"] = sum(
            _bytes(state) for state in states if isinstance(state, torch.Tensor)
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        sizes["peak on the GPU (of two models)"] = torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    sizes["peak of the process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return sizes


def memory_per_rank(model: Any, ranks: int, forward: tuple[int, int]) -> dict[str, Json]:
    """Return the memory that the first of several ranks needs, which has most: what -> {`bytes`, `how` it is known}.

    Args:
        model: the model with `strategy`, in one process, after a step.
        ranks: the number of ranks.
        forward: what the forward pass of a step took in one process, in bytes, and the rows of its batch.
    """
    forward_size, rows = forward
    needed = {what: {"bytes": size, "how": "exact"} for what, size in model.memory_of_rank(ranks).items() if size}
    needed["forward pass"] = {
        "bytes": forward_size * -(-rows // ranks) // rows,
        "how": "measured, for its share of the rows",
    }
    return {f"rank: {what}": entry for what, entry in needed.items()}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class StepMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the most bytes that tensors take which are made in a block; a compiled function counts as one operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self.forward = 0
        """The most bytes before the first operation of a backward pass."""
        self._is_forward = True
        self._living: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that the mode does not change results, so that compiled functions stay compiled."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._living:  # a view of a tensor that an operation keeps for itself
            return

        def drop(reference: object) -> None:
            self._now -= size
            del self._living[key]

        self._living[key] = weakref.ref(storage, drop)
        self._now += size
        self.peak = max(self.peak, self._now)
        self._is_forward = self._is_forward and torch._C._current_graph_task_id() < 0
        if self._is_forward:
            self.forward = self.peak


class FloatTargets(TorchFunctionMode):
    """Finds cross entropies whose target is floats that are no probabilities, such as a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        given = kwargs or {}
        target = given.get("target", args[1] if len(args) > 1 else None) if function is cross_entropy else None
        if isinstance(target, torch.Tensor) and target.is_floating_point() and target.ndim > 1:
            sums = target.sum(dim=1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
                what = f"a cross entropy has a target of floats of shape {tuple(target.shape)}"
                advice = "classes, as of a mask, are whole numbers of shape (B, ...)"
                self.notes.append(f"{what}, which are no probabilities of classes: their sums are not 1; {advice}")
        return function(*args, **given)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of tensors in values at any depth; sparse and nested tensors have none of their own."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            with suppress(NotImplementedError, RuntimeError):
                yield leaf.untyped_storage()


def timed_run(model: Any, batch: Batch, train: bool, stream: str) -> tuple[Mapping[str, Any], float]:
    """Run a model on a batch; return its outputs, and the seconds until the device has finished."""
    began = perf_counter()
    outputs = model.run(batch, train, stream)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return outputs, perf_counter() - began
