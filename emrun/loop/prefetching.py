"""Whether batches are prepared for the model ahead of their turn."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from emrun.base.types import Prefetch
from emrun.events import changers_of
from emrun.hook import AbstractHook
from emrun.model import AbstractModel

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Prefetching:
    """Has the function of the model that prepares batches, while a session is open.

    Args:
        model: the model.
        hooks: the hooks, which may change batches later.
        is_on: whether batches may be prepared.
    """

    model: AbstractModel
    hooks: list[AbstractHook]
    is_on: bool
    _prefetch: Prefetch | None = field(default=None, init=False)

    def current(self) -> Prefetch | None:
        """Return the function that prepares batches; None if there is none."""
        return self._prefetch

    def begin(self) -> None:
        """Ask the model for the function, unless a hook may change batches."""
        self._prefetch = self.model.prefetcher() if self.is_on else None
        changers = changers_of(self.hooks, self.model)
        if self._prefetch is not None and changers:
            self._prefetch = None
            _LOG.info(
                "batches are not copied to the device ahead of their turn, because %s.before_batch may change them; a "
                "hook that only looks at batches can set `changes_batches = False`",
                changers[0],
            )
