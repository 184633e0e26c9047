"""The random states before a step, saved only for the generators that the steps draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emrun.base.encoding import GENERATORS, random_state


class StepRandomness:
    """Knows the random states before a step.

    To save all states costs about 100 us, and most steps draw from no generator or from one. So all states are saved
    before the first step of a pass and compared with those after it. Before each later step, only the states that the
    first step changed are saved. For the other generators, the state at the failure is the state before the step,
    unless this step is the first to draw from them. A step has two parts, the hooks that may change the batch and the
    model, because the two may draw from different generators.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._at_hooks: dict[str, Any] = {}  # in the first step, before the hooks that may change the batch
        self._at_model: dict[str, Any] = {}  # in the first step, before the model
        self._by_hooks = self._by_model = GENERATORS  # that hooks and the model draw from; all until the first step

    def take_all(self, *_: object) -> None:
        """Save all states, before the first step of a pass."""
        self._before = self._at_hooks = self._at_model = random_state()
        self._by_hooks = self._by_model = GENERATORS

    def before_hook(self) -> None:
        """Save the states before a hook that may change the batch."""
        self._before = {name: take() for name, take in self._by_hooks.items()}

    def before_model(self, *_: object) -> None:
        """Save the states before the model, after the hooks that may change the batch."""
        self._before = self._at_model = {name: take() for name, take in self._by_model.items()}

    def watch(self, *, of_whole_steps: bool = True) -> Callable[[object], None] | None:
        """Compare the states with those after the first step; return the function to call before each later step.

        Args:
            of_whole_steps: no hook may change the batch. If a hook may, the caller calls `before_hook` and
                `before_model` instead, and None is returned.
        """
        before = self._at_hooks
        between = self._at_model
        now = random_state()
        self._by_hooks = {name: take for name, take in GENERATORS.items() if between[name] != before[name]}
        self._by_model = {name: take for name, take in GENERATORS.items() if now[name] != between[name]}
        self._before = {name: between[name] for name in self._by_model}
        return self.before_model if self._by_model and of_whole_steps else None

    def before_step(self) -> tuple[dict[str, Any], list[str]]:
        """Return all states, and the names of the states that were saved before the step."""
        return {**random_state(), **self._before}, list(self._before)
