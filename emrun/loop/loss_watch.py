"""The check that the loss is still finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from emrun.model import AbstractModel
from emrun.ranks.parts import weighs_nothing

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Checks whether the loss is finite, and logs one warning if it is not.

    Two values are checked in each epoch: the loss that was minimised last, at the end of the train stream (this waits
    for the device), and the mean loss of the epoch.

    Args:
        model: the model, whose `step_values` has the loss that was minimised last.
    """

    def __init__(self, model: AbstractModel) -> None:
        self.outputs: Mapping[str, Any] = {}
        """The outputs of the last training batch, which may have no loss; the next `look` forgets them."""
        self._model = model
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

    def look(self, epoch: int, iteration: int) -> None:
        """Check the loss of the last iteration, once.

        Args:
            epoch: the epoch of the iteration.
            iteration: the number of iterations done.
        """
        if iteration != self._looked_at:
            self._looked_at = iteration
            loss = self._model.step_values().get("loss")
            if not weighs_nothing(self.outputs):
                self._take("the loss of the last training batch", loss, epoch, iteration)
        self.outputs = {}

    def look_at_mean(self, stream: str, variables: Mapping[str, Any], epoch: int, iteration: int) -> None:
        """Check the mean loss among the variables of a train stream in the epoch data."""
        loss = variables.get("loss")
        is_last_finite = self._is_finite
        self._take(
            f"the mean loss of stream {stream!r}",
            loss.get("mean") if isinstance(loss, Mapping) else loss,
            epoch,
            iteration,
        )
        self._is_finite &= is_last_finite

    def warn(self) -> None:
        """Log the warning, once."""
        if self._message:
            _LOG.warning("%s", self._message)
            self._message = ""

    def _take(self, what: str, value: Any, epoch: int, iteration: int) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # no loss, a complex loss, or a loss without a value
            return
        self._is_finite = math.isfinite(number)
        if self._is_finite or self._first is not None:
            return
        kind = "NaN" if math.isnan(number) else "infinite"
        self._first = kind, epoch
        self._message = (
            f"{what} is {kind} in epoch {epoch} (iteration {iteration}): the rest of the run is probably useless; to "
            f"end such a run before the update, add the hook `StopOnNaN: {{after_batch: true"
            f"{', stop_on_inf: true' * (kind != 'NaN')}}}`"
        )
