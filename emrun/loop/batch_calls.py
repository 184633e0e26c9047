"""What is called for the batches of a stream: functions that are listed when the stream begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from emrun.base.types import Batch
from emrun.ranks.shares import like
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.stream import StreamPosition

Outputs = Mapping[str, Any]


@dataclass(eq=False)
class Intake:
    """What a batch goes through before the model gets it.

    Args:
        check: checks a batch; returns 0 to leave it out.
        announce: calls `before_batch` of the hooks; returns the batch for the model if hooks may have changed it.
        accept: checks such a batch; returns the batch for the model, None to leave it out.
    """

    check: Callable[[Batch], int]
    announce: Callable[..., Batch | None] | None
    accept: Callable[[Batch], Batch | None]


class ChangedBatches:
    """Gives hooks a copy of a batch, and remembers the batch and the random states that each hook got.

    Args:
        randomness: records the random states before each hook that may change a batch; None if failures are not saved.
    """

    def __init__(self, randomness: StepRandomness | None) -> None:
        self._randomness = randomness
        self.by: list[str] = []
        """Class names of the hooks, and of the model, that may change a batch."""
        self.offered: Batch | None = None
        """The batch that the last called hook got."""
        self.last: tuple[str, Batch] | None = None
        """The last batch with all changes, and the name of its stream."""

    def announce(self, notify: Callable[..., None], stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch after `before_batch` of all hooks, which may have changed the copy."""
        changed = like(batch)
        notify("before_batch", stream_name=stream_name, batch=changed)
        if self._randomness is not None:
            self._randomness.before_model()
        self.last = stream_name, changed
        return changed

    def offer(self, call: Callable[..., Any], stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook."""
        self.offered = dict(batch)
        if self._randomness is not None:
            self._randomness.before_hook()
        call(stream_name=stream_name, batch=batch)


@dataclass(eq=False)
class Handled:
    """The batch that is being handled, for those that want to know which batch has caused an error."""

    batch: Batch | None = None
    """The batch; None between two batches, and while a batch is checked."""
    last: tuple[Batch, StreamPosition] | None = None
    """The last batch of a window that is open, and the position in the stream after it."""
    is_closing: bool = False
    """Whether this window gets its update now, at the end of the epoch."""
    failed: list[Callable[[BaseException, Batch], None]] = field(default_factory=list)
    """Called with an error and the batch that has caused it."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Call `failed` after an error in a block, unless it is not that of a batch."""
        try:
            yield
        except BaseException as error:  # user code may also call sys.exit
            batch = self.last[0] if self.is_closing and self.last is not None else self.batch
            for each in self.failed if batch is not None else ():
                each(error, batch)  # type: ignore[arg-type]
            raise


@dataclass(eq=False)
class Calls:
    """What is called for the batches of a stream: only what is needed in this stream.

    When the stream begins, parts of the loop add their functions to the lists below, in their `begin_batches`.

    Args:
        batches: the batches; those of the stream.
        intake: what a batch goes through before the model gets it.
        run: runs the model.
        report: calls `after_batch` of the hooks.
        report_last: the same for a batch with which the training may reach a limit.
    """

    batches: Iterable[Batch]
    intake: Intake
    run: Callable[[Batch, bool, str], Outputs]
    report: Callable[..., None] | None
    report_last: Callable[..., None]
    ends_at: float = inf
    """The least number of iterations with which the training may reach a limit."""
    before: list[Callable[[Batch], None]] = field(default_factory=list)
    """Called with each batch, before hooks may change it."""
    first: list[Callable[[Outputs], Callable[[Batch], None] | None]] = field(default_factory=list)
    """Called with the outputs of the first batch. What they return takes the place of `before`."""
    after: list[Callable[[Outputs], object]] = field(default_factory=list)
    """Called with the outputs of each batch, after the hooks, and also if a hook has failed."""
    end: list[Callable[[], object]] = field(default_factory=list)
    """Called at the end of the stream, or when the loop leaves it."""
    handled: Handled = field(default_factory=Handled)
    """The batch that is being handled."""

    def end_first(self, outputs: Outputs) -> None:
        """Call what is called once, with the outputs of the first batch."""
        self.before[:] = filter(None, [each(outputs) for each in self.first])
        self.first.clear()
