"""The argument `streams` of hooks that look at some streams only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emrun.base.errors import ArgumentError
from emrun.dataset import check_streams
from emrun.hook import AbstractHook, Loop


class Streams:
    """The streams whose batches a hook reads.

    Args:
        streams: their names; None for all.

    Raises:
        ArgumentError: this is not a list of names.
    """

    def __init__(self, streams: Sequence[str] | None) -> None:
        is_list = isinstance(streams, list | tuple) and bool(streams)
        if streams is not None and not (is_list and all(isinstance(name, str) for name in streams)):
            raise ArgumentError("streams", f"{streams!r} is not a list of streams such as [valid]")
        self.names = None if streams is None else frozenset(streams)
        """Their names; None for all."""

    def __contains__(self, name: str) -> bool:
        return self.names is None or name in self.names

    def reads(self, variables: Sequence[str]) -> Sequence[str] | None:
        """Return what the hook declares as `reads`: streams that it leaves out need not have the variables."""
        return tuple(variables) if self.names is None else None

    def check(self, hook: Any, main_loop: Any) -> None:
        """Check, when the hook is registered, that the dataset has the streams.

        Raises:
            HookError: it does not have one of them.
        """
        index = [each is hook for each in main_loop.hooks].index(True)
        owner = f"{type(hook).__name__} reads"
        check_streams(self.names or (), main_loop.dataset, main_loop.extra_streams, owner, index)


class OfStreams(AbstractHook):
    """Base class of hooks that read some streams only; a derived class sets `_streams`."""

    _streams: Streams

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the dataset has the streams."""
        super().register_mainloop(main_loop)
        self._streams.check(self, main_loop)
