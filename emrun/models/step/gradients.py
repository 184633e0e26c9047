"""Gradients are cleared before a training step, or divided."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from emrun.models.optimizers.parameters import parameters_beside, parameters_of
from emrun.ranks.parts import Weight

gradient_of = attrgetter("grad")
_kind_of = attrgetter("device", "dtype", "layout")
_is_there = partial(is_not, None)
exhaust = deque[Any](maxlen=0).extend


class _Same(repeat):  # type: ignore[type-arg]  # `repeat` takes none when it runs
    """An endless iterator of a value, which copies and pickles are too: from Python 3.14 on, `repeat` has neither."""

    def __init__(self, _: Any, name: str) -> None:
        self._name = name

    def __new__(cls, value: Any, name: str) -> _Same:
        """Make the iterator that is the global variable of this name."""
        return super().__new__(cls, value)

    def __reduce__(self) -> str:
        return self._name


_GRAD = _Same("grad", "_GRAD")
_NONE = _Same(None, "_NONE")


def clear_gradients(optimizer: Optimizer) -> None:
    """Set all gradients to None, in a fifth of the time that torch's own method takes for a small model.

    If the class of the optimizer overrides `zero_grad`, that method is called instead.
    """
    if clears_itself(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        set_gradients(group["params"])


def set_gradients(parameters: Iterable[Parameter], gradients: Iterable[Tensor | None] = _NONE) -> None:
    """Set gradients, to None by default, without a step of Python's interpreter for each."""
    exhaust(map(setattr, parameters, _GRAD, gradients))


def clears_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has another `zero_grad` than torch's."""
    return getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad


def divide_gradients(optimizer: Optimizer, divisor: Weight) -> None:
    """Divide the gradients of an optimizer's parameters in place; a divisor of 0, of gradients that are 0, is 1."""
    if isinstance(divisor, Tensor):
        divisor = divisor.where(divisor != 0, 1)
    for group in optimizer.param_groups:
        gradients = list(filter(_is_there, map(gradient_of, group["params"])))
        if len(set(map(_kind_of, gradients))) == 1 and gradients[0].layout is torch.strided:
            torch._foreach_div_(gradients, divisor)
        else:  # the operations on lists do not take sparse tensors
            for gradient in gradients:
                gradient.div_(divisor)


def all_parameters(module: Module) -> list[Parameter]:
    """Return what `module.parameters()` yields, in a third of the time; a shared parameter may occur twice."""
    parameters = []
    modules = [module]
    for each in modules:  # grows during the loop
        parameters += [parameter for parameter in each._parameters.values() if parameter is not None]
        modules += [child for child in each._modules.values() if child is not None]
    return parameters


class GradientsToClear:
    """What is cleared before a step: the gradients of parameters, and optimizers that clear theirs in their own way.

    Args:
        parameters: the parameters of the module.
        optimizers: the optimizers, whose parameters count too.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizers: Sequence[Optimizer]) -> None:
        own = list(filter(clears_itself, optimizers))
        self.groups = [each.param_groups for each in optimizers]
        self.counts = list(map(len, self.groups))
        """How many groups each optimizer had at that time."""
        held = [*parameters, *parameters_of(*optimizers)]
        self.parameters = parameters_beside(list(dict.fromkeys(held)), *own)
        self.gradients = partial(map, setattr, self.parameters, _GRAD, _NONE)
        """Returns an iterator that sets them to None, a gradient with each item."""
        self.more = [each.zero_grad for each in own]
        """Methods that clear the gradients of optimizers which do it in their own way."""
