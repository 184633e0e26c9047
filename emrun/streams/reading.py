"""Who reads the streams, how far ahead of the loop, and how long the loop waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emrun.arguments import check_choice, check_count, check_seconds
from emrun.types import Prefetch, StartMethod


@dataclass(frozen=True, slots=True)
class Reading:
    """How streams are read, as the user sets it once for all of them.

    Args:
        buffer: how many batches are read ahead, by a thread or the workers; 0 for none, or two for each of the workers.
        workers: how many processes read a stream; 0 for none.
        start_method: how they are started: fork, forkserver or spawn; None for Python's default.
        timeout: seconds that the loop waits for one batch before that is an error; None for no limit. Nobody looks at
            the clock when nothing is read ahead.
        prefetch: returns what prepares the batches that are read ahead, as `AbstractModel.prefetcher` does; called at
            the beginning of a pass.

    Raises:
        ArgumentError: a value cannot be used.
    """

    buffer: int = 0
    workers: int = 0
    start_method: StartMethod | None = None
    timeout: float | None = None
    prefetch: Callable[[], Prefetch | None] = lambda: None

    def __post_init__(self) -> None:
        check_count("buffer", self.buffer)
        check_count("workers", self.workers)
        if self.start_method is not None:
            check_choice("start_method", self.start_method, StartMethod)
        if self.timeout is not None:
            check_seconds("stream_timeout", self.timeout)

    @property
    def ahead(self) -> int:
        """How many batches are read ahead in all, 0 for none."""
        return self.buffer or 2 * self.workers

    @property
    def ahead_of_each(self) -> int:
        """How many batches each of the workers reads ahead."""
        return -(-self.ahead // self.workers)
