"""Save a checkpoint whenever a statistic is better than before."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from emrun.arguments import check_choice, safe_component
from emrun.errors import ArgumentError, HookError
from emrun.fields import ANYTHING, NUMBER, optional, record, sequence_of
from emrun.hooks.save_latest import SaveLatest
from emrun.types import EpochData, Policy
from emrun.wording import listed

_LOG = logging.getLogger(__name__)

Condition = Literal["min", "max"]


class SaveBest(SaveLatest):
    """Saves a checkpoint after each epoch in which a statistic is better than in all previous epochs.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - SaveBest: {variable: accuracy, condition: max}

    Only the latest such checkpoint is kept. NaN is never better.

    Args:
        model_name: the name of the checkpoint.
        variable: the variable to compare.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped.
        aggregation: the aggregation to compare; null if the data of the epoch has one plain number for the variable.
        on_save_failure: what to do if the checkpoint cannot be saved, for whatever reason: `error`, `warn` or
            `ignore`.

    Raises:
        ArgumentError: `condition` or `on_save_failure` has another value, or `model_name` cannot name a directory.
        HookError: there is no run directory, or the statistic is missing or not a number.
    """

    def __init__(
        self,
        model_name: str = "best",
        variable: str = "loss",
        condition: Condition = "min",
        stream: str = "valid",
        aggregation: str | None = "mean",
        on_save_failure: Policy = "error",
    ) -> None:
        super().__init__(on_save_failure)
        check_choice("condition", condition, Condition)
        if not isinstance(model_name, str) or not model_name:
            raise ArgumentError("model_name", f"{model_name!r} is not a name")
        self.name = model_name
        safe_component("model_name", model_name)
        self.saves = (model_name.replace("*", "_"),)
        self._path = (stream, variable, aggregation) if aggregation else (stream, variable)
        self._sign = 1.0 if condition == "max" else -1.0
        self._best: float | None = None
        self.monitors = ("/".join(str(part) for part in self._path),)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request the checkpoint if the statistic is better than before."""
        if self.main_loop.evaluating or self._path[0] not in epoch_data:
            return
        value = self._read(epoch_data)
        if math.isnan(value) or (self._best is not None and self._sign * value <= self._sign * self._best):
            return
        self._best = value
        _LOG.info("new best %s: %g", self.monitors[0], value)
        super().after_epoch(epoch_id, epoch_data)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, with its statistic and its sign."""
        return {"best": self._best, "of": [self.monitors[0], self._sign]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value so far, unless this hook compares another statistic now."""
        record({"best": optional(NUMBER), "of": sequence_of(ANYTHING)}).check(state)
        if state["of"] == [self.monitors[0], self._sign]:
            self._best = state["best"]
        else:
            _LOG.warning(
                "SaveBest now compares another statistic, %s; its next value counts as the best", self.monitors[0]
            )

    def _read(self, epoch_data: EpochData) -> float:
        value: Any = epoch_data
        for part in self._path:
            if not isinstance(value, Mapping) or part not in value:
                there = listed(list(value)) if isinstance(value, Mapping) else f"the number {value}"
                raise HookError(f"SaveBest monitors {self.monitors[0]}, but there is no {part!r}: there is {there}")
            value = value[part]
        if isinstance(value, Mapping) and value:
            raise HookError(
                f"SaveBest monitors {self.monitors[0]}, which has the aggregations {listed(list(map(str, value)))}; "
                "set aggregation to one of them"
            )
        number = _number(value)
        if number is None:
            raise HookError(f"SaveBest monitors {self.monitors[0]}, which is not a number: {_shown(value)}")
        return number


def _number(value: Any) -> float | None:
    """Return a number, or the only number in an array or tensor; None for any other value."""
    if isinstance(value, str | bytes):
        return None
    item = getattr(value, "item", None)  # of arrays and tensors
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    """Return a short description of a value."""
    shape = getattr(value, "shape", None)
    return repr(value)[:40] if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
