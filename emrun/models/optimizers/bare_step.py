"""What an update costs in each batch: the step of an optimizer without torch's wrapper, and its learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_rate_of = itemgetter("lr")
_are_floats = frozenset((float,)).issuperset
_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__


@dataclass(frozen=True, slots=True)
class BareStep:
    """The step of an optimizer without torch's wrapper, which takes 5 us to name it for profilers and to seek hooks.

    Args:
        call: the function in the wrapper; gets the optimizer.
        hooks: the hooks that the wrapper calls. If there is one, or a profiler, call `optimizer.step` instead.
    """

    call: Callable[[Optimizer], Any]
    hooks: tuple[Any, ...]

    @classmethod
    def of(cls, optimizer: Any) -> BareStep:
        """Return the step of an optimizer; of one whose step torch does not wrap, `hooks` are never all empty."""
        step: Any = getattr(type(optimizer), "step", None)
        if getattr(step, "__code__", None) is not _WRAPPER or "step" in vars(optimizer):
            return cls(step, ("another step",))
        own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        return cls(step.__wrapped__, (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def learning_rates(optimizer: Optimizer) -> list[float | torch.Tensor]:
    """Return the learning rate of each parameter group: a number, or a copy of a tensor on another device."""
    try:
        rates = [*map(_rate_of, optimizer.param_groups)]
        if _are_floats(map(type, rates)):  # the usual case
            return rates
    except KeyError:
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    for index, rate in enumerate(rates):
        if rate.__class__ is not float:
            is_elsewhere = isinstance(rate, torch.Tensor) and not rate.is_cpu
            rates[index] = rate.detach().clone() if is_elsewhere else float(rate)
    return rates
