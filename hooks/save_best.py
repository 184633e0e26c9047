"""Save a checkpoint whenever a statistic is better than before."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from emrun.base.arguments import check_count, safe_component
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData, Policy
from emrun.base.wording import short
from emrun.epoch_data import named
from emrun.hooks._shared.statistic import Condition, Statistic
from emrun.hooks.save_latest import SaveLatest
from emrun.storage.checkpoints.manifest import numbered

_LOG = logging.getLogger(__name__)


class SaveBest(SaveLatest):
    """Saves a checkpoint after each epoch in which a statistic is better than in all previous epochs.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - SaveBest: {variable: accuracy, condition: max}

    NaN is never better, and of equal values the earliest counts. With `keep: 3`, the three best checkpoints are kept:
    they are named by their epochs, `best-7`, `best-12`, `best-9`, and the best of them is also `best`. A second hook
    compares another statistic, with a `model_name` of its own.

    Args:
        model_name: the name of the checkpoint. All other names begin with it.
        variable: the variable to compare.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped.
        aggregation: the aggregation to compare; of a variable with one plain number, `mean` is this number.
        on_save_failure: what to do if the checkpoint cannot be saved, for whatever reason: `error`, `warn` or
            `ignore`.
        keep: how many of the best checkpoints to keep.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or `model_name` cannot name a directory.
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
        keep: int = 1,
    ) -> None:
        super().__init__(on_save_failure)
        if not isinstance(model_name, str) or not model_name:
            raise ArgumentError("model_name", f"{model_name!r} is not a name")
        check_count("keep", keep, minimum=1)
        self.name = safe_component("model_name", model_name)
        self.saves = (self.name,)
        self._keep = keep
        self._statistic = Statistic("SaveBest", variable, condition, stream, aggregation)
        self.monitors = (self._statistic.address,)
        self._kept: list[tuple[float, int]] = []  # the values that are kept and their epochs, the best first

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request a checkpoint if the statistic is among the best."""
        if self.main_loop.evaluating:
            return
        value = self._statistic.read(epoch_data)
        if value is not None:
            for name in self._take(value, epoch_id):
                self.main_loop.request_checkpoint(name, self._on_save_failure, self._superfluous)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far with their epochs, with their statistic and its sign."""
        return {
            "of": self._statistic.identity,
            "kept": [{"value": value, "epoch": epoch} for value, epoch in self._kept],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best values so far, unless this hook did not compare this statistic before."""
        instead = f"its next value counts as the best, and its checkpoint replaces those named {self.name}"
        if self._statistic.is_of(state, instead):
            self._kept = [(entry["value"], entry["epoch"]) for entry in state["kept"][: self._keep]]

    def _take(self, value: float, epoch_id: int) -> list[str]:
        """Compare the value of an epoch; return the names for the checkpoint of the epoch, if it is to be kept."""
        is_better = self._statistic.is_better
        rank = 0
        while rank < len(self._kept) and not is_better(value, self._kept[rank][0]):
            rank += 1
        if rank >= self._keep or not is_better(value, None):
            return []
        self._kept.insert(rank, (value, epoch_id))
        del self._kept[self._keep :]
        if rank == 0:
            _LOG.info("new best %s: %s", "/".join(named(self._statistic.address)), short(value))
        names = [f"{self.name}-{epoch_id}"] if self._keep > 1 else []
        return [self.name, *names] if rank == 0 else names

    def _superfluous(self, names: Iterable[str]) -> list[str]:
        """Return the names of checkpoints that are not among the best any more."""
        if self._keep == 1:
            return []
        kept = {f"{self.name}-{epoch}" for _, epoch in self._kept}
        return [name for name in numbered(self.name, names) if name not in kept]
