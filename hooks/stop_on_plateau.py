"""End the training when a statistic has reached a plateau."""

from __future__ import annotations

from emrun.hook import TrainingTerminated
from emrun.hooks.on_plateau import OnPlateau


class StopOnPlateau(OnPlateau):
    """Ends the training successfully when the recent mean of a statistic is worse than its mean over a longer time.

        hooks:
          - ComputeStats: {variables: [loss]}
          - StopOnPlateau: {long_term: 20, short_term: 5}

    The arguments are those of `OnPlateau`. The values survive a resume. A run that this hook has ended ends again at
    once when it is resumed, unless its arguments have changed.
    """

    def before_training(self) -> None:
        """End a resumed training that this hook has ended already."""
        if self.main_loop.iterations_done and self.is_on_plateau:
            self.on_plateau()

    def on_plateau(self) -> None:
        """End the training."""
        raise TrainingTerminated(f"{self.plateau} (StopOnPlateau)")
