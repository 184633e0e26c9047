"""The guard that ends a run whose loss is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from emrun.base.arguments import check_choice
from emrun.base.types import EpochData, Policy
from emrun.hook import Loop, TrainingAborted
from emrun.loop.batch_calls import Calls
from emrun.loop.steps import StepRecord
from emrun.ranks.parts import loss_weights, weighs_nothing
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Checks whether the loss is finite, and ends the training or logs one warning if it is not.

    The losses of the last update are checked at the end of the train stream and before each checkpoint, which wait for
    the device in any case; and the mean loss of the epoch. A loss whose update was skipped does not count.

    Args:
        loop: has the model, whose `step_values` has the loss that was minimised last.
        steps: has the losses of the batches before.
        policy: what to do: `error`, `warn` or `ignore`.
    """

    def __init__(self, loop: Loop, steps: StepRecord, policy: Policy) -> None:
        check_choice("on_nan_loss", policy, Policy)
        self._steps = steps
        self._policy = policy
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
        """Check the losses of the last update, once.

        Raises:
            TrainingAborted: one is not finite.
        """
        loop, model = self._loop, self._loop.model
        if loop.iterations_done == self._looked_at:
            return
        self._looked_at = loop.iterations_done
        if not weighs_nothing(self._outputs) and (model.has_updated is not False or model.is_accumulating):
            losses = [*self._steps.losses(model.iterations_per_update), model.step_values().get("loss")]
            for loss in losses:
                self._take(f"{loop.train_stream_name}/loss", loss, loop.training_epochs_done + 1)
        self._outputs = {}

    def end_epoch(self, epoch_id: int, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Check the mean losses of the train streams in the epoch data; log the warning.

        Raises:
            TrainingAborted: one is not finite.
        """
        for name in trained:
            if epoch_data.get(name, {}).get("skipped_updates"):
                continue
            loss = epoch_data.get(name, {}).get("loss")
            is_last_finite = self._is_finite
            mean = loss.get("mean") if isinstance(loss, Mapping) else loss
            self._take(f"{name}/loss/mean", mean, self._loop.training_epochs_done)
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
        if self._policy == "ignore":
            return
        kind = "NaN" if math.isnan(number) else "infinite"
        place = f"{what} is {kind} at iteration {self._loop.iterations_done}"
        more = "" if kind == "NaN" else ", stop_on_inf: true"
        advice = (
            f"the hook `StopOnNaN: {{after_batch: true{more}}}` ends a run before such an update, for `emrun replay`"
        )
        if self._policy == "error":
            raise TrainingAborted(f"{place} (main_loop.on_nan_loss); {advice}")
        self._first = kind, epoch
        self._message = f"{place}: the rest of the run is probably useless; {advice}"
