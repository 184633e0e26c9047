"""A look at a model in training: what its layers return, and how an update changes its parameters."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from emrun.hooks._parts.parameters import norms_of

_RECTIFIER = re.compile("relu|gelu|silu|swish|mish", re.IGNORECASE)  # of class names: units of these can be 0
_OF_CHANNELS = (_ConvNd, _NormBase, nn.GroupNorm)  # their units are on axis 1, at any number of dimensions
_OF_FEATURES = (nn.Linear, nn.LayerNorm, nn.Embedding)  # their units are on the last axis
_Held = tuple[nn.Parameter, Mapping[str, Any]]  # a parameter of an optimizer and its group


Range = tuple[Tensor, Tensor]
"""What a layer or an output has returned: the least and the largest value at each place, over all examples."""


def range_of(values: Tensor, before: Range | None = None) -> Range:
    """Return the range of values, whose first axis has the examples, and of those before if they have the shape."""
    low, high = torch.aminmax(values if values.dim() else values[None], dim=0)
    if before is None or before[0].shape != low.shape:
        return low, high
    return torch.minimum(low, before[0]), torch.maximum(high, before[1])


class Activations:
    """Watches what the layers of a module return, from now on until `stop`.

    Only training is watched: neither evaluations nor what is computed again for the gradients. Nothing waits for the
    device. Compiled parts are not watched, because that would compile them again.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.finite: list[tuple[str, Tensor, Tensor]] = []
        """Layer, least value, largest value, for each call in its order."""
        self.outputs: dict[str, Range] = {}
        """The outputs of the module that depend on its parameters, except for the loss."""
        self.last: tuple[str, Range] | None = None
        """The last called layer with parameters that has a row for each example."""
        self.zeros: dict[str, tuple[Tensor, int]] = {}
        """Layer such as ReLU -> which units were 0 for all examples, and the number of values of a unit."""
        self._producer: tuple[weakref.ref[Tensor], str, nn.Module] | None = None  # of the last output
        self._handles = [part.register_forward_hook(partial(self._see, name)) for name, part in _watched(module)]

    @property
    def is_blind(self) -> bool:
        """Whether nothing is watched, because the whole module is compiled."""
        return not self._handles

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def see_outputs(self, returned: Any) -> None:
        """Add what the module returns: a mapping, a tuple or one tensor."""
        entries = returned if isinstance(returned, list | tuple) else [returned]
        values = returned if isinstance(returned, Mapping) else dict(enumerate(entries))
        for name, value in values.items():
            if name == "loss" or not _has_numbers(value) or not value.requires_grad:
                continue
            if value.dim() and len(value) > 1:
                label = f"output {name}" if len(values) > 1 or isinstance(returned, Mapping) else "the output"
                self.outputs[label] = range_of(value.detach(), self.outputs.get(label))

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        """Look at what a layer returns; called after its forward."""
        is_backward = torch._C._current_graph_task_id() != -1  # computed again, see `recompute`
        if is_backward or not self._module.training or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            label = f"{name} ({type(module).__name__})" if name else type(module).__name__
            if not name:
                self.see_outputs(returned)
            for index, value in enumerate(each for each in tree_leaves(returned) if isinstance(each, Tensor)):
                made = self._producer is not None and self._producer[0]() is value  # by the last layer
                if not _has_numbers(value) or (module._modules and made):
                    continue
                found = range_of(value.detach())
                self.finite.append((label, found[0].amin(), found[1].amax()))
                if index:
                    continue
                if name and value.dim() and len(value) > 1 and next(module.parameters(False), None) is not None:
                    before = self.last[1] if self.last is not None and self.last[0] == label else None
                    self.last = label, range_of(value.detach(), before)
                if value.dim() > 1 and not module._modules and _RECTIFIER.search(type(module).__name__):
                    self._add_zeros(label, found, value, args)
                self._producer = weakref.ref(value), name, module

    def _add_zeros(self, label: str, found: Range, value: Tensor, args: tuple[Any, ...]) -> None:
        """Add which units of an activation function are 0 for all examples."""
        producer: nn.Module | None = None
        if args and self._producer is not None and self._producer[0]() is args[0]:
            _, name, producer = self._producer
            label = f"{label} after {name}"
        is_first = isinstance(producer, _OF_CHANNELS) or (value.dim() > 3 and not isinstance(producer, _OF_FEATURES))
        zero = (found[0] == 0) & (found[1] == 0)
        zero = zero.movedim(0 if is_first else -1, 0).flatten(1).all(1) if zero.dim() > 1 else zero
        before, count = self.zeros.get(label, (None, 0))
        is_more = before is not None and before.shape == zero.shape
        values = value.numel() // max(1, len(zero))
        self.zeros[label] = (zero & before, count + values) if before is not None and is_more else (zero, values)


@dataclass
class Change:
    """What an update has done to a parameter; a 2-norm is a tensor with one element, on the device of the parameter."""

    name: str
    gradient: Tensor | None
    """The 2-norm of the gradient; None without a gradient."""
    step: Tensor
    """The 2-norm of the change."""
    size: Tensor | None
    """The 2-norm of the values before the change; None for biases and the like, which have one axis."""
    rate: float | None
    """The learning rate."""
    is_full: bool
    """Whether the learning rate is at least half of the one that the schedule begins with or has at most."""


class Updates:
    """Measures what the updates of a window do to the parameters that are trained.

    The first update of each optimizer counts. Needs memory for a copy of the parameters of one optimizer.

    Args:
        model: a `TorchModel`.
    """

    def __init__(self, model: Any) -> None:
        self._names = {id(each): name for name, each in model.module.named_parameters() if _is_trained(each)}
        known = [*getattr(model, "optimizers", {}).values(), *vars(model).values()]
        groups = [group for each in known if isinstance(each, torch.optim.Optimizer) for group in each.param_groups]
        held = {id(each) for group in groups for each in group["params"]}
        self._others = [each for each in model.module.parameters() if id(each) in self._names.keys() - held]
        self._before = [each.detach().clone() for each in self._others]
        self._measured: set[int] = set()  # the optimizers
        self._pending: tuple[list[_Held], list[Tensor | None], list[Tensor]] | None = None
        self.changes: list[Change] = []
        """Those of the updates that were made."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the gradients, and copy the weights; called before the step."""
        self._pending = None  # an update that was skipped is dropped
        if id(optimizer) not in self._measured:
            groups = optimizer.param_groups
            held: list[_Held] = [
                (each, group) for group in groups for each in group["params"] if id(each) in self._names
            ]
            norms = zip(held, norms_of([each.grad for each, _ in held]), strict=True)
            gradients = [None if each.grad is None else norm for (each, _), norm in norms]
            self._pending = held, gradients, [each.detach().clone() for each, _ in held]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the change; called after the step, if it was not skipped."""
        if self._pending is None:
            return
        (held, gradients, before), self._pending = self._pending, None
        self._measured.add(id(optimizer))
        wide = [index for index, each in enumerate(before) if each.dim() > 1]
        sizes = dict(zip(wide, norms_of([before[index] for index in wide]), strict=True))
        torch._foreach_sub_(before, [each.detach() for each, _ in held])
        for index, (step, gradient) in enumerate(zip(norms_of(before), gradients, strict=True)):
            parameter, group = held[index]
            rate = float(group["lr"]) if "lr" in group else None
            peak = max(float(group.get(key) or 0) for key in ("initial_lr", "max_lr"))
            is_full = rate is None or rate >= peak / 2
            change = Change(self._names[id(parameter)], gradient, step, sizes.get(index), rate, is_full)
            self.changes.append(change)

    def unmoved(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that no optimizer has, and the 2-norms of their changes since the look began."""
        now = [each.detach() for each in self._others]
        steps = norms_of([after - before for after, before in zip(now, self._before, strict=True)])
        return [(self._names[id(each)], step) for each, step in zip(self._others, steps, strict=True)]


def read(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors with one element; waits once for each device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, each in enumerate(tensors):
        places.setdefault((each.device, each.dtype), []).append(index)
    found = [0.0] * len(tensors)
    for indices in places.values():
        values = torch.stack([tensors[index].reshape(()) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = float(value)
    return found


def _watched(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a module with their names, without those that are compiled."""
    compiled: list[str] = []
    for name, part in module.named_modules():
        is_compiled = part._compiled_call_impl is not None or "_orig_mod" in part._modules
        if is_compiled or isinstance(part, torch.jit.ScriptModule):
            compiled.append(f"{name}." if name else "")
        if not any(f"{name}.".startswith(each) for each in compiled):
            yield name, part


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers that can be looked at."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_nested or value.is_meta:
        return False
    is_plain = value.layout is torch.strided and value.element_size() > 1 and value.numel() > 0
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_trained(parameter: nn.Parameter) -> bool:
    is_plain = parameter.is_floating_point() and parameter.layout is torch.strided
    return parameter.requires_grad and is_plain and parameter.numel() > 0
