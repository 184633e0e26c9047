"""End the training after a number of epochs, passes, updates, iterations or minutes."""

from __future__ import annotations

import time
from typing import Any

from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData
from emrun.base.wording import counted, listed
from emrun.hook import AbstractHook, TrainingTerminated


class StopAfter(AbstractHook):
    """Ends the training successfully at the first limit that is reached.

        hooks:
          - StopAfter: {epochs: 20, minutes: 30}

    The limits, except for `minutes`, also say how long the run will be: schedules of learning rates depend on it. A
    limit other than `epochs` ends the run in the middle of an epoch if need be. The end is measured: a limit that is
    reached with the last batch of an epoch ends the run after the epoch, with its evaluations. Otherwise the extra
    streams are evaluated once more, also those with an interval, when the checkpoint `latest` has been saved.

    Args:
        epochs: the number of training epochs; 0 ends the training after the zeroth epoch.
        passes: the number of passes of the train stream. Without `main_loop.fixed_epoch_size`, these are epochs; with
            it, the dataset must tell the number of batches of a pass, by `num_batches` or `ctx.batches`.
        updates: the number of updates of the weights.
        iterations: the number of batches of the train stream.
        minutes: the time since the start of the training; in a resumed run, the time before the checkpoint counts too.
        train_stream_name: the stream whose iterations count; by default the train stream of the main loop.

    Raises:
        ArgumentError: no limit is given, or a limit is negative, not a number, or not whole (all except minutes).
    """

    reads = ()
    clock = staticmethod(time.monotonic)

    every_rank = True

    def __init__(
        self,
        epochs: int | None = None,
        passes: int | None = None,
        updates: int | None = None,
        iterations: int | None = None,
        minutes: float | None = None,
        train_stream_name: str | None = None,
    ) -> None:
        super().__init__()
        limits = {
            "epochs": epochs,
            "passes": passes,
            "updates": updates,
            "iterations": iterations,
            "minutes": minutes,
        }
        if all(limit is None for limit in limits.values()):
            raise ArgumentError("epochs", f"give at least one of {listed(list(limits))}")
        for name, limit in limits.items():
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 0
            if limit is not None and not is_number:
                raise ArgumentError(name, f"{limit!r} is not a number of at least 0")
            if limit is not None and name != "minutes" and limit % 1:
                raise ArgumentError(name, f"{limit!r} is not a whole number")
        self._epochs = epochs
        self._passes = passes
        self._updates = updates
        self._iterations = iterations
        self._minutes = minutes
        self._stream = train_stream_name
        del limits["minutes"]
        if train_stream_name is not None:
            del limits["iterations"]  # another stream may not be part of each epoch
        self.limits = {unit: int(limit) for unit, limit in limits.items() if limit is not None}
        self._iterations_done = 0
        self._is_update_open = False  # whether the last batch did not end its update
        self._began = 0.0
        self._seconds = 0.0  # that the training took before a resume
        ends_in_epoch = any(limit is not None for limit in (passes, updates, iterations, minutes))
        if not ends_in_epoch and type(self).after_batch is StopAfter.after_batch:
            self.after_batch = None  # type: ignore[method-assign, assignment]  # it would do nothing

    def before_training(self) -> None:
        """Start the clock; end a resumed run that is at a limit already."""
        self._began = self.clock() - self._seconds
        if self.main_loop.iterations_done:
            self._check_counts()

    def before_epoch(self, epoch_id: int) -> None:
        """End a run that is at a limit before its first batch, as with `epochs: 0` and no zeroth epoch."""
        if epoch_id > self.main_loop.training_epochs_done:
            self._check_counts()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Count the iteration; end the training if it is at a limit other than epochs."""
        if self.main_loop.training:
            if stream_name == (self._stream or self.main_loop.train_stream_name):
                self._iterations_done += 1
                self._check_iterations()
            self._is_update_open = self.main_loop.model.is_accumulating
            self._check_updates()
            self._check_passes()
        self._check_minutes()

    def after_stream(self, stream_name: str) -> None:
        """End the training if the last update of the train stream was the last one."""
        if self._is_update_open and stream_name == self.main_loop.train_stream_name:
            self._is_update_open = False
            self._check_updates()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training if it is at the limit of epochs or passes."""
        self._check_epochs()
        self._check_passes()

    def state_dict(self) -> dict[str, Any]:
        """Return the counted iterations and the elapsed seconds."""
        counted = self._iterations_done if self.after_batch is not None else None
        return {"iterations_done": counted, "seconds": self.clock() - self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counted iterations and the elapsed seconds."""
        counted = state["iterations_done"]
        if counted is None and self.after_batch is not None:  # iterations were not counted before the checkpoint
            counted = self.main_loop.iterations_done
        self._iterations_done = counted or 0
        self._seconds = state["seconds"]

    def _check_counts(self) -> None:
        self._check_epochs()
        self._check_passes()
        self._check_updates()
        self._check_iterations()

    def _check_epochs(self) -> None:
        done = self.main_loop.training_epochs_done
        if self._epochs is not None and done >= self._epochs:
            raise TrainingTerminated(f"{counted(done, 'epoch')} done (StopAfter epochs: {self._epochs})", limit=True)

    def _check_passes(self) -> None:
        if self._passes is not None and (done := self.main_loop.passes_done) >= self._passes:
            raise TrainingTerminated(
                f"{counted(done, 'pass', 'es')} done (StopAfter passes: {self._passes})", limit=True
            )

    def _check_updates(self) -> None:
        if self._updates is not None and (done := self.main_loop.updates_done) >= self._updates:
            raise TrainingTerminated(f"{counted(done, 'update')} done (StopAfter updates: {self._updates})", limit=True)

    def _check_iterations(self) -> None:
        if self._iterations is not None and self._iterations_done >= self._iterations:
            done = counted(self._iterations_done, "iteration")
            raise TrainingTerminated(f"{done} done (StopAfter iterations: {self._iterations})", limit=True)

    def _check_minutes(self) -> None:
        if self._minutes is not None and self.clock() - self._began >= 60 * self._minutes:
            reason = f"{self._minutes} minutes have passed (StopAfter minutes: {self._minutes})"
            raise TrainingTerminated(reason, alike=False, limit=True)
