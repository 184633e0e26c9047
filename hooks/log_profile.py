"""Log where the time of each epoch went, and what to change."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Sequence
from time import perf_counter

import torch

from emrun.base.cores import cores
from emrun.base.types import Profile
from emrun.base.wording import size_of, span
from emrun.dataset import asks_model
from emrun.hook import AbstractHook
from emrun.hooks._time_shares import Times, verdict

_LOG = logging.getLogger(__name__)
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


class LogProfile(AbstractHook):
    """Logs after each epoch where its time went, and what to change.

        hooks:
          - LogProfile

    A line has the shares of the time, the examples a second of each stream and the peak memory so far:

        epoch 3, 12 s: model 31% (train 30%, valid 1%), reading 62%, hooks 4% (ComputeStats 3%), checkpoints 1%,
        other 2%; train 5,210 examples/s, valid 9,800 examples/s; memory 610 MB
        waits for data 62% of the time: main_loop.workers: 2; `emrun bench CONFIG` measures what helps

    - `model`: forward, backward and the optimizer, without hooks. A GPU works while the loop goes on to the next batch,
      so that waiting for the GPU counts where the loop waits, usually in the model.
    - `reading`: the wait for batches. What a thread or workers read ahead does not count.
    - `hooks`: all their events, with the hook that takes the most.
    - `checkpoints`: the wait for copies of the state, and for the checkpoint before, which a thread writes.
    - `other`: the rest, e.g. checking batches and writing metrics.

    An epoch lasts from the profile of the epoch before to its own, so it includes the checkpoint of the epoch before.
    The first epoch includes what happens once, such as starting workers.

    The verdict names the first of: reading from 20% of the time on, evaluations from 50%, hooks from 10%, checkpoints
    from 10%, other if it is more than the model; else the model. It is logged when its subject changes, and at the end
    for all epochs of this process, without the first one if there are others.

    With this hook, calls of hooks are timed: less than a microsecond for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = 0.0
        self._sum = Times()
        self._count = 0
        self._subject: str | None = None

    def before_training(self) -> None:
        """Start the clock."""
        self._began = perf_counter()
        self._cores = cores()  # which reads some twenty files
        self._sum = Times()
        self._count = 0
        self._subject = None

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Log the shares of the epoch, and the verdict if it has changed."""
        now = perf_counter()
        seconds = now - self._began
        self._began = now
        loop = self.main_loop
        is_trained = epoch_id > 0 and not loop.evaluating
        trained = [name for name in streams if is_trained and name == loop.train_stream_name]
        times = Times.of(profile, streams, trained, seconds)
        _LOG.info("epoch %d, %s: %s", epoch_id, span(times.seconds), self._line(times))
        if not trained:
            return
        if self._count == 1:
            self._sum = Times()  # the first one includes what happens once
        self._sum.add(times)
        self._count += 1
        subject, text = self._verdict(times)
        if subject != self._subject:
            _LOG.info("%s", text)
        self._subject = subject

    def after_training(self, success: bool) -> None:
        """Log the shares and the verdict of all epochs."""
        if self._count > 1:
            _LOG.info("%d epochs, %s: %s", self._count, span(self._sum.seconds), self._line(self._sum))
            _LOG.info("%s", self._verdict(self._sum)[1])

    def _verdict(self, times: Times) -> tuple[str, str]:
        loop = self.main_loop
        ahead = None if asks_model(loop.dataset) else loop.reading_ahead
        return verdict(times, ahead, loop.extra_streams, self._cores)

    def _line(self, times: Times) -> str:
        shares = times.shares()
        parts = []
        for name, share in shares.items():
            more = ""
            if name == "model" and len(times.model) > 1:
                by_stream = ", ".join(
                    f"{stream} {seconds / times.seconds:.0%}" for stream, seconds in times.model.items()
                )
                more = f" ({by_stream})"
            elif name == "hooks" and times.hooks:
                dearest = max(times.hooks, key=lambda hook: times.hooks[hook])
                more = f" ({dearest} {times.hooks[dearest] / times.seconds:.0%})"
            parts.append(f"{name} {share:.0%}{more}")
        rates = [(name, times.rate(name)) for name in times.model]
        speeds = ", ".join(f"{name} {rate:,.0f} examples/s" for name, rate in rates if rate is not None)
        texts = [", ".join(parts), speeds, self._memory()]
        return "; ".join(text for text in texts if text)

    def _memory(self) -> str:
        """Return the peak memory of the process and, if the model is on a GPU, of the GPU."""
        text = f"memory {size_of(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT)}"
        device = getattr(self.main_loop.model, "device", None)
        if isinstance(device, torch.device) and device.type == "cuda":
            text += f", on the GPU {size_of(torch.cuda.max_memory_allocated(device))}"
        return text
