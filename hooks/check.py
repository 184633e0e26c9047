"""End the training as a success when a variable is large enough, and as a failure when it takes too long."""

from __future__ import annotations

import logging

from emrun.base.arguments import check_count, check_number
from emrun.base.types import EpochData
from emrun.base.wording import counted
from emrun.hook import AbstractHook, Loop, TrainingAborted, TrainingTerminated
from emrun.hooks._shared.statistic import Statistic

_LOG = logging.getLogger(__name__)


class Check(AbstractHook):
    """Ends the training successfully when a mean exceeds a value, and as failed (exit status 3) at the last epoch.

        hooks:
          - ComputeStats: {variables: [accuracy]}
          - Check: {variable: accuracy, required_min_value: 0.93, max_epoch: 10}

    This is a test of a model: it must exceed 0.93 within ten epochs. `StopAfter: {epochs: 9}` next to it logs a
    warning, because the run ends as a success before the test is decided.

    Args:
        variable: the variable, of which an earlier hook writes the mean or a plain number.
        required_min_value: the value that must be exceeded.
        max_epoch: the last epoch in which it may be exceeded.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped until the last.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the statistic is missing or not a number.
        TrainingAborted: the value was not exceeded in time.
    """

    reads = ()

    def __init__(self, variable: str, required_min_value: float, max_epoch: int, stream: str = "valid") -> None:
        super().__init__()
        check_number("required_min_value", required_min_value)
        check_count("max_epoch", max_epoch)
        self._statistic = Statistic("Check", variable, "max", stream, "mean")
        self._required = required_min_value
        self._max_epoch = max_epoch
        self.monitors = (self._statistic.address,)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Keep the main loop; warn if a hook ends the run after fewer epochs."""
        super().register_mainloop(main_loop)
        epochs = main_loop.limits.get("epochs")
        if epochs is not None and epochs < self._max_epoch:
            _LOG.warning(
                "Check: max_epoch: %d is never reached, because the run ends after %s: the run does not fail if %s "
                "stays too low; for a decision, lower max_epoch",
                self._max_epoch,
                counted(epochs, "epoch"),
                self._statistic.address,
            )

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training if the value is exceeded, or if this was the last epoch for it."""
        if self.main_loop.evaluating or self.main_loop.at_end:
            return
        value = self._statistic.read(epoch_data)
        address = self._statistic.address
        required = self._required
        if value is not None and value > required:
            raise TrainingTerminated(f"{address} is {value:g}, more than {required:g}, in epoch {epoch_id} (Check)")
        if epoch_id >= self._max_epoch:
            outcome = "was not evaluated" if value is None else f"is {value:g}, not more than {required:g},"
            raise TrainingAborted(f"{address} {outcome} in epoch {epoch_id} (Check max_epoch: {self._max_epoch})")
