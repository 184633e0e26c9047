"""Show a progress bar for each stream, or log lines where there is no terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from tqdm import tqdm
from tqdm.std import Bar  # type: ignore[attr-defined]  # its stubs lack the class

from emrun.base.tables import width
from emrun.base.wording import short
from emrun.dataset import stream_lengths
from emrun.hook import AbstractHook

_LOG = logging.getLogger(__name__)

tqdm.monitor_interval = 0  # no monitor thread
_EPOCHS = {False: ("epochs", "passes"), True: ("epochs",)}  # units of an epoch, without and with `fixed_epoch_size`
_SECONDS = 0.25  # between two looks of the bar, which reads the loss and may wait for the device
_MINUTES = (1, 2, 5, 10)  # of an epoch, after which there is a line where there is no bar; then every 10 minutes
_LEAST = 4  # columns of the bar itself


class ShowProgress(AbstractHook):
    """Shows a progress bar with the remaining time for each stream; without a terminal, log lines from time to time.

    `emrun train` and `emrun resume` add this hook to every config that does not list it.

        hooks:
          - ShowProgress

    The bar of the train stream shows the loss of the last update, if the model reports the loss, and the time left of
    the whole run, evaluations included, if a hook such as `StopAfter` limits the epochs or iterations. Reading the loss
    waits for the device, at most four times per second. A narrow terminal shows fewer numbers.

    There is no bar if standard error is not a terminal, with `--no-progress`, or if the environment variable
    `TQDM_DISABLE` is set. Then an epoch that takes long has a line in the log after 1, 2, 5 and 10 minutes, and every
    10 minutes from then on: `epoch 3  train  1200 of 5000 batches  loss 0.1240  12:30 left`. With `--quiet` the
    terminal shows neither.

    The number of batches comes from `dataset.num_batches`, the settings of `main_loop`, or the previous epoch.
    """

    reads = ()

    def __init__(self, dataset: Any = None) -> None:
        super().__init__(dataset=dataset)
        self._totals: dict[str, int] = {}
        self._bar: _Bar | None = None
        self._stream: str | None = None
        self._count = self._resumed_at = 0  # batches of the stream; how many of them another process has run
        self._epoch = 0
        self._epoch_began = self._stream_began = self._due = 0.0
        self._began: tuple[int, float] | None = None  # after the first iteration in this process: iterations, time

    def before_training(self) -> None:
        """Find the number of batches of each stream."""
        self._totals = stream_lengths(self.dataset)
        for name, size in self.main_loop.stream_sizes.items():
            self._totals[name] = min(size, self._totals.get(name) or size)
        if self.main_loop.fixed_epoch_size is not None:  # may be more than a pass
            self._totals[self.main_loop.train_stream_name] = self.main_loop.fixed_epoch_size

    def before_epoch(self, epoch_id: int) -> None:
        """Remember the number of the epoch, and when it began."""
        self._epoch = epoch_id
        self._epoch_began = monotonic()
        self._count = 0

    def after_batch(self, stream_name: str) -> None:  # type: ignore[override]
        """Advance the bar by one batch, or log a line if it is time."""
        now = monotonic()
        if self._stream is None:
            self._begin(stream_name, now)
        self._count += 1
        if now < self._due:
            return
        if self._bar is not None:
            self._due = now + _SECONDS
            self._bar.update(self._count - self._bar.n)
        else:
            self._log(stream_name, now)

    def after_stream(self, stream_name: str) -> None:
        """Remove the bar."""
        if self._stream is not None:
            self._totals[stream_name] = self._count
        self._close()

    def after_training(self, success: bool) -> None:
        """Remove the bar of a stream that was not read to its end."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches of the stream there were so far."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count there."""
        self._count = state["count"]

    def _begin(self, stream: str, now: float) -> None:
        """Begin with the bar of a stream, if bars can be seen and are wanted."""
        self._stream = stream
        self._stream_began = now
        self._resumed_at = self._count
        if self._began is None and self.main_loop.training:
            self._began = self.main_loop.iterations_done, monotonic()
        if not getattr(sys.stderr, "isatty", bool)() or os.environ.get("TQDM_DISABLE"):
            self._due = self._epoch_began + 60 * _next_minute((now - self._epoch_began) / 60)
            return
        self._due = now + _SECONDS
        self._bar = _Bar(
            tell=self._state if self.main_loop.training else None,
            total=self._totals.get(stream),
            initial=self._count,
            desc=f"epoch {self._epoch} {stream}",
            leave=False,
            file=sys.stderr,
            mininterval=0,
            miniters=1,
        )

    def _log(self, stream: str, now: float) -> None:
        """Log how far the stream is."""
        self._due = self._epoch_began + 60 * _next_minute((now - self._epoch_began) / 60)
        total = self._totals.get(stream)
        parts = [f"{self._count}{'' if total is None else f' of {total}'} batches"]
        loss, left = self._state() if self.main_loop.training else ("", "")
        done = self._count - self._resumed_at - 1  # since the time at which the stream began
        if total is not None and done > 0:
            seconds = max(0, total - self._count) * (now - self._stream_began) / done
            parts += [loss, f"{tqdm.format_interval(seconds)} left"]
        parts.append(left)
        _LOG.info("epoch %d  %s  %s", self._epoch, stream, "  ".join(part for part in parts if part))

    def _state(self) -> tuple[str, str]:
        """Return the loss of the last update and the time left of the run; empty texts for what is not known."""
        loss = self.main_loop.model.step_values().get("loss")
        left = self._seconds_left()
        return (
            "" if loss is None else f"loss {float(loss):.4g}",
            "" if left is None else f"run {tqdm.format_interval(left)} left",
        )

    def _seconds_left(self) -> float | None:
        """Return the seconds until the first limit of a hook, at the pace of this process; None if not known."""
        loop = self.main_loop
        limits = loop.limits
        length = self._totals.get(loop.train_stream_name)
        first, began = self._began or (0, 0.0)
        left = [limits["iterations"] - loop.iterations_done] if "iterations" in limits else []
        if "updates" in limits:
            left.append((limits["updates"] - loop.updates_done) * loop.model.iterations_per_update)
        epochs = [limits[unit] for unit in _EPOCHS[loop.fixed_epoch_size is not None] if unit in limits]
        if epochs and length is not None:
            left.append((min(epochs) - loop.training_epochs_done) * length - self._count)
        if not left or self._began is None or loop.iterations_done == first:
            return None
        return max(0, min(left)) * (monotonic() - began) / (loop.iterations_done - first)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = self._stream = None
        self._count = 0


def _next_minute(minutes: float) -> int:
    """Return the minute of an epoch after which its next line is due."""
    for minute in _MINUTES:
        if minute > minutes:
            return minute
    return 10 * (int(minutes / 10) + 1)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar that fits into the terminal: the rate, the time of the run and the times are left out where it is narrow.

    Args:
        tell: returns the loss and the time left of the run, when the bar is drawn; None if there are none.
    """

    def __init__(self, *args: Any, tell: Callable[[], tuple[str, str]] | None, **kwargs: Any) -> None:
        self._tell = tell
        super().__init__(*args, **kwargs)

    def __str__(self) -> str:
        facts = self.format_dict
        n = facts["n"]
        total = facts["total"]
        rate = facts["rate"]
        elapsed = facts["elapsed"]
        done = n - facts["initial"]
        rate = rate or (done / elapsed if elapsed and done > 0 else None)
        loss, run = self._tell() if self._tell is not None else ("", "")
        times = tqdm.format_interval(elapsed)
        if total and rate:
            times += f"<{tqdm.format_interval(max(0, total - n) / rate)}"
        pace = ""
        if rate:
            pace = f"{short(rate)} batches/s" if rate >= 1 else f"{short(1 / rate)} s/batch"
        is_known = bool(total) and n <= total
        head = f"{self.desc}: {100 * n / total:3.0f}%|" if is_known else f"{self.desc}: "
        columns = width(self.fp)
        for parts in ([times, pace, loss, run], [times, loss, run], [times, loss], [loss], []):
            shown = ", ".join(filter(None, parts))
            end = f"{f'| {n}/{total}' if is_known else f'{n} batches'}{shown and f' [{shown}]'}"
            space = 10 if columns is None else columns - len(head) - len(end)
            if space >= _LEAST * is_known:
                break
        if not is_known:
            return head + end
        return f"{head}{Bar(n / total, max(space, 1), Bar.ASCII if facts['ascii'] else Bar.UTF)}{end}"
