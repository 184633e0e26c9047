"""The parameters of optimizers, the names that a module gives them, and those that no optimizer has."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module, Parameter
from torch.optim import Optimizer


def parameters_of(*optimizers: Optimizer | None) -> list[Parameter]:
    """Return the parameters of optimizers, in their order."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    return [parameter for group in groups for parameter in group["params"]]


def names_of(module: Module) -> dict[int, str]:
    """Return the id of each parameter of a module -> its name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def parameters_beside(parameters: Sequence[Parameter], *optimizers: Optimizer | None) -> list[Parameter]:
    """Return the parameters of a module that its optimizers do not have."""
    trained = set(map(id, parameters_of(*optimizers)))
    return [parameter for parameter in parameters if id(parameter) not in trained]
