"""The bad examples that streams have left out: they are checked, logged and recorded at the end of each stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from emrun.base.types import Policy
from emrun.base.wording import counted
from emrun.hook import Loop
from emrun.loop.batch_calls import Calls
from emrun.loop.state import TrainingState
from emrun.ranks.group import Ranks
from emrun.record.record import Record
from emrun.streams.stream import StreamWrapper, check_left_out

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadExamples:
    """Tells of the examples that all ranks have left out in an epoch of a stream.

    Args:
        loop: counts.
        state: knows whether an epoch has begun.
        record: gets their names.
        ranks: the ranks; rank 0 logs and records.
        policy: `main_loop.on_bad_example`.
    """

    loop: Loop
    state: TrainingState
    record: Record
    ranks: Ranks
    policy: Policy

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Tell at the end of the stream."""
        if self.policy != "error":
            calls.end.append(lambda: self._tell(stream))

    def _tell(self, stream: StreamWrapper) -> None:
        own = stream.left_out, stream.rows
        found: dict[str, str] = {}
        for left_out, rows in self.ranks.all_gathered("bad examples", own) if self.ranks.several else [own]:
            found |= left_out
            check_left_out(stream.name, found, rows)
        if not found or not stream.epoch_ended:
            return
        if self.ranks.is_first:
            epoch = self.loop.training_epochs_done + self.state.is_in_epoch
            self.record.add_left_out(epoch, self.loop.iterations_done, stream.name, found)
            level = logging.WARNING if self.policy == "warn" else logging.INFO
            names = {"names": [f"{name}: {why}" for name, why in found.items()]}
            _LOG.log(level, "stream %r: left out %s", stream.name, counted(len(found), "bad example"), extra=names)
