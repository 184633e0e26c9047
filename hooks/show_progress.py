"""Show a progress bar for each stream."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from emrun.dataset import stream_lengths
from emrun.hook import AbstractHook

tqdm.monitor_interval = 0  # no monitor thread
_EPOCHS = {False: ("epochs", "passes"), True: ("epochs",)}  # units of an epoch, without and with `fixed_epoch_size`
_SECONDS = 0.25  # between two reads of the loss, which may wait for the device


class ShowProgress(AbstractHook):
    """Shows a progress bar with the remaining time for each stream.

    There is no bar if standard error is not a terminal, with `--no-progress` or `--quiet`, or if the environment
    variable `TQDM_DISABLE` is set.

        hooks:
          - ShowProgress

    The bar of the train stream shows the loss of the last update, if the model reports the loss, and the time left of
    the whole run, evaluations included, if a hook such as `StopAfter` limits the epochs or iterations. Reading the loss
    waits for the device, at most four times per second.

    The number of batches comes from `dataset.num_batches`, the settings of `main_loop`, or the previous epoch.
    """

    reads = ()

    def __init__(self, dataset: Any = None) -> None:
        super().__init__(dataset=dataset)
        self._totals: dict[str, int] = {}
        self._bar: Any = None
        self._count = 0
        self._epoch = 0
        self._began: tuple[int, float] | None = None  # after the first iteration in this process: iterations, time

    def before_training(self) -> None:
        """Find the number of batches of each stream."""
        self._totals = stream_lengths(self.dataset)
        for name, size in self.main_loop.stream_sizes.items():
            self._totals[name] = min(size, self._totals.get(name) or size)
        if self.main_loop.fixed_epoch_size is not None:  # may be more than a pass
            self._totals[self.main_loop.train_stream_name] = self.main_loop.fixed_epoch_size

    def before_epoch(self, epoch_id: int) -> None:
        """Remember the number of the epoch."""
        self._epoch = epoch_id

    def after_batch(self, stream_name: str) -> None:  # type: ignore[override]
        """Advance the bar by one batch."""
        if self._bar is None:
            self._count = 0
            if self._began is None and self.main_loop.training:
                self._began = self.main_loop.iterations_done, self.main_loop.model.clock()
            self._bar = _Bar(
                tell=self._state if self.main_loop.training else None,
                total=self._totals.get(stream_name),
                desc=f"epoch {self._epoch} {stream_name}",
                unit="batch",
                leave=False,
                file=sys.stderr,
                disable=not sys.stderr.isatty() or bool(os.environ.get("TQDM_DISABLE")),
                **_size(),
                mininterval=_SECONDS,
            )
        self._count += 1
        self._bar.update()

    def after_stream(self, stream_name: str) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._totals[stream_name] = self._count
        self._close()

    def after_training(self, success: bool) -> None:
        """Remove the bar of a stream that was not read to its end."""
        self._close()

    def _state(self) -> str:
        """Return the loss of the last update and the time left of the run, as far as they are known."""
        loss, left = self.main_loop.model.step_values().get("loss"), self._seconds_left()
        parts = [] if loss is None else [f"loss {float(loss):.4g}"]
        if left is not None:
            parts.append(f"{tqdm.format_interval(left)} left of the run")
        return ", ".join(parts)

    def _seconds_left(self) -> float | None:
        """Return the seconds until the first limit of a hook, at the pace of this process; None if not known."""
        loop = self.main_loop
        limits, length = loop.limits, self._totals.get(loop.train_stream_name)
        first, began = self._began or (0, 0.0)
        left = [limits["iterations"] - loop.iterations_done] if "iterations" in limits else []
        if "updates" in limits:
            left.append((limits["updates"] - loop.updates_done) * loop.model.iterations_per_update)
        epochs = [limits[unit] for unit in _EPOCHS[loop.fixed_epoch_size is not None] if unit in limits]
        if epochs and length is not None:
            left.append((min(epochs) - loop.training_epochs_done) * length - self._count)
        if not left or self._began is None or loop.iterations_done == first:
            return None
        return max(0, min(left)) * (loop.model.clock() - began) / (loop.iterations_done - first)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def _size() -> dict[str, Any]:
    """Return the size of the bar: that of the terminal, or 80 columns if the terminal does not know its size."""
    try:
        is_known = os.get_terminal_size(sys.stderr.fileno()).columns > 0  # 0 within `script`, for example
    except (OSError, ValueError):  # not a file
        is_known = True
    return {"dynamic_ncols": True} if is_known else {"ncols": 80, "nrows": 24}


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar that reads its postfix, such as the loss, only when the bar is drawn."""

    def __init__(self, *args: Any, tell: Callable[[], str] | None, **kwargs: Any) -> None:
        self._tell = tell
        super().__init__(*args, **kwargs)

    def refresh(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the bar with the current postfix."""
        if self._tell is not None:
            self.set_postfix_str(self._tell(), refresh=False)
        return super().refresh(*args, **kwargs)
