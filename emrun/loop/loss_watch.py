"""Ends a training whose loss is not finite. On a CPU, the model refuses the update before."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emrun.base.arguments import check_choice
from emrun.base.finite import as_number, kind_of, not_finite
from emrun.base.types import EpochData, Policy
from emrun.hook import TrainingAborted
from emrun.loop.progress import Progress
from emrun.loop.step_log import StepLog
from emrun.model import AbstractModel
from emrun.ranks.parts import weighs_nothing

_LOG = logging.getLogger(__name__)


class LossWatch:
    """Checks whether the loss is finite; ends the training if it is not, or logs one warning.

    The losses that were minimised are checked before each checkpoint and at the end of the train stream; this waits for
    the device. If updates were skipped, or examples have weights, only the last loss is checked. The mean loss of an
    epoch is checked too; it is only warned of, because it may have examples that are not minimised.

    Args:
        model: its `step_values` has the loss that was minimised last.
        progress: where the training is.
        steps: records the losses.
        on_nan_loss: `main_loop.on_nan_loss`.
    """

    def __init__(self, model: AbstractModel, progress: Progress, steps: StepLog, on_nan_loss: Policy) -> None:
        self._outputs: Mapping[str, Any] = {}  # of the last training batch, if its examples have weights
        self._model = model
        self._progress = progress
        self._steps = steps
        check_choice("on_nan_loss", on_nan_loss, Policy)
        self.on_nan_loss = on_nan_loss
        """What happens when the loss is not finite."""
        self._looked_at = 0  # the last iteration that was checked
        self._skipped = 0  # how many updates of the run were skipped until then
        self._first: tuple[str, int] | None = None  # the first loss that was not finite: its kind, its epoch
        self._message = ""  # the warning, until it is logged
        self._is_finite = True

    @property
    def warning(self) -> str | None:
        """The warning for the end of the training; None if the loss was always finite."""
        if self._first is None or self.on_nan_loss == "ignore":
            return None
        kind, epoch = self._first
        when = f"in epoch {epoch}" if self._is_finite else f"from epoch {epoch} on"
        return f"the loss was {kind} {when}"

    def noting(self, run: Callable[..., Any], outputs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a function that runs the model on a training batch whose examples have weights, and keeps the outputs.

        Args:
            run: runs the model.
            outputs: those of the batch before.
        """
        self._outputs = outputs

        def noted(*arguments: Any) -> Any:
            self._outputs = run(*arguments)
            return self._outputs

        return noted

    def look(self) -> None:
        """Check the losses of the iterations since the last call: the last one, and those that are still recorded.

        Raises:
            TrainingAborted: one is not finite, and an update was made with it.
        """
        progress = self._progress
        before = self._looked_at
        weighted = self._outputs
        self._outputs = {}
        skipped = self._model.skipped_updates - self._skipped
        self._looked_at = progress.iterations_done
        self._skipped = self._model.skipped_updates
        if progress.iterations_done == before or weighs_nothing(weighted):
            return
        last = as_number(self._model.step_values().get("loss"))
        if self.on_nan_loss == "error" and self._model.has_updated is not False:
            earlier = {} if skipped or weighted else self._steps.losses_after(before)
            for iteration, loss in {**earlier, progress.iterations_done: last}.items():
                if not math.isfinite(loss):
                    raise TrainingAborted(
                        f"{not_finite(loss, iteration)}, and its update is made; no checkpoint has its weights. For "
                        "emrun replay, resume with the hook `StopOnNaN: {after_batch: true, stop_on_inf: true}`"
                    )
        self._take("the loss of the last training batch", last, progress.epochs_done + 1)

    def end_epoch(self, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Check the mean losses of the train streams in the epoch data; log the warning."""
        for name in trained:
            loss = epoch_data.get(name, {}).get("loss")
            is_last_finite = self._is_finite
            mean = loss.get("mean") if isinstance(loss, Mapping) else loss
            self._take(f"the mean loss of stream {name!r}", as_number(mean), self._progress.epochs_done)
            self._is_finite &= is_last_finite
        self.warn()

    def warn(self) -> None:
        """Log the warning, once."""
        if self._message and self.on_nan_loss != "ignore":
            _LOG.warning("%s", self._message)
            self._message = ""

    def _take(self, what: str, number: float, epoch: int) -> None:
        self._is_finite = math.isfinite(number)
        if self._is_finite or self._first is not None:
            return
        self._first = kind_of(number), epoch
        place = f"in epoch {epoch} (iteration {self._progress.iterations_done})"
        self._message = f"{what} is {kind_of(number)} {place}: the rest of the run is probably useless"
