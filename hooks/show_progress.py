"""Show a progress bar for each stream."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

from emrun.hook import AbstractHook

tqdm.monitor_interval = 0  # no monitor thread


class ShowProgress(AbstractHook):
    """Shows a bar with the remaining time for each stream; nothing when standard error is no terminal.

    Nor with `--no-progress` or `--quiet`, or the environment variable TQDM_DISABLE.

        hooks:
          - ShowProgress

    The number of batches is that of `dataset.num_batches`, of `main_loop.fixed_epoch_size`, or of the pass before.
    """

    reads = ()

    def __init__(self, dataset: Any = None) -> None:
        super().__init__(dataset=dataset)
        self._totals: dict[str, int] = {}
        self._bar: Any = None
        self._count = 0
        self._epoch = 0

    def before_training(self) -> None:
        """Find out how long the streams are."""
        self._totals = dict(getattr(self.dataset, "num_batches", None) or {})
        if self.main_loop.fixed_epoch_size is not None:
            self._totals[self.main_loop.train_stream_name] = self.main_loop.fixed_epoch_size

    def before_epoch(self, epoch_id: int) -> None:
        """Take note of the number of the epoch."""
        self._epoch = epoch_id

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Move the bar on."""
        if self._bar is None:
            self._count = 0
            self._bar = tqdm(
                total=self._totals.get(stream_name),
                desc=f"epoch {self._epoch} {stream_name}",
                unit="batch",
                leave=False,
                file=sys.stderr,
                disable=not sys.stderr.isatty() or bool(os.environ.get("TQDM_DISABLE")),
                dynamic_ncols=True,
            )
        self._count += 1
        self._bar.update()

    def after_stream(self, stream_name: str) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._totals[stream_name] = self._count
        self._close()

    def after_training(self, success: bool) -> None:
        """Remove the bar of a stream that did not come to its end."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
