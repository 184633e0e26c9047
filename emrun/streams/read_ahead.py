"""A thread that reads batches ahead of the loop."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from emrun.streams.stream_pass import WithState
from emrun.types import Prefetch

_LOG = logging.getLogger(__name__)
_PATIENCE = 1.0  # seconds that a reader gets to end before it is left behind as a daemon
_LOOK_AGAIN = 0.5  # seconds; Python runs no handler for a signal that arrives just before a wait begins

END = object()
"""What `ReadAhead.get` returns at the end of the pass."""

INTERRUPTED = object()
"""What it returns when the wait for a batch was interrupted."""


class _Failure(NamedTuple):
    """An exception on its way from the reader to the loop."""

    error: BaseException


class ReadAhead:
    """Reads up to `size` batches ahead of the loop, in a thread of its own, for one pass.

    The queue is a deque, whose `append` and `popleft` are atomic; two locks serve as binary semaphores that wake a
    side which found nothing to do. A full queue is filled again when half of it was taken, so that a switch of threads
    (about 75 us) is paid once for many batches. A semaphore is released without being held by anyone who has news,
    signal handlers included; whoever wakes up looks again.

    Args:
        batches: what is read; only this thread touches it while it reads.
        size: how many batches are read ahead in all, at least 1.
        name: the name of the stream, for the thread's name and the log.
        interrupted: tells whether a wait for the next batch is to be given up.
        watch: called about every half a second of a wait with the seconds it lasts; may raise what ends it.
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

    @property
    def waiting(self) -> int:
        """How many batches were read that nobody has."""
        return len(self._queue)

    def start(self) -> None:
        """Start the reader; once it was stopped, go on where it stopped."""
        if self._thread is None and not self._ended:
            self._stopping = False
            self._thread = threading.Thread(target=self._read, name=f"emrun-read-{self._name}", daemon=True)
            self._thread.start()

    def get(self) -> Any:
        """Return the next batch, `END` at the end of the pass, or `INTERRUPTED` when the wait was.

        Raises:
            BaseException: what the stream raised, with its traceback, after the batches that came before it; or what
                `watch` raised.
        """
        queue = self._queue
        began = None
        while not queue:
            self._loop_waits = True
            if not queue:  # the reader looks at the flag after it appended: one of the two sees the other
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
            queue.append(item)  # whoever asks again gets the same answer
            if isinstance(item, _Failure):
                raise item.error
        return item

    def wake(self) -> None:
        """End a wait of `get`, which then looks whether it was interrupted; may be called by a signal handler."""
        _wake(self._items)

    def stop(self) -> bool:
        """Stop the reader after the batch it is working on; what it read stays in the queue.

        Returns:
            Whether it stopped; if not within a second, it is left behind as a daemon, and so is what it reads.
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
            except BaseException as error:  # whatever it is, it is the loop's to handle
                item = _Failure(error)
            self._ended = item is END or item.__class__ is _Failure
            queue.append(item)
            if self._loop_waits:
                self._loop_waits = False
                _wake(self._items)
            if self._ended:
                return


class _Prepared(NamedTuple):
    """What was read, and what is called ahead of its turn."""

    item: Any
    begin: Callable[[], None]


class PreparedAhead(ReadAhead):
    """Reads ahead, lets somebody prepare each batch in the reader's thread, and tells him when it is nearly its turn.

    Args:
        prepare: called with each batch; what it returns is called once, by the loop, when the batch before it is given
            to the loop, or when it is given itself if it was not there then.
        batches: see `ReadAhead`, as the others.
        size: likewise, at least 2: one to be run, and one for which something is done meanwhile.
        others: likewise.
    """

    def __init__(self, prepare: Prefetch, batches: Iterator[Any], size: int, *others: Any) -> None:
        super().__init__(map(self._prepared, batches), max(2, size), *others)
        self._prepare = prepare
        self._begun: _Prepared | None = None

    def get(self) -> Any:
        """Return the next batch like `ReadAhead.get`, and begin what it and the one behind it wait for."""
        given = super().get()
        following = self._queue[0] if self._queue else None
        for each in (given, following):
            if each.__class__ is _Prepared and each is not self._begun:
                self._begun = each
                each.begin()
        return given.item if given.__class__ is _Prepared else given

    def _prepared(self, item: Any) -> Any:
        begin = self._prepare(item.batch if item.__class__ is WithState else item)
        return item if begin is None else _Prepared(item, begin)


def _wake(semaphore: threading.Lock) -> None:
    with suppress(RuntimeError):  # released already
        semaphore.release()
