"""The rows of the step record that a hook writes elsewhere, at intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emrun.base.errors import ArgumentError, HookError
from emrun.hook import Loop
from emrun.hooks._parts.intervals import Every


@dataclass(frozen=True)
class StepPoint:
    """The values of an iteration.

    Args:
        iteration: the iteration.
        updates: the updates that were done after it.
        examples: the number of examples that were trained on until then.
        values: name -> value.
    """

    iteration: int
    updates: int
    examples: int
    values: Mapping[str, float]


class StepPoints:
    """Finds the rows of the step record that are due, when they are complete: one batch later, or with the stream.

    Args:
        owner: the class of the hook, for messages.
        every: the interval, such as `50 updates`; None for no rows.
        counts_examples: whether to count the examples of the train stream.

    Raises:
        ArgumentError: `every` is not an interval of updates, iterations or minutes.
    """

    def __init__(self, owner: str, every: str | None, *, counts_examples: bool = False) -> None:
        self.examples = 0
        """The number of examples that the model was trained on."""
        self._owner = owner
        self._every = Every("every", every) if every is not None else None
        if self._every is not None and not self._every.is_within_epochs:
            raise ArgumentError("every", f"{every!r} is an interval of epochs, which are written anyway; use updates")
        self._counts = counts_examples
        self._due: tuple[int, int] | None = None  # updates and examples at the row to write
        self._row: tuple[int, Mapping[str, float]] | None = None  # that row, after a resume
        self._written = 0  # the last iteration

    @property
    def listens(self) -> bool:
        """Whether `after_batch` and `after_stream` must be called."""
        return self._every is not None or self._counts

    def start(self, loop: Loop) -> None:
        """Begin or continue.

        Raises:
            HookError: there is no step record.
        """
        if self._every is None:
            return
        self._every.start()
        if not (loop.records_steps or loop.evaluating):
            raise HookError(
                f"{self._owner}: `every` writes values of the step record, but this run has none; set "
                "main_loop.record_steps, or remove `every`"
            )

    def after_batch(self, loop: Loop, stream_name: str) -> StepPoint | None:
        """Return the point that was due after the batch before; to be called with each batch."""
        if not loop.training or stream_name != loop.train_stream_name:
            return None
        point = self._complete(loop)
        if self._counts:
            self.examples += loop.batch_length
        if self._every is not None and self._every.is_batch_due(loop):
            self._due = loop.updates_done, self.examples
        return point

    def after_stream(self, loop: Loop, stream_name: str) -> StepPoint | None:
        """Return the point that was due with the last batch of the stream."""
        if self._every is None or stream_name != loop.train_stream_name:
            return None
        if self._every.is_stream_due(loop, stream_name):
            self._due = loop.updates_done, self.examples
        return self._complete(loop)

    def _complete(self, loop: Loop) -> StepPoint | None:
        due, row = self._due, self._row
        self._due = self._row = None
        if due is None:
            return None
        row = row or loop.last_step
        if row is None or row[0] <= self._written:  # a long run records every tenth iteration only
            return None
        self._written = row[0]
        return StepPoint(row[0], *due, row[1])

    def state_dict(self, loop: Loop) -> dict[str, Any]:
        """Return the counts, and the point that is due."""
        row = self._row or (loop.last_step if self._due is not None else None)
        return {
            "due": self._due and {"updates": self._due[0], "examples": self._due[1]},
            "row": row and {"iteration": row[0], "values": dict(row[1])},
            "written": self._written,
            "examples": self.examples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        due, row = state["due"], state["row"]
        self._due = None if due is None else (due["updates"], due["examples"])
        self._row = None if row is None else (row["iteration"], row["values"])
        self._written, self.examples = state["written"], state["examples"]
