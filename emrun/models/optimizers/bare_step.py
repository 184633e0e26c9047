"""What torch does with the step of an optimizer: the wrapper that an update leaves out, and the flag of schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

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
        of_optimizer = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        return cls(step.__wrapped__, of_optimizer + of_all)


def mark_as_stepped(optimizer: Any) -> None:
    """Let schedulers of torch take an optimizer for one that has made an update; they would warn otherwise."""
    optimizer._opt_called = True
