"""The length of a pass that a stream asks of `ctx.batches`, found without making a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from emrun.base.randomness import preserved_randomness
from emrun.base.slow_start import NamedWhenSlow
from emrun.dataset import takes_context
from emrun.stream_context import Rows, StreamContext
from emrun.streams.stream_pass import is_stateful

_MOST_CALLS = 1_000  # of `ctx.batches` in a pass; a stream without an end makes more


def asked_length(function: Callable[..., Iterable[Any]], name: str, seed: int, batch_size: int | None) -> int | None:
    """Return how many batches the first training pass of a stream asks of `ctx.batches`; None if this does not tell.

    The stream is run with a context whose `batches` yields nothing. Only a generator that is new for each pass is run:
    others could lose a batch.

    Args:
        function: the function of the stream.
        name: the name of the stream.
        seed: the seed of the run.
        batch_size: the length of the batches to count; None for all.
    """
    if not takes_context(function):
        return None
    context = _Asked(name, seed=seed, epoch=1)
    slow = NamedWhenSlow(f"counting the batches of stream {name!r}")
    with preserved_randomness(), slow, suppress(Exception):  # of the user's code, which a pass raises too
        stream: Any = function(context)
        if not is_stateful(stream) and function(context) is not stream:
            batches = iter(stream)
            if inspect.isgenerator(batches):
                has_batch = any(True for _ in batches)
                batches.close()
                return None if has_batch else context.count(batch_size)
    return None


class _Asked(StreamContext):
    """Notes what a stream asks of `batches`."""

    def __init__(self, stream_name: str, *, seed: int, epoch: int) -> None:
        super().__init__(stream_name, seed=seed, epoch=epoch)
        self._asked: list[tuple[int, int | list[int], bool]] = []

    def batches(
        self,
        n: int,
        batch_size: int | list[int],
        shuffle: bool = False,
        drop_last: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> Iterator[Rows]:
        self._asked.append((n, batch_size, drop_last))
        if len(self._asked) > _MOST_CALLS:
            raise RuntimeError("the pass has no end")
        return iter(())

    def count(self, length: int | None) -> int | None:
        """Return the number of batches, or of those of one length; None if nothing was asked, or other lengths."""
        if length is not None and any(size != length for _, size, _ in self._asked):
            return None
        counts = [
            len(size) if isinstance(size, list) else (n if is_whole or length else n + size - 1) // size
            for n, size, is_whole in self._asked
        ]
        return sum(counts) or None
