"""Log how long an example takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import mean, median

from emrun.base.arguments import check_count
from emrun.base.types import Profile
from emrun.hook import AbstractHook

_LOG = logging.getLogger(__name__)


class Benchmark(AbstractHook):
    """Logs after each epoch how long the model takes for an example of each stream: mean and median over the batches.

        hooks:
          - Benchmark

    The last batch of a stream is left out, because it may be shorter; so is a stream of one batch. In the train stream
    this is the time of forward, backward and update. `emrun bench` measures how fast streams are read, and `LogProfile`
    logs what the time of an epoch is spent on.

    Args:
        batch_size: the number of examples by which the time of a batch is divided; by default that of each batch.

    Raises:
        ArgumentError: `batch_size` is not a whole number above 0.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        if batch_size is not None:
            check_count("batch_size", batch_size, minimum=1)
        self._batch_size = batch_size

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Log a line for each stream."""
        for name in streams:
            seconds = profile.get(f"eval_batch_{name}", ())
            lengths = profile.get(f"batch_length_{name}", ())
            examples = [
                duration / (self._batch_size or length)
                for duration, length in zip(seconds[:-1], lengths[:-1], strict=True)
                if self._batch_size or length
            ]
            if examples:
                _LOG.info("%s: %.3g ms an example (median %.3g ms)", name, mean(examples) * 1e3, median(examples) * 1e3)
