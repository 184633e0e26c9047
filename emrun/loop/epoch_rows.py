"""The row of each epoch in the record of the run, and the count of epochs in its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emrun.base.types import EpochData
from emrun.hook import Loop
from emrun.loop.saving import Saving
from emrun.record.record import Record
from emrun.storage.run import Run


@dataclass(frozen=True)
class EpochRows:
    """Records each epoch after its hooks.

    Args:
        loop: counts.
        run: the run; None without a run directory.
        record: gets the rows.
        saving: knows whether there is a checkpoint.
    """

    loop: Loop
    run: Run | None
    record: Record
    saving: Saving

    def end_epoch(self, epoch_id: int, epoch_data: EpochData, trained: Sequence[str]) -> None:
        """Record an epoch."""
        loop = self.loop
        if not self.record.takes_epochs:
            return
        if trained and self.run is not None and self.saving.newest is None:
            self.saving.wait()  # a run with a recorded epoch but no checkpoint counts as one that has lost it
        number = epoch_id if loop.at_end else loop.training_epochs_done
        done = number, loop.iterations_done, loop.updates_done, loop.epoch_seconds
        self.record.add_epoch(*done, epoch_data, loop.shown, at_end=loop.at_end)
        if self.run is not None and not loop.at_end:
            self.run.trace.count(number, loop.iterations_done)
