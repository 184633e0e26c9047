"""Ends a training whose loss is not finite, if the model has not refused the update already, as it does on a CPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from emrun.base.finite import as_number, kind_of, not_finite
from emrun.base.types import EpochData
from emrun.hook import Loop, TrainingAborted
from emrun.loop.batch_calls import Calls
from emrun.loop.steps import StepRecord
from emrun.ranks.parts import loss_weights, weighs_nothing
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Checks whether the loss is finite; ends the training if it is not, or logs one warning.

    The losses that were minimised are checked before each checkpoint and at the end of the train stream; this waits for
    the device. If updates were skipped, or examples have weights, only the last loss is checked. The mean loss of an
    epoch is checked too; it is only warned of, because it may have examples that are not minimised.

    Args:
        loop: has the model, whose `step_values` has the loss that was minimised last.
        steps: records the losses.
    """

    def __init__(self, loop: Loop, steps: StepRecord) -> None:
        self._outputs: Mapping[str, Any] = {}  # of the last training batch, if its examples have weights
        self._loop = loop
        self._steps = steps
        self._looked_at = 0  # the last iteration that was checked
        self._skipped = 0  # how many updates of the run were skipped until then
        self._first: tuple[str, int] | None = None  # the first loss that was not finite: its kind, its epoch
        self._message = ""  # the warning, until it is logged
        self._is_finite = True

    @property
    def warning(self) -> str | None:
        """The warning for the end of the training; None if the loss was always finite."""
        if self._first is None or self._loop.on_nan_loss == "ignore":
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
        """Check the losses of the iterations since the last call: the last one, and those that are still recorded.

        Raises:
            TrainingAborted: one is not finite, and an update was made with it.
        """
        loop = self._loop
        before = self._looked_at
        weighted = self._outputs
        self._outputs = {}
        skipped = loop.model.skipped_updates - self._skipped
        self._looked_at = loop.iterations_done
        self._skipped = loop.model.skipped_updates
        if loop.iterations_done == before or weighs_nothing(weighted):
            return
        last = as_number(loop.model.step_values().get("loss"))
        if loop.on_nan_loss == "error" and loop.model.has_updated is not False:
            earlier = {} if skipped or weighted else self._steps.losses_after(before)
            for iteration, loss in {**earlier, loop.iterations_done: last}.items():
                if not math.isfinite(loss):
                    raise TrainingAborted(
                        f"{not_finite(loss, iteration)}, and its update is made; no checkpoint has its weights. For "
                        "emrun replay, resume with the hook `StopOnNaN: {after_batch: true, stop_on_inf: true}`"
                    )
        self._take("the loss of the last training batch", last, loop.training_epochs_done + 1)

    def end_epoch(self, epoch_id: int, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Check the mean losses of the train streams in the epoch data; log the warning."""
        for name in trained:
            loss = epoch_data.get(name, {}).get("loss")
            is_last_finite = self._is_finite
            mean = loss.get("mean") if isinstance(loss, Mapping) else loss
            self._take(f"the mean loss of stream {name!r}", as_number(mean), self._loop.training_epochs_done)
            self._is_finite &= is_last_finite
        self.warn()

    def warn(self) -> None:
        """Log the warning, once."""
        if self._message and self._loop.on_nan_loss != "ignore":
            _LOG.warning("%s", self._message)
            self._message = ""

    def _take(self, what: str, number: float, epoch: int) -> None:
        self._is_finite = math.isfinite(number)
        if self._is_finite or self._first is not None:
            return
        self._first = kind_of(number), epoch
        place = f"in epoch {epoch} (iteration {self._loop.iterations_done})"
        self._message = f"{what} is {kind_of(number)} {place}: the rest of the run is probably useless"
