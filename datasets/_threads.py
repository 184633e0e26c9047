"""Threads that read the examples of a batch; Pillow and NumPy let them run side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from emrun.base.cores import reading_threads

_PATIENCE = 1.0  # seconds that an interrupt waits for the rows that were begun

Value = TypeVar("Value")
_Task = tuple[Future[None], Callable[[], None]]


def in_order(
    rows: list[int], read_one: Callable[[int, int], Value], is_fatal: Callable[[BaseException], bool]
) -> Iterator[tuple[int, Value | None, BaseException | None]]:
    """Return an iterator of (row, value, error) in the order of the rows, when all have been read by several threads.

    The calling thread is one of them. The threads are daemons, and a forked child starts its own.

    Args:
        rows: the rows.
        read_one: called with a row and its index in `rows`.
        is_fatal: whether no other row is begun after an error. Rows before it have been begun, so the first fatal error
            in the order of the rows does not depend on the number of threads.

    Raises:
        BaseException: what interrupts the calling thread; rows that take longer than a second are then left behind.
    """
    left = iter(enumerate(rows))  # which gives each row to one thread
    done: dict[int, tuple[Value | None, BaseException | None]] = {}
    is_over = threading.Event()

    def read(*, here: bool = False) -> None:
        while not is_over.is_set() and (taken := next(left, None)) is not None:
            place, row = taken
            try:
                done[place] = read_one(row, place), None
            except BaseException as error:
                if here and isinstance(error, KeyboardInterrupt):  # a signal, not this row
                    raise
                if is_fatal(error):
                    is_over.set()
                done[place] = None, error

    helping = _helpers.ask(read, min(reading_threads(), len(rows)) - 1)
    try:
        read(here=True)
        _wait(helping, None)
    except BaseException:
        is_over.set()
        _wait(helping, _PATIENCE)
        raise
    return ((row, *done[place]) for place, row in enumerate(rows) if place in done)


def _wait(helping: list[Future[None]], seconds: float | None) -> None:
    """Wait for the threads that have begun to help; the others need not begin any more."""
    wait([each for each in helping if not each.cancel()], seconds)


class _Helpers:
    """The threads of this process that help to read."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def ask(self, task: Callable[[], None], count: int) -> list[Future[None]]:
        """Let several threads do a task, or as many as the system has room for; return a future of each."""
        with suppress(RuntimeError):  # no room for another thread
            while len(self._threads) < count:
                thread = threading.Thread(target=_live, args=(self._tasks,), name="emrun-examples", daemon=True)
                thread.start()
                self._threads.append(thread)
        asked: list[Future[None]] = [Future() for _ in range(min(count, len(self._threads)))]
        for each in asked:
            self._tasks.put((each, task))
        return asked

    def forget(self) -> None:
        """Begin anew in a forked child, where the threads of the parent do not run."""
        self._tasks, self._threads = SimpleQueue(), []


def _live(tasks: SimpleQueue[_Task]) -> None:
    while True:
        future, task = tasks.get()
        if future.set_running_or_notify_cancel():
            try:
                task()
            finally:
                future.set_result(None)
        del future, task  # with all that was read


_helpers = _Helpers()
os.register_at_fork(after_in_child=_helpers.forget)
