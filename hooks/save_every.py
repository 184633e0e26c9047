"""Save a checkpoint now and then, and keep it."""

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
    """Saves a checkpoint every so many epochs, iterations or minutes, and keeps all of them or the last few.

        hooks:
          - SaveEvery: {n_epochs: 10}
          - SaveEvery: {n_epochs: 500 iterations, keep: 3}

    The checkpoints are named `epoch-10`, `epoch-20`, ...; those of iterations and minutes, which are saved in the
    middle of an epoch, `iteration-500`, ... The zeroth epoch counts as one.

    Args:
        n_epochs: how often: a number of epochs, or an interval such as `500 iterations` or `30 minutes`.
        keep: how many of them are kept, the older ones are deleted; null for all.
        model_name: what the names begin with; null for `epoch` or `iteration`.
        on_failure: what to do when one cannot be saved, for whatever reason: `error`, `warn` or `ignore`.

    Raises:
        ArgumentError: an argument cannot be used.
        HookError: the main loop has no run directory, or another hook gives the same names.
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
            self.after_batch = None  # type: ignore[method-assign, assignment]  # there is nothing to look at

    def before_training(self) -> None:
        """Start the clock."""
        self._last = monotonic()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Ask for the checkpoint when it is due by iterations or minutes."""
        if self._interval.unit != "epochs" and self.main_loop.training and self._is_due():
            self._request(self.main_loop.iterations_done)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Ask for the checkpoint when it is due by epochs."""
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
        """Return the names of this hook beside the last ones."""
        pattern = re.compile(re.escape(self.name) + r"-\d+")
        own = sorted(filter(pattern.fullmatch, names), key=lambda name: int(name.rpartition("-")[2]))
        return own[: -self._keep] if self._keep else []
