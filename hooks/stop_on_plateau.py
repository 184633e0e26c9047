"""End the training when a statistic has reached a plateau."""

from __future__ import annotations

from emrun.hook import TrainingTerminated
from emrun.hooks.on_plateau import OnPlateau


class StopOnPlateau(OnPlateau):
    """Ends the training successfully when the recent mean of a statistic is worse than its mean over a longer time.

        hooks:
          - ComputeStats: {variables: [loss]}
          - StopOnPlateau: {long_term: 20, short_term: 5}

    The values survive a resume. A run that this hook has ended ends again at once when it is resumed, unless its
    arguments have changed.

    Args:
        long_term: the number of evaluations of the long mean.
        short_term: the number of evaluations of the short mean.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped.
        variable: the variable, of which an earlier hook must write the mean.
        objective: `min` if smaller values are better, `max` if larger values are better.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or `long_term` is less than `short_term`.
        HookError: the statistic is missing or not a number.
    """

    def before_training(self) -> None:
        """End a resumed training that this hook has ended already."""
        if self.main_loop.iterations_done and self.is_on_plateau:
            self.on_plateau()

    def on_plateau(self) -> None:
        """End the training."""
        raise TrainingTerminated(f"{self.plateau} (StopOnPlateau)")
