"""The bad examples that streams have left out: they are checked, logged and recorded at the end of each stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from emrun.base.sources import NEW
from emrun.base.types import Policy
from emrun.base.wording import counted
from emrun.loop.progress import Progress
from emrun.ranks.group import Ranks
from emrun.record.metrics_log import MetricsLog
from emrun.streams.stream import StreamWrapper, check_left_out

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadExamples:
    """Tells of the examples that all ranks have left out in an epoch of a stream.

    Args:
        progress: where the training is.
        record: gets their names.
        ranks: the ranks; rank 0 logs and records.
        policy: `main_loop.on_bad_example`.
    """

    progress: Progress
    record: MetricsLog
    ranks: Ranks
    policy: Policy

    def end_stream(self, stream: StreamWrapper) -> None:
        """Tell of the examples that a stream has left out; all ranks call this at the end of each stream."""
        if self.policy == "error":
            return
        left_out: dict[str, str] = {}
        for of_rank, rows in self.ranks.all_gathered("bad examples", (stream.left_out, stream.rows)):
            left_out |= of_rank
            check_left_out(stream.name, left_out, rows)
        if not left_out or not stream.epoch_ended or not self.ranks.is_first:
            return
        epoch = self.progress.epochs_done + self.progress.is_in_epoch
        self.record.add_left_out(epoch, self.progress.iterations_done, stream.name, left_out)
        level = logging.WARNING if self.policy == "warn" or stream.name == NEW else logging.INFO
        names = {"names": [f"{name}: {why}" for name, why in left_out.items()]}
        _LOG.log(level, "stream %r: left out %s", stream.name, counted(len(left_out), "bad example"), extra=names)
