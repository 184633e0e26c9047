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
_HELPERS: dict[int, tuple[SimpleQueue[Callable[[], None]], list[threading.Thread]]] = {}
"""Id of a process -> the tasks of its helping threads, and these threads; a forked child begins without any."""


def in_order(
    rows: list[int],
    read_one: Callable[[int, int], Value],
    is_fatal: Callable[[BaseException], bool],
    *,
    alone: bool = False,
) -> Iterator[tuple[int, Value | None, BaseException | None]]:
    """Return an iterator of (row, value, error) in the order of the rows, when all have been read by several threads.

    The calling thread is one of them. The threads are daemons, and a forked child starts its own.

    Args:
        rows: the rows.
        read_one: called with a row and its index in `rows`.
        is_fatal: whether no other row is begun after an error. Rows before it have been begun, so the first fatal error
            in the order of the rows does not depend on the number of threads.
        alone: whether the calling thread reads all rows.

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

    begun: list[Future[None]] = []  # one for each thread that helps

    def help_reading() -> None:
        ended: Future[None] = Future()
        begun.append(ended)  # before a row is taken: whoever is not there by the end takes none
        try:
            read()
        finally:
            ended.set_result(None)

    _ask(help_reading, 0 if alone else min(reading_threads(), len(rows)) - 1)
    try:
        read(here=True)
        wait(begun)
    except BaseException:
        is_over.set()
        wait(begun, _PATIENCE)
        raise
    return ((row, *done[place]) for place, row in enumerate(rows) if place in done)


def _ask(task: Callable[[], None], count: int) -> None:
    """Ask threads of this process to do a task, each once, or as many as the system has room for."""
    tasks, threads = _HELPERS.setdefault(os.getpid(), (SimpleQueue(), []))
    with suppress(RuntimeError):  # no room for another thread
        while len(threads) < count:
            thread = threading.Thread(target=_live, args=(tasks,), name="emrun-examples", daemon=True)
            thread.start()
            threads.append(thread)
    for _ in range(min(count, len(threads))):
        tasks.put(task)


def _live(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()
