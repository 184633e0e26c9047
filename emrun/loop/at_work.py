"""The step that is being made: what its callbacks got and did, for those who keep a failed step."""

from __future__ import annotations

from typing import Any

from emrun.base.types import Batch
from emrun.storage.step_randomness import StepRandomness


class StepAtWork:
    """Knows the batches that hooks got, the random states at that time, and the call of a hook that failed.

    Args:
        randomness: records the random states before each hook that may change a batch; None if failures are not kept.
    """

    def __init__(self, randomness: StepRandomness | None) -> None:
        self.randomness = randomness
        self.offered: Batch | None = None
        """The batch that the last called hook got in `before_batch`, if hooks may change batches."""
        self.failed_event: str | None = None
        """The event in which a hook or the model failed; None if this is not known."""
        self.failed: Any = None
        """The hook or the model that failed."""
        self._changed: Batch | None = None  # the last batch with the changes of all hooks
        self._stream_name = ""  # of this batch

    def offer(self, batch: Batch) -> None:
        """Note the batch that a hook, which may change the batch, gets now."""
        self.offered = dict(batch)
        if self.randomness is not None:
            self.randomness.before_hook()

    def change(self, stream_name: str, batch: Batch) -> None:
        """Note a batch with the changes of all hooks."""
        if self.randomness is not None:
            self.randomness.before_model()
        self._stream_name = stream_name
        self._changed = batch

    def changed(self, stream_name: str) -> Batch | None:
        """Return the last batch of a stream with the changes of all hooks; None if no hook may change batches."""
        return self._changed if self._stream_name == stream_name else None

    def fail(self, event: str, listener: Any) -> None:
        """Note that a hook or the model failed in an event, or asks to keep the step."""
        self.failed_event = event
        self.failed = listener

    def forget_failure(self) -> None:
        """Forget what `fail` has noted."""
        self.failed_event = None
        self.failed = None
