"""The check that the loss is still finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from emrun.base.types import EpochData
from emrun.hook import Loop
from emrun.loop.batch_calls import Calls
from emrun.ranks.parts import loss_weights, weighs_nothing
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Checks whether the loss is finite, and logs one warning if it is not.

    Two values are checked in each epoch: the loss that was minimised last, at the end of the train stream (this waits
    for the device), and the mean loss of the epoch.

    Args:
        loop: has the model, whose `step_values` has the loss that was minimised last.
    """

    def __init__(self, loop: Loop) -> None:
        self._outputs: Mapping[str, Any] = {}  # of the last training batch, if its examples have weights
        self._loop = loop
        self._looked_at = 0  # the last iteration that was checked
        self._first: tuple[str, int] | None = None  # the first loss that was not finite: its kind, its epoch
        self._message = ""  # the warning, until it is logged
        self._is_finite = True

    @property
    def warning(self) -> str | None:
        """The warning for the end of the training; None if the loss was always finite."""
        if self._first is None:
            return None
        kind, epoch = self._first
        when = f"in epoch {epoch}" if self._is_finite else f"from epoch {epoch} on"
        return f"the loss was {kind} {when}"

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Check the last loss of a stream on which the model is trained, at its end."""

        def look_for_weights(outputs: Mapping[str, Any]) -> None:
            if loss_weights(outputs) is not None:
                calls.after.append(self._note)

        if train:
            calls.first.append(look_for_weights)
            calls.end.append(self.look)

    def _note(self, outputs: Mapping[str, Any]) -> None:
        self._outputs = outputs

    def look(self) -> None:
        """Check the loss of the last iteration, once."""
        if self._loop.iterations_done != self._looked_at:
            self._looked_at = self._loop.iterations_done
            if not weighs_nothing(self._outputs):
                loss = self._loop.model.step_values().get("loss")
                self._take("the loss of the last training batch", loss, self._loop.training_epochs_done + 1)
        self._outputs = {}

    def end_epoch(self, epoch_id: int, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Check the mean losses of the train streams in the epoch data; log the warning."""
        for name in trained:
            loss = epoch_data.get(name, {}).get("loss")
            is_last_finite = self._is_finite
            mean = loss.get("mean") if isinstance(loss, Mapping) else loss
            self._take(f"the mean loss of stream {name!r}", mean, self._loop.training_epochs_done)
            self._is_finite &= is_last_finite
        self.warn()

    def warn(self) -> None:
        """Log the warning, once."""
        if self._message:
            _LOG.warning("%s", self._message)
            self._message = ""

    def _take(self, what: str, value: Any, epoch: int) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # no loss, a complex loss, or a loss without a value
            return
        self._is_finite = math.isfinite(number)
        if self._is_finite or self._first is not None:
            return
        kind = "NaN" if math.isnan(number) else "infinite"
        self._first = kind, epoch
        place = f"in epoch {epoch} (iteration {self._loop.iterations_done})"
        self._message = (
            f"{what} is {kind} {place}: the rest of the run is probably useless; to end such a run before the update, "
            f"add the hook `StopOnNaN: {{after_batch: true{', stop_on_inf: true' * (kind != 'NaN')}}}`"
        )
