"""Save a checkpoint at regular intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from emrun.base.arguments import check_count, safe_component
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData, Period, Policy
from emrun.hooks.save_latest import SaveLatest
from emrun.record.intervals import Every
from emrun.storage.checkpoints.manifest import numbered


class SaveEvery(SaveLatest):
    """Saves a checkpoint at every interval of epochs, updates, iterations or minutes; keeps all or the last few.

        hooks:
          - SaveEvery: {n_epochs: 10}
          - SaveEvery: {every: 500 updates, keep: 3}

    With an interval of epochs, the checkpoints are named `epoch-0`, `epoch-10`, `epoch-20`, ... With any other
    interval, the checkpoints are saved in the middle of an epoch and named `iteration-500`, `iteration-1000`, ...

    Args:
        n_epochs: the interval as a number of epochs; 1 if `every` is not given either.
        keep: how many of these checkpoints to keep; older ones are deleted. null keeps all.
        model_name: the first part of the names; null means `epoch` or `iteration`.
        on_failure: what to do if a checkpoint cannot be saved, for whatever reason: `error`, `warn` or `ignore`.
        every: the interval with its unit: `10 epochs`, `500 updates`, `500 iterations` or `30 minutes`. A number
            without a unit means epochs. Minutes are counted from the start of the process, on several
            ranks by rank 0.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or both `n_epochs` and `every` are given.
        HookError: there is no run directory, or another hook saves under the same names.
    """

    reads = ()

    every_rank = True

    def __init__(
        self,
        n_epochs: int | None = None,
        keep: int | None = None,
        model_name: str | None = None,
        on_failure: Policy = "error",
        every: Period | None = None,
    ) -> None:
        super().__init__(on_failure)
        if n_epochs is not None and every is not None:
            raise ArgumentError("n_epochs", "n_epochs and every are both given; remove one of them")
        if isinstance(n_epochs, str):
            raise ArgumentError("n_epochs", f"{n_epochs!r} is not a number of epochs; write every: {n_epochs}")
        if n_epochs is not None:
            check_count("n_epochs", n_epochs, minimum=1)
        self._every = Every("every", (n_epochs or 1) if every is None else every)
        self.every_rank = self._every.interval.unit != "minutes"  # clocks differ: rank 0 says when
        if keep is not None:
            check_count("keep", keep, minimum=1)
        self._keep = keep
        self._waits = False  # whether a checkpoint is due at the end of the window
        unit = "iteration" if self._every.is_within_epochs else "epoch"
        self.name = safe_component("model_name", unit if model_name is None else model_name)
        self.saves = (self.name,)
        if not self._every.is_within_epochs and type(self).after_batch is SaveEvery.after_batch:
            self.mute("after_batch")  # it would do nothing

    def before_training(self) -> None:
        """Start the clock."""
        self._every.start()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Request a checkpoint if one is due within the epoch."""
        if self.main_loop.training:
            self._waits = self._every.is_batch_due(self.main_loop) or self._waits
            self._request_if_due()

    def after_stream(self, stream_name: str) -> None:
        """Request a checkpoint if one is due with the last update of the train stream."""
        self._waits = self._every.is_stream_due(self.main_loop, stream_name) or self._waits
        self._request_if_due()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request a checkpoint if one is due by epochs."""
        if self._every.is_epoch_due(epoch_id) and not self.main_loop.at_end:
            self._request(epoch_id)

    def most_kept(self, done: Mapping[str, float]) -> float | None:
        """Return how many checkpoints a run keeps at most; see `SaveLatest`."""
        count = self._every.interval.count
        unit = self._every.interval.unit
        already_made = done[unit] // count + (unit == "epochs") if unit in done else None  # epoch 0 is one more
        return self._keep if already_made is None else min(already_made, self._keep or already_made)

    def _request_if_due(self) -> None:
        """Request a checkpoint if one is due, at the end of the window of `model.accumulate`: that is what is saved."""
        if self._waits and not self.main_loop.model.is_accumulating:
            self._waits = False
            self._request(self.main_loop.iterations_done)

    def _request(self, number: int) -> None:
        self.main_loop.request_checkpoint(
            f"{self.name}-{number}", self._on_save_failure, self._superfluous if self._keep else ()
        )

    def _superfluous(self, names: Iterable[str]) -> list[str]:
        """Return the names of this hook's checkpoints, without the last `keep`."""
        saved = sorted(numbered(self.name, names), key=lambda name: int(name.rpartition("-")[2]))
        return saved[: -self._keep] if self._keep else []
