"""A thread that reads batches ahead of the loop."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from emrun.base.types import Prefetch
from emrun.stream_context import WithLeftOut
from emrun.streams.stream_pass import WithState

_LOG = logging.getLogger(__name__)
_PATIENCE = 1.0  # seconds until a reader that does not end is left behind as a daemon
_LOOK_AGAIN = 0.5  # seconds; a signal that arrives just before a wait does not end the wait

END = object()
"""What `ReadAhead.get` returns at the end of the pass."""

INTERRUPTED = object()
"""What `ReadAhead.get` returns if the wait for a batch was interrupted."""


class _Failure(NamedTuple):
    """An exception that the reader passes to the loop."""

    error: BaseException


class ReadAhead:
    """Reads up to `size` batches ahead of the loop in a separate thread, for one pass.

    The queue is a deque, whose `append` and `popleft` are atomic; two locks serve as binary semaphores that wake the
    reader or the loop when it waits. A full queue is filled again after half of it was taken, so that a switch of
    threads (about 75 us) is paid once for many batches. Any code that has news, including a signal handler, may release
    a semaphore without holding it; the side that wakes up then checks again.

    Args:
        batches: the iterator to read; only the reader thread uses it while it reads.
        size: the number of batches to read ahead, at least 1.
        name: the name of the stream, for the thread's name and the log.
        interrupted: returns whether to stop waiting for the next batch.
        watch: called about every half second of a wait, with its duration in seconds; may raise an error that ends it.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        size: int,
        name: str,
        interrupted: Callable[[], bool],
        watch: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._batches = batches
        self._size = size
        self._name = name
        self._interrupted = interrupted
        self._watch = watch
        self._queue: deque[Any] = deque()
        self._items = threading.Lock()
        self._items.acquire()
        self._space = threading.Lock()
        self._space.acquire()
        self._loop_waits = False
        self._reader_waits = False
        self._stopping = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the reader; after `stop`, continue where it stopped."""
        if self._thread is None and not self._ended:
            self._stopping = False
            self._thread = threading.Thread(target=self._read, name=f"emrun-read-{self._name}", daemon=True)
            self._thread.start()

    def get(self) -> Any:
        """Return the next batch, `END` at the end of the pass, or `INTERRUPTED` if the wait was interrupted.

        Raises:
            BaseException: the error of the stream, with its traceback, after the batches before it; or the error of
                `watch`.
        """
        queue = self._queue
        began = None
        while not queue:
            self._loop_waits = True
            if not queue:  # the reader reads the flag after `append`, so that no wake-up is lost
                if self._interrupted():
                    return INTERRUPTED
                began = began or monotonic()
                if not self._items.acquire(timeout=_LOOK_AGAIN):
                    self._watch(monotonic() - began)
        item = queue.popleft()
        if self._reader_waits and len(queue) <= self._size // 2:
            self._reader_waits = False
            _wake(self._space)
        if item is END or item.__class__ is _Failure:
            queue.append(item)  # the next call returns the same
            if isinstance(item, _Failure):
                raise item.error
        return item

    def wake(self) -> None:
        """End a wait of `get`, which then checks whether it was interrupted; may be called by a signal handler."""
        _wake(self._items)

    def stop(self) -> bool:
        """Stop the reader after the present batch; the batches that were read stay in the queue.

        Returns:
            Whether the reader stopped; if it does not within a second, the thread is left behind as a daemon, together
            with the iterator that it reads.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._stopping = True
        _wake(self._space)
        thread.join(_PATIENCE)
        if thread.is_alive():
            _LOG.warning("stream %r does not stop; its reader thread is left behind", self._name)
            return False
        return True

    def _read(self) -> None:
        queue, batches, size = self._queue, self._batches, self._size
        while not self._stopping:
            if len(queue) >= size:
                self._reader_waits = True
                if len(queue) >= size and not self._stopping:
                    self._space.acquire()
                continue
            try:
                item = next(batches, END)
            except BaseException as error:  # the loop handles all errors
                item = _Failure(error)
            self._ended = item is END or item.__class__ is _Failure
            queue.append(item)
            if self._loop_waits:
                self._loop_waits = False
                _wake(self._items)
            if self._ended:
                return


class _Prepared(NamedTuple):
    """A batch that was read, and the function to call before the loop runs the batch."""

    item: Any
    begin: Callable[[], None]


class PreparedAhead(ReadAhead):
    """Reads ahead, prepares each batch in the reader thread, and calls a function shortly before the batch is run.

    Args:
        prepare: called with each batch in the reader thread. The function that it returns is called once, in the loop's
            thread, when the loop takes the previous batch, or the batch itself if it was not read yet at that time.
        batches: the iterator to read.
        size: the number of batches to read ahead, at least 2: one to run, and one to prepare meanwhile.
        others: the other arguments of `ReadAhead`.
    """

    def __init__(self, prepare: Prefetch, batches: Iterator[Any], size: int, *others: Any) -> None:
        super().__init__(map(self._prepared, batches), max(2, size), *others)
        self._prepare = prepare
        self._begun: _Prepared | None = None

    def get(self) -> Any:
        """Return the next batch as `ReadAhead.get` does, and call the functions of this batch and the one after it."""
        given = super().get()
        following = self._queue[0] if self._queue else None
        for item in (given, following):
            if item.__class__ is _Prepared and item is not self._begun:
                self._begun = item
                item.begin()
        return given.item if given.__class__ is _Prepared else given

    def _prepared(self, item: Any) -> Any:
        begin = self._prepare(item.batch if isinstance(item, WithState | WithLeftOut) else item)
        return item if begin is None else _Prepared(item, begin)


def _wake(semaphore: threading.Lock) -> None:
    with suppress(RuntimeError):  # released already
        semaphore.release()
