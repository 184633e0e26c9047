"""Save a checkpoint at regular intervals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from time import monotonic
from typing import Any

from emrun.arguments import check_count, safe_component
from emrun.hooks.save_latest import SaveLatest
from emrun.types import EpochData, Interval, Policy

_UNITS = ("epochs", "iterations", "minutes")


class SaveEvery(SaveLatest):
    """Saves a checkpoint at every interval of epochs, iterations or minutes, and keeps all of them or the last few.

        hooks:
          - SaveEvery: {n_epochs: 10}
          - SaveEvery: {n_epochs: 500 iterations, keep: 3}

    With an interval of epochs, the checkpoints are named `epoch-0`, `epoch-10`, `epoch-20`, ... With iterations or
    minutes, the checkpoints are saved in the middle of an epoch and named `iteration-500`, `iteration-1000`, ...

    Args:
        n_epochs: the interval: a number of epochs, or a string such as `500 iterations` or `30 minutes`.
        keep: how many of these checkpoints to keep; older ones are deleted. null keeps all.
        model_name: the first part of the names; null means `epoch` or `iteration`.
        on_failure: what to do if a checkpoint cannot be saved, for whatever reason: `error`, `warn` or `ignore`.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: there is no run directory, or another hook saves under the same names.
    """

    reads = ()

    def __init__(
        self,
        n_epochs: int | str = 1,
        keep: int | None = None,
        model_name: str | None = None,
        on_failure: Policy = "error",
    ) -> None:
        super().__init__(on_failure)
        self._interval = Interval.parse("n_epochs", n_epochs, _UNITS)
        if keep is not None:
            check_count("keep", keep, minimum=1)
        self._keep = keep
        unit = "epoch" if self._interval.unit == "epochs" else "iteration"
        self.name = safe_component("model_name", unit if model_name is None else model_name)
        self.saves = (f"{self.name}-*",)
        self._last = 0.0
        if self._interval.unit == "epochs" and type(self).after_batch is SaveEvery.after_batch:
            self.after_batch = None  # type: ignore[method-assign, assignment]  # it would do nothing

    def before_training(self) -> None:
        """Start the clock."""
        self._last = monotonic()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Request a checkpoint if one is due by iterations or minutes."""
        if self._interval.unit != "epochs" and self.main_loop.training and self._is_due():
            self._request(self.main_loop.iterations_done)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request a checkpoint if one is due by epochs."""
        if self._interval.unit == "epochs" and epoch_id % self._interval.count == 0:
            self._request(epoch_id)

    def _is_due(self) -> bool:
        if self._interval.unit == "iterations":
            return self.main_loop.iterations_done % self._interval.count == 0
        now = monotonic()
        if now - self._last < self._interval.count * 60:
            return False
        self._last = now
        return True

    def _request(self, number: int) -> None:
        name = f"{self.name}-{number}"
        self.main_loop.request_checkpoint(name, self._on_save_failure, self._superfluous if self._keep else ())

    def _superfluous(self, names: Iterable[str]) -> list[str]:
        """Return the names of this hook's checkpoints, without the last `keep`."""
        pattern = re.compile(re.escape(self.name) + r"-\d+")
        own = sorted(filter(pattern.fullmatch, names), key=lambda name: int(name.rpartition("-")[2]))
        return own[: -self._keep] if self._keep else []
