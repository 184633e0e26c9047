"""How streams are read: by which thread or processes, how far ahead of the loop, and with which time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from emrun.base.arguments import check_choice, check_count, check_seconds
from emrun.base.errors import ArgumentError
from emrun.base.types import Policy, Prefetch, Reader, StartMethod
from emrun.dataset import ASKS, asks_model


@dataclass(frozen=True, slots=True)
class Reading:
    """How streams are read; the user sets this once for all streams.

    Args:
        buffer: the number of batches that a thread or the workers read ahead; None for none, or with workers for two
            batches per worker; 0 with workers likewise.
        workers: the number of processes that read a stream; 0 for none.
        start_method: how the processes are started: fork, forkserver or spawn; None for Python's default.
        timeout: the seconds that the loop waits for one batch before an error is raised; None for no limit. Without
            read-ahead the limit has no effect.
        on_bad_example: with `warn`, the first examples of an epoch that a stream leaves out are logged.
        prefetch: called at the beginning of a pass; returns a function that prepares the batches that are read ahead,
            as `AbstractModel.prefetcher` does.

    Raises:
        ArgumentError: a value is invalid.
    """

    buffer: int | None = None
    workers: int = 0
    start_method: StartMethod | None = None
    timeout: float | None = None
    prefetch: Callable[[], Prefetch | None] = lambda: None
    on_bad_example: Policy = "error"

    def __post_init__(self) -> None:
        if self.buffer is not None:
            check_count("buffer", self.buffer)
        check_count("workers", self.workers)
        if self.start_method is not None:
            check_choice("start_method", self.start_method, StartMethod)
        check_choice("on_bad_example", self.on_bad_example, Policy)
        if self.timeout is not None:
            check_seconds("stream_timeout", self.timeout)

    def of(self, dataset: Any) -> Reading:
        """Return how the streams of a dataset are read: without a setting, as many batches ahead as the dataset says.

        Raises:
            ArgumentError: the attribute `read_ahead` of the dataset is not a number of batches, or the dataset asks the
                model and cannot be read ahead.
        """
        key = "workers" if self.workers else "buffer"
        if asks_model(dataset):
            if self.ahead:
                raise ArgumentError(key, f"{type(dataset).__name__} takes the model: {ASKS}; remove the key")
            return self
        if self.buffer is not None or self.workers:
            return self
        buffer = getattr(dataset, "read_ahead", 0)
        check_count("read_ahead", buffer)
        return replace(self, buffer=buffer)

    @property
    def by(self) -> Reader:
        """Who reads the streams."""
        if self.workers:
            return "worker"
        return "thread" if self.buffer else "loop"

    @property
    def ahead(self) -> int:
        """The number of batches that are read ahead in total, 0 for none."""
        return self.buffer or 2 * self.workers

    @property
    def ahead_of_each(self) -> int:
        """The number of batches that each worker reads ahead."""
        return -(-self.ahead // self.workers)
