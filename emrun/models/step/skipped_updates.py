"""The updates that were skipped, because a hook wanted it or because gradients in float16 were not finite."""

from __future__ import annotations

import logging

from emrun.base.types import State, Values
from emrun.base.wording import counted
from emrun.models.step.loss_scale import LossScale

_LOG = logging.getLogger(__name__)

NAME = "skipped_updates"
"""The name of the statistic of a train stream."""


class SkippedUpdates:
    """Counts the skipped updates of the run, and of the epoch.

    Args:
        scale: the scale of the loss in float16; with a scale, the epoch's data have the count from the beginning,
            otherwise from the first epoch with a skipped update on.
    """

    def __init__(self, scale: LossScale | None) -> None:
        self.total = 0
        """Number of skipped updates of the run."""
        self.scale = scale
        self._count = 0  # of the epoch
        self._stream: str | None = None  # the last train stream of the epoch, whose data have the count

    def begin_epoch(self) -> None:
        """Begin to count for another epoch."""
        self._count = 0
        self._stream = None

    def begin_stream(self, stream: str) -> None:
        """Begin a train stream."""
        self._stream = stream

    def add(self, reason: str, update: int | None, optimizer: str = "") -> None:
        """Count a skipped update; log the first one of the run.

        Args:
            reason: why it was skipped.
            update: its number, if it is known.
            optimizer: the name of its optimizer, if there are several.
        """
        self.total += 1
        self._count += 1
        if self.total == 1:
            which = "an update" if update is None else f"update {update}"
            if optimizer:
                which += f" of optimizer {optimizer!r}"
            _LOG.info("%s was skipped: %s; %s counts such updates", which, reason, NAME)

    def values(self, stream: str) -> dict[str, int]:
        """Return the number of skipped updates of this epoch, for its train stream."""
        if (self.scale is None and not self.total) or stream != self._stream:
            return {}
        return {NAME: self._count}

    def report(self) -> None:
        """Log how many updates of the epoch were skipped, if any."""
        if not self._count:
            return
        text = f"{counted(self._count, 'skipped update')} in this epoch"
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

    def state_dict(self) -> State:
        """Return the counts."""
        return {"total": self.total, "count": self._count, "stream": self._stream}

    def load_state_dict(self, state: Values, scale: Values | None) -> None:
        """Restore the counts, and the scale of the loss.

        Args:
            state: what `state_dict` has returned.
            scale: the state of the scale; None if the checkpoint has none.
        """
        self.total = state["total"]
        self._count = state["count"]
        self._stream = state["stream"]
        if self.scale is None:
            return
        if scale is not None:
            self.scale.load_state_dict(scale)
        else:
            _LOG.warning("the checkpoint has no scale of the loss, which fp16 needs: the scale begins anew")
