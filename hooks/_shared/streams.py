"""The argument `streams` of hooks that look at some streams only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emrun.base.errors import ArgumentError
from emrun.dataset import check_streams
from emrun.hook import AbstractHook, Loop


class OfStreams(AbstractHook):
    """Base class of hooks that read some streams only.

    Args:
        streams: the names of the streams; None for all.
        variables: what is read of each batch. Streams that are left out need not have it, so it is declared as `reads`
            only if all streams are read.
        model: the model.
        dataset: the dataset.
        output_dir: the run directory.

    Raises:
        ArgumentError: `streams` is not a list of names.
    """

    whole_batches = True

    def __init__(
        self,
        streams: Sequence[str] | None,
        variables: Sequence[str] = (),
        *,
        model: Any = None,
        dataset: Any = None,
        output_dir: Any = None,
    ) -> None:
        super().__init__(model=model, dataset=dataset, output_dir=output_dir)
        is_list = isinstance(streams, list | tuple) and bool(streams)
        if streams is not None and not (is_list and all(isinstance(name, str) for name in streams)):
            raise ArgumentError("streams", f"{streams!r} is not a list of streams such as [valid]")
        self._streams = None if streams is None else frozenset(streams)
        self.reads = tuple(variables) if streams is None else None

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the dataset has the streams.

        Raises:
            HookError: it does not have one of them.
        """
        super().register_mainloop(main_loop)
        check_streams(
            self._streams or (), main_loop.dataset, main_loop.extra_streams, f"{type(self).__name__} reads", self._index
        )

    @property
    def _index(self) -> int:
        """The place of the hook in the config."""
        return [hook is self for hook in self.main_loop.hooks].index(True)

    def looks_at(self, stream: str) -> bool:
        """Return whether a stream is read."""
        return self._streams is None or stream in self._streams
