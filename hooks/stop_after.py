"""End the training after a number of epochs, passes, updates, iterations or minutes."""

from __future__ import annotations

import time
from typing import Any

from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData
from emrun.base.wording import counted, listed
from emrun.hook import AbstractHook, TrainingTerminated


class StopAfter(AbstractHook):
    """Ends the training successfully at the first limit that is reached.

        hooks:
          - StopAfter: {epochs: 20, minutes: 30}

    The limits, except for `minutes`, also say how long the run will be: schedules of learning rates depend on it. With
    `training_minutes: 5`, a schedule whose lengths are shares follows the time: `warmup: 5%` are 15 seconds. Two such
    runs never have the same rates; those that were used are in `steps.jsonl`.

    A limit other than `epochs` ends the run in the middle of an epoch if need be. The end is measured: a limit that is
    reached with the last batch of an epoch ends the run after the epoch, with its evaluations. Otherwise the extra
    streams are evaluated once more, also those with an interval, when the checkpoint `latest` has been saved.

    Args:
        epochs: the number of training epochs; 0 ends the training after the zeroth epoch.
        passes: the number of passes of the train stream. Without `main_loop.fixed_epoch_size`, these are epochs; with
            it, the dataset must tell the number of batches of a pass, by `num_batches` or `ctx.batches`.
        updates: the number of updates of the weights.
        iterations: the number of batches that the model is trained on.
        minutes: the time since the start of the training, looked at after each batch and each epoch; in a resumed run,
            the time before the checkpoint counts too.
        training_minutes: the time in which the model is trained, from the first to the last batch of each epoch,
            waiting for data included. Evaluations and checkpoints do not count, nor does the first batch of a process,
            with which start and compilation end. In a resumed run, the time before the checkpoint counts too. On
            several ranks, it is the longest time of a rank, as of the last batch but one.
        train_stream_name: the only stream whose iterations count, of several that the model is trained on.

    Raises:
        ArgumentError: no limit is given, or a limit is negative, infinite, not a number, or not whole (all except
            minutes and `training_minutes`).
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
        training_minutes: float | None = None,
        train_stream_name: str | None = None,
    ) -> None:
        super().__init__()
        limits = {
            "epochs": epochs,
            "passes": passes,
            "updates": updates,
            "iterations": iterations,
            "minutes": minutes,
            "training_minutes": training_minutes,
        }
        if all(limit is None for limit in limits.values()):
            raise ArgumentError("epochs", f"give at least one of {listed(list(limits))}")
        for name, limit in limits.items():
            if limit is None:
                continue
            check_number(name, limit, "a finite number of at least 0", least=0)
            if not name.endswith("minutes") and limit % 1:
                raise ArgumentError(name, f"{limit!r} is not a whole number")
        del limits["minutes"], limits["training_minutes"]
        if train_stream_name is not None:
            del limits["iterations"]  # another stream may not be part of each epoch
        self._minutes = minutes
        self._training_minutes = training_minutes
        if training_minutes is not None:
            self.progress = lambda: self._trained() / max(60 * training_minutes, 1e-9)
        self._stream = train_stream_name
        self._iterations = iterations
        self.limits = {unit: int(limit) for unit, limit in limits.items() if limit is not None}
        self._iterations_done = 0
        self._began = 0.0
        self._seconds = self._trained_before = 0.0  # that the training took before a resume
        if (
            minutes is training_minutes is None
            and train_stream_name is None
            and type(self).after_batch is StopAfter.after_batch
        ):
            self.mute("after_batch")  # the loop compares what it counts

    def before_training(self) -> None:
        """Start the clock; end a resumed run that is at a limit of another stream already."""
        self._began = self.clock() - self._seconds
        if self.main_loop.iterations_done:
            self._check_iterations()

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Count the iteration of another stream; end the training if its iterations or the minutes are done."""
        if self.main_loop.training and stream_name == self._stream:
            self._iterations_done += 1
            self._check_iterations()
        self._check_minutes()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training if the minutes are done, which may have passed since the last batch."""
        self._check_minutes()

    def _check_minutes(self) -> None:
        if self._minutes is not None and self.clock() - self._began >= 60 * self._minutes:
            reason = f"{self._minutes} minutes have passed (StopAfter minutes: {self._minutes})"
            raise TrainingTerminated(reason, alike=False, limit=True)
        if self._training_minutes is not None and self._trained() >= 60 * self._training_minutes:
            reason = (
                f"trained for {self._training_minutes} minutes (StopAfter training_minutes: {self._training_minutes})"
            )
            raise TrainingTerminated(reason, limit=True)

    def _trained(self) -> float:
        """Return the seconds of training."""
        return self._trained_before + self.main_loop.training_seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the counted iterations and the elapsed seconds."""
        counted = self._iterations_done if self._stream is not None else None
        trained = None if self._training_minutes is None else self._trained()
        return {"iterations_done": counted, "seconds": self.clock() - self._began, "training_seconds": trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counted iterations and the elapsed seconds."""
        counted = state["iterations_done"]
        if counted is None and self._stream is not None:  # iterations were not counted before the checkpoint
            counted = self.main_loop.iterations_done
        self._iterations_done = counted or 0
        self._seconds = state["seconds"]
        if self._training_minutes is not None:
            self._trained_before = (state.get("training_seconds") or 0.0) - self.main_loop.training_seconds

    def _check_iterations(self) -> None:
        if self._stream is not None and self._iterations is not None and self._iterations_done >= self._iterations:
            done = counted(self._iterations_done, "iteration")
            raise TrainingTerminated(f"{done} done (StopAfter iterations: {self._iterations})", limit=True)
