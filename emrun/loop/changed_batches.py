"""Batches that hooks may change before the model gets them, and what a replay of these hooks needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emrun.base.types import Batch
from emrun.ranks.shares import like
from emrun.storage.draws import Draws


class ChangedBatches:
    """Gives hooks a copy of a batch, and remembers the batch and the random states that each hook got.

    Args:
        draws: records the random states before each hook that may change a batch; None if failures are not saved.
    """

    def __init__(self, draws: Draws | None) -> None:
        self._draws = draws
        self.by: list[str] = []
        """Class names of the hooks, and of the model, that may change a batch."""
        self.offered: Batch | None = None
        """The batch that the last called hook got."""
        self.last: tuple[str, Batch] | None = None
        """The last batch with all changes, and the name of its stream."""

    def announce(self, notify: Callable[..., None], stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch after `before_batch` of all hooks, which may have changed the copy."""
        changed = like(batch)
        notify("before_batch", stream_name=stream_name, batch=changed)
        if self._draws is not None:
            self._draws.before_model()
        self.last = stream_name, changed
        return changed

    def offer(self, call: Callable[..., Any], stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook."""
        self.offered = dict(batch)
        if self._draws is not None:
            self._draws.before_hook()
        call(stream_name=stream_name, batch=batch)
