"""What is timed for `after_epoch_profile` only when somebody listens to it, so that other runs do not pay for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

from emrun.base.types import Batch, Profile

_WITHIN = {
    "before_update": "hooks_in_updates",
    "after_update": "hooks_in_updates",
    "after_checkpoint": "hooks_in_checkpoints",
}
"""Event -> the key of its seconds, which the time of the model or of the checkpoints includes."""


class Profiling:
    """Times an epoch: reading, model and hooks for each batch, checkpoints, and the sum of each hook in all its events.

    Args:
        examples: returns the number of examples in the current batch.
    """

    def __init__(self, examples: Callable[[], int]) -> None:
        self._examples = examples
        self._of_hooks: dict[str, float] = {}
        self._saving = array("d")  # since the last profile
        self.seconds: Profile = {}
        """The profile of the epoch."""

    def timed(self, call: Callable[..., Any], hook: object, event: str) -> Callable[..., Any]:
        """Return a method of a hook that also adds up the time of its calls."""
        name = f"hook_{type(hook).__name__}"
        within = _WITHIN.get(event)
        seconds = self._of_hooks
        seconds.setdefault(name, 0.0)

        @wraps(call)
        def timed(**arguments: Any) -> None:
            began = perf_counter()
            try:
                call(**arguments)
            finally:
                passed = perf_counter() - began
                seconds[name] += passed
                if within is not None:
                    seconds[within] = seconds.get(within, 0.0) + passed

        return timed

    def begin_epoch(self) -> None:
        """Begin the profile of an epoch."""
        self.seconds = {"save_checkpoints": self._saving}

    def batches_of(self, stream_name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a stream, timed."""
        return timed_batches(batches, self._array(f"read_batch_{stream_name}"))

    def run_of(self, stream_name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the model on a batch of a stream, timed, and then notes the length of the batch."""
        timed = _timed(run, self._array(f"eval_batch_{stream_name}"))
        lengths = self._array(f"batch_length_{stream_name}")

        def run_timed(*arguments: Any) -> Any:
            outputs = timed(*arguments)
            lengths.append(self._examples())
            return outputs

        return run_timed

    def report_of(self, stream_name: str, report: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `after_batch` of the hooks for a batch of a stream, timed."""
        return _timed(report, self._array(f"after_batch_hooks_{stream_name}"))

    def _array(self, key: str) -> array[float]:
        return self.seconds.setdefault(key, array("d"))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a block that saves checkpoints."""
        began = perf_counter()
        yield
        self._saving.append(perf_counter() - began)

    def end_epoch(self, seconds: float) -> Profile:
        """Return the profile of the epoch; the checkpoints that follow belong to the next one.

        Args:
            seconds: what `after_epoch` of the hooks has taken.
        """
        self.seconds["after_epoch_hooks"] = array("d", [seconds])
        self.seconds.update({name: array("d", [total]) for name, total in self._of_hooks.items()})
        self._of_hooks.update(dict.fromkeys(self._of_hooks, 0.0))
        self._saving = array("d")
        return self.seconds


def timed_batches(batches: Iterable[Batch], seconds: array[float]) -> Iterator[Batch]:
    """Yield batches; note how long reading each of them takes."""
    began = perf_counter()
    for batch in batches:
        seconds.append(perf_counter() - began)
        yield batch
        began = perf_counter()


def _timed(call: Callable[..., Any], seconds: array[float]) -> Callable[..., Any]:
    """Return a function that also notes how long its calls take, in seconds."""

    def timing(*arguments: Any, **named: Any) -> Any:
        began = perf_counter()
        result = call(*arguments, **named)
        seconds.append(perf_counter() - began)
        return result

    return timing
