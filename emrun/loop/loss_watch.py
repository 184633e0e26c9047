"""Notices that the loss of a training is not a number any more."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from emrun.model import AbstractModel

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Notices when the loss of a training is not finite, and warns once.

    It looks at the loss that was minimised last, for which it waits for the device, at the end of the train stream of
    each epoch, and at the epoch's mean.

    Args:
        model: tells the loss that was minimised last, see `AbstractModel.step_values`.
    """

    def __init__(self, model: AbstractModel) -> None:
        self._model = model
        self._looked_at = 0  # the iteration
        self._first: tuple[str, int] | None = None  # the kind of value, the epoch
        self._message = ""  # that was not logged yet
        self._is_finite = True

    @property
    def warning(self) -> str | None:
        """What is to be said at the end of the training, None when the loss was always finite."""
        if self._first is None:
            return None
        kind, epoch = self._first
        when = f"in epoch {epoch}" if self._is_finite else f"from epoch {epoch} on"
        guard = "StopOnNaN" if kind == "NaN" else "StopOnNaN: {stop_on_inf: true}"
        return f"the loss was {kind} {when}; the hook `{guard}` ends such a run"

    def look(self, epoch: int, iteration: int) -> None:
        """Look at the loss of the last iteration, unless that was done before.

        Args:
            epoch: the epoch of the iteration.
            iteration: the number of iterations done.
        """
        if iteration != self._looked_at:
            self._looked_at = iteration
            self._take("the loss that was minimised last", self._model.step_values().get("loss"), epoch, iteration)

    def look_at_mean(self, stream: str, variables: Mapping[str, Any], epoch: int, iteration: int) -> None:
        """Look at the mean of the loss in a train stream's part of the epoch's data."""
        loss = variables.get("loss")
        is_last_finite = self._is_finite
        self._take(
            f"the mean of the loss of stream {stream!r}",
            loss.get("mean") if isinstance(loss, Mapping) else loss,
            epoch,
            iteration,
        )
        self._is_finite &= is_last_finite

    def warn(self) -> None:
        """Log what was noticed, once."""
        if self._message:
            _LOG.warning("%s", self._message)
            self._message = ""

    def _take(self, what: str, value: Any, epoch: int, iteration: int) -> None:
        if getattr(value, "is_meta", False):  # a tensor of torch that has no value
            return
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # there is none; of a complex tensor
            return
        self._is_finite = math.isfinite(number)
        if self._is_finite or self._first is not None:
            return
        kind = "NaN" if math.isnan(number) else "infinite"
        self._first = kind, epoch
        self._message = (
            f"{what} is {kind} in epoch {epoch} (iteration {iteration}): what the run does from there on is likely to "
            f"be of no use. `StopOnNaN: {{after_batch: true{', stop_on_inf: true' * (kind != 'NaN')}}}` in the hooks "
            "ends a run before such an update"
        )
