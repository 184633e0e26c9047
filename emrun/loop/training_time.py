"""How long the model has been trained, without all else that a run does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from emrun.ranks.group import ranks


class TrainingTime:
    """Counts the seconds in which this process trains, and the examples that they are spent on.

    They begin after the first batch that this process trains on, with which start and compilation end. What counts is
    the time from the first to the last batch of a train stream, waiting for data included; evaluations and checkpoints
    do not count. On several ranks, a budget of time has the largest number of seconds of a rank, as of the last batch
    but one: the ranks exchange them while they train, so that schedules and the end are the same on all ranks.

    Args:
        length: returns the number of examples in the current batch.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, length: Callable[[], int]) -> None:
        self.counts_examples = False
        """Whether the examples are counted, which costs a little time for each batch."""
        self.examples = 0
        """The number of examples."""
        self._length = length
        self._done = 0.0
        self._began: float | None = None
        self._is_warm = False  # whether this process has trained on a batch
        self._agreed: float | None = None  # the seconds that all ranks know
        self._largest: Callable[[], float] | None = None  # returns what they will know

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return self._own() if self._agreed is None else self._agreed

    def _own(self) -> float:
        return self._done + (0.0 if self._began is None else self.clock() - self._began)

    def agreeing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the model on a batch, after which all ranks have the same seconds."""
        if not ranks().several:
            return run

        def agreed(*arguments: Any) -> Any:
            outputs = run(*arguments)
            self._agreed = 0.0 if self._largest is None else self._largest()
            self._largest = ranks().begin_largest(self._own())
            return outputs

        return agreed

    def end_first_batch(self) -> None:
        """Begin after the first batch that this process trains on, whose examples do not count."""
        if self._is_warm:
            return
        self._is_warm = True
        self._began = self.clock()
        if self.counts_examples:
            self.examples -= self._length()

    def count_examples(self) -> None:
        """Count the examples from now on."""
        self.counts_examples = True

    def counting_examples(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the model on a batch, and counts its examples."""

        def counted(*arguments: Any) -> Any:
            outputs = run(*arguments)
            self.examples += self._length()
            return outputs

        return counted

    @contextmanager
    def counting(self, *, train: bool) -> Iterator[None]:
        """Count the time of a block if it trains, and do not count it otherwise."""
        before = self._began is not None
        self._switch(on=train and self._is_warm)
        try:
            yield
        finally:
            self._switch(on=before)

    def _switch(self, *, on: bool) -> None:
        self._done = self._own()
        self._began = None
        if on:
            self._began = self.clock()
