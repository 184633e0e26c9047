"""How a config builds an optimizer."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.types import Factory, Values
from emrun.base.wording import listed
from emrun.models.optimizers.groups import parameter_groups


def build_optimizer(module: Module, form: Callable[..., Any], key: str = "optimizer") -> Optimizer:
    """Build an optimizer of a module's parameters.

    Args:
        module: the module to train.
        form: called with the parameters; its options are those of `parameter_groups`.
        key: the key of the form in the model's section, for messages.

    Raises:
        ArgumentError: see `parameter_groups`; or torch refuses an argument.
    """
    options: Values = getattr(form, "options", {})
    groups = parameter_groups(module, options, key)
    # the optimizer, or which argument torch refuses
    try:
        optimizer = form(groups if len(groups) > 1 or len(groups[0]) > 1 else groups[0]["params"])
    except (ValueError, TypeError, RuntimeError) as error:
        if not is_raised_by_torch(error):
            raise
        arguments = form.kwargs.items() if isinstance(form, Factory) else ()
        text = str(error)
        refused = (f".{name}" for name, value in arguments if text.endswith(f": {value}") or f"`{name}" in text)
        place = next(refused, "")
        raise ArgumentError(f"{key}{place}", text) from error
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(key, f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    # arguments that it does not have
    kind = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", {})
    if options.get("no_decay") is not None and "weight_decay" not in defaults:
        raise ArgumentError(f"{key}.no_decay", f"{kind} has no argument weight_decay; remove no_decay")
    unknown = [name for group in groups for name in group if name != "params" and name not in defaults]
    if unknown and defaults:
        raise ArgumentError(f"{key}.groups", f"unknown argument {unknown[0]!r}; allowed: {listed(sorted(defaults))}")
    # values that torch does not look at
    for group in optimizer.param_groups:
        if group.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise ArgumentError(f"{key}.capturable", f"{kind} cannot capture parameters on the CPU; set model.device")
        for name in ("lr", "weight_decay"):  # those of groups, and infinity
            value = group.get(name)
            if isinstance(value, str) or (isinstance(value, int | float) and not 0 <= value < math.inf):
                place = name if value == defaults.get(name) else "groups"
                raise ArgumentError(f"{key}.{place}", f"{name} {value!r} is not a finite number of at least 0")
    return optimizer


def check_steps_alone(optimizer: Optimizer, key: str) -> None:
    """Check that an optimizer makes its update without a function that calculates the loss.

    Raises:
        ArgumentError: it needs such a function, as LBFGS does.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentError(
            key,
            f"{type(optimizer).__name__} calculates the loss several times for an update; derive a class from "
            "emrun.TorchModel whose train_step calls self.update(self.optimizer, closure), and name it in model.class",
        )


def is_raised_by_torch(error: BaseException) -> bool:
    """Return whether the code that raised an error is torch's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "torch"
