"""The random states before a step, at the cost of what the steps draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emrun.encoding import GENERATORS, random_state


class Draws:
    """Knows the random states before a step, at the cost of those generators that the steps draw from.

    To take all states costs about 100 us, and most steps draw from none or from one of them. So they are all taken
    before the first step of a pass and compared after it; before each of the others, only those are taken that moved
    then. Of the rest, the state at the failure is the one before the step, unless this step is the first to draw. Hooks
    that may change the batch are a part of the step of their own, for which other generators may have to be taken.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._at_hooks: dict[str, Any] = {}  # in the first step: before the hooks that may change the batch,
        self._at_model: dict[str, Any] = {}  # and before the model
        self._by_hooks = self._by_model = GENERATORS  # what the one moves, and the other; any, as is not known yet

    def take_all(self) -> None:
        """Take all states, before the first step of a pass."""
        self._before = self._at_hooks = self._at_model = random_state()
        self._by_hooks = self._by_model = GENERATORS

    def before_hook(self) -> None:
        """Take the states before a hook that may change the batch."""
        self._before = {name: take() for name, take in self._by_hooks.items()}

    def before_model(self) -> None:
        """Take the states before the model, behind the hooks that may change the batch."""
        self._before = self._at_model = {name: take() for name, take in self._by_model.items()}

    def watch(self, *, of_whole_steps: bool = True) -> Callable[[], None] | None:
        """Compare them with those after the step; return what to call before each of the next steps, if anything.

        Args:
            of_whole_steps: no hook may change the batch, before which `before_hook` and `before_model` are called.
        """
        before, between, now = self._at_hooks, self._at_model, random_state()
        self._by_hooks = {name: take for name, take in GENERATORS.items() if between[name] != before[name]}
        self._by_model = {name: take for name, take in GENERATORS.items() if now[name] != between[name]}
        self._before = {name: between[name] for name in self._by_model}
        return self.before_model if self._by_model and of_whole_steps else None

    def before_step(self) -> tuple[dict[str, Any], list[str]]:
        """Return all states, and the names of those that were really taken before the step."""
        return {**random_state(), **self._before}, list(self._before)
