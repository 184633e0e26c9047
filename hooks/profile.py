"""Profile some iterations with torch.profiler."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from time import monotonic

import torch

from emrun.base.arguments import check_count, check_flag
from emrun.base.errors import ArgumentError
from emrun.base.tables import Table
from emrun.base.types import Batch, Interval
from emrun.base.wording import counted, in_one_line, size_of
from emrun.hook import AbstractHook
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)
_ROWS = 10
_LONGEST = 50  # characters of a name


class Profile(AbstractHook):
    """Profiles some iterations of the train stream with `torch.profiler`.

        hooks:
          - Profile: {after: 10 iterations, iterations: 5}

    The log gets a table of the ten operations that take the most time by themselves, on the GPU if there is one. The
    run directory gets a trace, `profile/it-00000010.json.gz`, for Perfetto (https://ui.perfetto.dev) or
    `chrome://tracing`. An iteration is profiled from the call of this hook in `before_batch` to its next call there, so
    it includes the other hooks and the reading of the next batch.

    Profiled iterations are slower than others; all others cost one call of this hook. When the epoch or the run ends
    within the iterations, those that were profiled are written. A run that is resumed does not repeat them.

    Args:
        after: after which iteration of the run to begin: `10 iterations`.
        iterations: how many iterations to profile.
        every: profile again after this many iterations or minutes: `1000 iterations` or `60 minutes`; by default only
            once. Minutes are counted in this process.
        keep: how many of the newest traces to keep; by default all.
        memory: whether to record the memory of operations too. The table then has a column for it.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        StorageError: the trace cannot be written.
    """

    reads = ()
    changes_batches = False
    files = ("profile/",)

    def __init__(
        self,
        after: str = "10 iterations",
        iterations: int = 5,
        every: str | None = None,
        keep: int | None = None,
        memory: bool = False,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(output_dir=output_dir)
        self._first = int(Interval.parse("after", after, ("iterations",)).count)
        check_count("iterations", iterations, minimum=1)
        check_flag("memory", memory)
        if keep is not None:
            check_count("keep", keep, minimum=1)
        self._iterations = iterations
        self._every = Interval.parse("every", every, ("iterations", "minutes")) if every is not None else None
        if self._every is not None and self._every.unit == "iterations" and self._every.count < iterations:
            raise ArgumentError("every", f"{every!r} is less than the {counted(iterations, 'iteration')} to profile")
        self._keep = keep
        self._memory = memory
        self._profiler: torch.profiler.profile | None = None
        self._begin = 0  # the iterations that were done when the profiler was started
        self._ended: float | None = None  # when the last profile ended, in seconds of `monotonic`

    def before_training(self) -> None:
        """Note whether the first iterations to profile are still to come."""
        self._ended = monotonic() if self.main_loop.iterations_done > self._first else None

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Start or end the profiler, if it is time."""
        loop = self.main_loop
        if not loop.training:
            return
        done = loop.iterations_done
        if self._profiler is not None:
            if done < self._begin + self._iterations:
                return
            self._end()
        if self._is_due(done):
            self._begin = done
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its library writes notes of its own to the terminal
            self._profiler = torch.profiler.profile(profile_memory=self._memory, acc_events=True)
            self._profiler.start()

    def after_stream(self, stream_name: str) -> None:
        """End the profiler with the train stream of an epoch."""
        self._end()

    def after_training(self, success: bool) -> None:
        """End the profiler with the run; log a warning if it has profiled nothing."""
        self._end()
        if self._ended is None and success and not self.main_loop.evaluating:
            _LOG.warning(
                "Profile: nothing was profiled: the run ended after %s; set `after` to less",
                counted(self.main_loop.iterations_done, "iteration"),
            )

    def _is_due(self, done: int) -> bool:
        if self._ended is None or self._every is None:
            return done == self._first
        if self._every.unit == "minutes":
            return monotonic() - self._ended >= self._every.count * 60
        return done > self._first and (done - self._first) % self._every.count == 0

    def _end(self) -> None:
        """End the profiler, if it runs; log the table and write the trace."""
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        profiler.stop()
        self._ended = monotonic()
        done = self.main_loop.iterations_done - self._begin
        if not done:
            _LOG.warning("Profile: no iteration ended while the profiler ran after iteration %d", self._begin)
            return
        after = f"{counted(done, 'iteration')} after iteration {self._begin}"
        _LOG.info("Profile: %s\n%s", after, _table(profiler, self._memory))
        if self.output_dir is None:
            return
        folder = Path(self.output_dir) / "profile"
        place = folder / f"it-{self._begin:08d}.json.gz"
        with storing(place, "write"):
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as aside:
                profiler.export_chrome_trace(str(Path(aside) / place.name))
                (Path(aside) / place.name).replace(place)
            if self._keep is not None:
                for old in sorted(folder.glob("it-*.json.gz"))[: -self._keep]:
                    old.unlink()
        _LOG.info("Profile: the trace is in %s", place)


def _table(profiler: torch.profiler.profile, with_memory: bool) -> Table:
    """Return the ten operations that take the most time by themselves, of all threads together."""
    operations = profiler.key_averages()
    is_on_gpu = any(operation.self_device_time_total for operation in operations)
    place = "device" if is_on_gpu else "cpu"
    time = f"self_{place}_time_total"
    memory = f"self_{place}_memory_usage"
    whole = sum(getattr(operation, time) for operation in operations) or 1.0
    rows = []
    for operation in sorted(operations, key=lambda operation: getattr(operation, time), reverse=True)[:_ROWS]:
        microseconds = getattr(operation, time)
        row = [
            in_one_line(operation.key, _LONGEST),
            str(operation.count),
            f"{microseconds / 1000:.2f}",
            f"{microseconds / whole:.1%}",
        ]
        if with_memory:
            row.append(size_of(max(0, getattr(operation, memory))))
        rows.append(row)
    head = ["operation", "calls", f"ms on the {'GPU' if is_on_gpu else 'CPU'}", "share"]
    if with_memory:
        head.append("memory")
    return Table(rows, head, ("left", *["right"] * (len(head) - 1)))
