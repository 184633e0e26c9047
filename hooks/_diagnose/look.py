"""A look at a model in training: what its layers return, and how an update changes its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from emrun.hooks._shared.parameters import norms_of

_Held = tuple[nn.Parameter, Mapping[str, Any]]  # a parameter of an optimizer and its group


Range = tuple[Tensor, Tensor]
"""What a layer or an output has returned: the least and the largest value at each place, over all examples."""


def range_of(values: Tensor, before: Range | None = None) -> Range:
    """Return the range of values, whose first axis has the examples, and of those before if they have the shape."""
    low, high = torch.aminmax(values, dim=0)
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
            values = [value.detach() for value in tree_leaves(returned) if _has_numbers(value)]
            self.finite += [(label, value.amin(), value.amax()) for value in values]
            is_layer = name and next(module.parameters(False), None) is not None
            if is_layer and values and values[0].dim() and len(values[0]) > 1:
                before = self.last[1] if self.last is not None and self.last[0] == label else None
                self.last = label, range_of(values[0], before)


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
        self._names = {
            id(parameter): name for name, parameter in model.module.named_parameters() if _is_trained(parameter)
        }
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
                (parameter, group) for group in groups for parameter in group["params"] if id(parameter) in self._names
            ]
            norms = zip(held, norms_of([parameter.grad for parameter, _ in held]), strict=True)
            gradients = [None if parameter.grad is None else norm for (parameter, _), norm in norms]
            self._pending = held, gradients, [parameter.detach().clone() for parameter, _ in held]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the change; called after the step, if it was not skipped."""
        if self._pending is None:
            return
        (held, gradients, before), self._pending = self._pending, None
        self._measured.add(id(optimizer))
        wide = [index for index, tensor in enumerate(before) if tensor.dim() > 1]
        sizes = dict(zip(wide, norms_of([before[index] for index in wide]), strict=True))
        torch._foreach_sub_(before, [parameter.detach() for parameter, _ in held])
        for index, (step, gradient) in enumerate(zip(norms_of(before), gradients, strict=True)):
            parameter, group = held[index]
            rate = float(group["lr"]) if "lr" in group else None
            peak = max(float(group.get(key) or 0) for key in ("initial_lr", "max_lr"))
            is_full = rate is None or rate >= peak / 2
            self.changes.append(Change(self._names[id(parameter)], gradient, step, sizes.get(index), rate, is_full))


def _watched(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a module with their names, without those that are compiled."""
    compiled: list[str] = []
    for name, part in module.named_modules():
        is_compiled = part._compiled_call_impl is not None or "_orig_mod" in part._modules
        if is_compiled or isinstance(part, torch.jit.ScriptModule):
            compiled.append(f"{name}." if name else "")
        if not any(f"{name}.".startswith(prefix) for prefix in compiled):
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
