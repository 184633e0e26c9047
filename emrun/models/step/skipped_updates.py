"""The updates that were skipped, because a hook wanted it or because gradients in float16 were not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from emrun.models.step.loss_scale import LossScale

_LOG = logging.getLogger(__name__)

NAME = "skipped_updates"
"""The name of the statistic of a train stream."""


class SkippedUpdates:
    """Counts the skipped updates of the run, and of each train stream of the epoch.

    Args:
        scale: the scale of the loss in float16; with a scale, the epoch's data have the count from the beginning,
            otherwise from the first epoch with a skipped update on.
    """

    def __init__(self, scale: LossScale | None) -> None:
        self.total = 0
        """Number of skipped updates of the run."""
        self.scale = scale
        self._streams: dict[str, int] = {}
        self._stream = ""

    def begin_epoch(self) -> None:
        """Begin to count for another epoch."""
        self._streams = {}

    def begin_stream(self, stream: str) -> None:
        """Count for a train stream, which may have begun before a resume."""
        self._stream = stream
        self._streams.setdefault(stream, 0)

    def add(self, reason: str, update: int | None, optimizer: str = "") -> None:
        """Count a skipped update; log the first one of the run.

        Args:
            reason: why it was skipped.
            update: its number, if it is known.
            optimizer: the name of its optimizer, if there are several.
        """
        self.total += 1
        self._streams[self._stream] = self._streams.get(self._stream, 0) + 1
        if self.total == 1:
            which = "an update" if update is None else f"update {update}"
            which += f" of optimizer {optimizer!r}" * bool(optimizer)
            _LOG.info("%s was skipped: %s; %s counts such updates", which, reason, NAME)

    def values(self, stream: str) -> dict[str, int]:
        """Return the number of skipped updates of a train stream in this epoch, by its name."""
        if (self.scale is None and not self.total) or stream not in self._streams:
            return {}
        return {NAME: self._streams[stream]}

    def report(self) -> None:
        """Log how many updates of the epoch were skipped, if any."""
        count = sum(self._streams.values())
        if not count:
            return
        text = f"{count} update{'s were' if count != 1 else ' was'} skipped in this epoch"
        if self.scale is None:
            _LOG.info("%s", text)
        elif (scale := self.scale.value) >= 1:
            _LOG.info("%s; the scale of the loss is now %g", text, scale)
        else:
            _LOG.warning(
                "%s; the scale of the loss has fallen to %g: values are probably too large for fp16 in the forward "
                "already; bf16 has the range of float32",
                text,
                scale,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"total": self.total, "streams": dict(self._streams)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.total, self._streams = state["total"], dict(state["streams"])
