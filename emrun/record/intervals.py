"""When an interval of epochs, updates, iterations or minutes has passed."""

from __future__ import annotations

from time import monotonic

from emrun.base.types import Interval
from emrun.hook import Loop

UNITS = ("epochs", "updates", "iterations", "minutes")
"""The units of intervals at which hooks save and write."""


class Every:
    """Says at which epochs or batches something is due.

    Epochs, updates and iterations are counted from the beginning of the run, so that a resumed run does the same at the
    same places. Minutes are counted in this process.

    Args:
        argument: the name of the argument, for messages.
        value: the interval, such as `5 epochs` or `500 iterations`.

    Raises:
        ArgumentError: the value is not an interval.
    """

    def __init__(self, argument: str, value: object) -> None:
        self.interval = Interval.parse(argument, value, UNITS)
        self.is_within_epochs = self.interval.unit != "epochs"
        """Whether something may be due in the middle of an epoch."""
        self._last = 0.0
        self._is_update_open = False  # whether the last batch did not end its update

    def start(self) -> None:
        """Start the clock, for an interval of minutes."""
        self._last = monotonic()

    def is_epoch_due(self, epoch_id: int) -> bool:
        """Return whether something is due after an epoch; never, for an interval that is not of epochs."""
        return not self.is_within_epochs and epoch_id % self.interval.count == 0

    def is_batch_due(self, loop: Loop) -> bool:
        """Return whether something is due after this batch; call it once after each batch that the model trained on."""
        count = self.interval.count
        unit = self.interval.unit
        if unit == "minutes":
            now = monotonic()
            if now - self._last < count * 60:
                return False
            self._last = now
            return True
        if unit == "updates":
            self._is_update_open = loop.model.is_accumulating
            return not self._is_update_open and loop.updates_done % count == 0
        return unit != "epochs" and loop.iterations_done % count == 0

    def is_stream_due(self, loop: Loop, stream_name: str) -> bool:
        """Return whether something is due after the train stream, because of an update that its end has made."""
        if stream_name != loop.train_stream_name:
            return False
        was_open = self._is_update_open
        self._is_update_open = False
        return was_open and loop.updates_done % self.interval.count == 0


def done(loop: Loop, unit: str) -> int:
    """Return how many epochs, updates or iterations the run has made."""
    if unit == "epochs":
        return loop.training_epochs_done
    return loop.updates_done if unit == "updates" else loop.iterations_done
