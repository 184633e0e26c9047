"""End the training after a number of epochs, iterations or minutes."""

from __future__ import annotations

import time
from typing import Any

from emrun.errors import ArgumentError
from emrun.fields import Kind, optional, record, whole
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.types import EpochData
from emrun.wording import counted


class StopAfter(AbstractHook):
    """Ends the training successfully at the first limit that is reached.

        hooks:
          - StopAfter: {epochs: 20, minutes: 30}

    Args:
        epochs: the number of training epochs; 0 ends the training after the zeroth epoch.
        iterations: the number of batches of the train stream.
        minutes: the time since the start of the training; in a resumed run, the time before the checkpoint counts too.
        train_stream_name: the stream whose iterations count; by default the train stream of the main loop.

    Raises:
        ArgumentError: no limit is given, or a limit is negative, not a number, or not whole (epochs, iterations).
    """

    reads = ()
    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        epochs: int | None = None,
        iterations: int | None = None,
        minutes: float | None = None,
        train_stream_name: str | None = None,
    ) -> None:
        super().__init__()
        limits = {"epochs": epochs, "iterations": iterations, "minutes": minutes}
        if all(limit is None for limit in limits.values()):
            raise ArgumentError("epochs", "give at least one of epochs, iterations, minutes")
        for name, limit in limits.items():
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 0
            if limit is not None and not is_number:
                raise ArgumentError(name, f"{limit!r} is not a number of at least 0")
            if limit is not None and name != "minutes" and limit % 1:
                raise ArgumentError(name, f"{limit!r} is not a whole number")
        self._epochs = epochs
        self._iterations = iterations
        self._minutes = minutes
        self._stream = train_stream_name
        whole = {"epochs": epochs, "iterations": iterations if train_stream_name is None else None}
        self.limits = {unit: int(limit) for unit, limit in whole.items() if limit is not None}
        self._iterations_done = 0
        self._began = 0.0
        self._seconds = 0.0  # that the training took before a resume
        if iterations is None and minutes is None and type(self).after_batch is StopAfter.after_batch:
            self.after_batch = None  # type: ignore[method-assign, assignment]  # it would do nothing

    def before_training(self) -> None:
        """Start the clock; end a resumed run that is at a limit already."""
        self._began = self.clock() - self._seconds
        if self.main_loop.iterations_done:
            self._check_epochs()
            self._check_iterations()

    def before_epoch(self, epoch_id: int) -> None:
        """End a run that is at a limit before its first batch, as with `epochs: 0` and no zeroth epoch."""
        if epoch_id > self.main_loop.training_epochs_done:
            self._check_epochs()
            self._check_iterations()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Count the iteration; end the training if it is at the limit of iterations or minutes."""
        if self.main_loop.training and stream_name == (self._stream or self.main_loop.train_stream_name):
            self._iterations_done += 1
            self._check_iterations()
        self._check_minutes()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training if it is at the limit of epochs."""
        self._check_epochs()

    def state_dict(self) -> dict[str, Any]:
        """Return the counted iterations and the elapsed seconds."""
        counted = self._iterations_done if self.after_batch is not None else None
        return {"iterations_done": counted, "seconds": self.clock() - self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counted iterations and the elapsed seconds."""
        seconds = Kind("at least 0 seconds", lambda value: type(value) in (int, float) and 0 <= value < 2**63)
        record({"iterations_done": optional(whole()), "seconds": seconds}, may_lack=("seconds",)).check(state)
        counted = state["iterations_done"]
        if counted is None and self.after_batch is not None:  # iterations were not counted before the checkpoint
            counted = self.main_loop.iterations_done
        self._iterations_done = counted or 0
        self._seconds = state.get("seconds", 0.0)

    def _check_epochs(self) -> None:
        done = self.main_loop.training_epochs_done
        if self._epochs is not None and done >= self._epochs:
            raise TrainingTerminated(f"{counted(done, 'epoch')} done (StopAfter epochs: {self._epochs})")

    def _check_iterations(self) -> None:
        if self._iterations is not None and self._iterations_done >= self._iterations:
            raise TrainingTerminated(
                f"{counted(self._iterations_done, 'iteration')} done (StopAfter iterations: {self._iterations})"
            )

    def _check_minutes(self) -> None:
        if self._minutes is not None and self.clock() - self._began >= 60 * self._minutes:
            raise TrainingTerminated(f"{self._minutes} minutes have passed (StopAfter minutes: {self._minutes})")
