"""Threads that read the examples of a batch; Pillow and NumPy let them run side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

from emrun.base.cores import reading_threads

_PATIENCE = 1.0  # seconds that an interrupt waits for the rows that were begun

Value = TypeVar("Value")


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
    work = _Work(enumerate(rows), read_one, is_fatal)
    _helpers.ask(work.help, min(reading_threads(), len(rows)) - 1)
    work.finish()
    return ((row, *work.done[place]) for place, row in enumerate(rows) if place in work.done)


class _Work(Generic[Value]):
    """The rows of a batch; each thread takes one after the other."""

    def __init__(
        self,
        left: Iterable[tuple[int, int]],
        read_one: Callable[[int, int], Value],
        is_fatal: Callable[[BaseException], bool],
    ) -> None:
        self._left = iter(left)
        self._read_one = read_one
        self._is_fatal = is_fatal
        self._is_over = False
        self._helpers = 0  # that run now
        self._changed = threading.Condition()
        self.done: dict[int, tuple[Value | None, BaseException | None]] = {}

    def help(self) -> None:
        """Read rows until none is left, unless the calling thread has finished."""
        with self._changed:
            if self._is_over:
                return
            self._helpers += 1
        try:
            self._read()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify()

    def finish(self) -> None:
        """Read rows until none is left, and wait for those of the others."""
        try:
            self._read(here=True)
            self._wait(None)
        except BaseException:
            self._is_over = True
            self._wait(_PATIENCE)
            raise

    def _wait(self, seconds: float | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._helpers, seconds)

    def _read(self, *, here: bool = False) -> None:
        for place, row in self._left:  # `enumerate` gives each row to one thread
            try:
                self.done[place] = self._read_one(row, place), None
            except BaseException as error:
                if here and isinstance(error, KeyboardInterrupt):  # a signal, not this row
                    raise
                self._is_over = self._is_over or self._is_fatal(error)
                self.done[place] = None, error
            if self._is_over:
                return


class _Helpers:
    """The threads of this process that help to read."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def ask(self, task: Callable[[], None], count: int) -> None:
        """Let several threads do a task, or as many as the system has room for."""
        with suppress(RuntimeError):  # no room for another thread
            while len(self._threads) < count:
                thread = threading.Thread(target=_live, args=(self._tasks,), name="emrun-examples", daemon=True)
                thread.start()
                self._threads.append(thread)
        for _ in range(min(count, len(self._threads))):
            self._tasks.put(task)

    def forget(self) -> None:
        """Begin anew in a forked child, where the threads of the parent do not run."""
        self._tasks, self._threads = SimpleQueue(), []


def _live(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


_helpers = _Helpers()
os.register_at_fork(after_in_child=_helpers.forget)
