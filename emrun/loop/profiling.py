"""What is timed for `after_epoch_profile` only when somebody listens to it, so that other runs do not pay for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import wraps
from time import perf_counter
from typing import Any

from emrun.base.types import Profile

_WITHIN = {
    "before_update": "hooks_in_updates",
    "after_update": "hooks_in_updates",
    "after_checkpoint": "hooks_in_checkpoints",
}
"""Event -> the key of its seconds, which the time of the model or of the checkpoints includes."""


class HookTimes:
    """Adds up the seconds that each hook takes in its events, and where other times include them.

    `take` returns the sums of an epoch: `hook_<class>` for each hook, `hooks_in_updates`, `hooks_in_checkpoints`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def timed(self, call: Callable[..., Any], hook: object, event: str) -> Callable[..., Any]:
        """Return a method of a hook that also adds up the time of its calls."""
        name, within = f"hook_{type(hook).__name__}", _WITHIN.get(event)
        seconds = self._seconds
        seconds.setdefault(name, 0.0)

        @wraps(call)
        def timed(**arguments: Any) -> None:
            began = perf_counter()
            try:
                call(**arguments)
            finally:
                passed = perf_counter() - began
                seconds[name] += passed
                if within is not None:
                    seconds[within] = seconds.get(within, 0.0) + passed

        return timed

    def take(self) -> Profile:
        """Return the sums since the last call."""
        taken = {name: array("d", [each]) for name, each in self._seconds.items()}
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
        return taken


def counted(
    run: Callable[..., Mapping[str, Any]], lengths: array[float], length: Callable[[], int]
) -> Callable[..., Mapping[str, Any]]:
    """Return `run` of a model that also notes the number of examples of each batch.

    Args:
        run: runs the model on a batch.
        lengths: receives the numbers.
        length: returns the number of examples in the current batch.
    """

    def counting(*arguments: Any) -> Mapping[str, Any]:
        outputs = run(*arguments)
        lengths.append(length())
        return outputs

    return counting
