"""The code of a worker process: it reads its part of a pass and sends the batches through a pipe."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from emrun.base.censor import censor_standard_error, hide
from emrun.base.cores import SHARE
from emrun.base.errors import EmrunError, StorageError, StreamError
from emrun.base.signals import handle
from emrun.stream_context import StreamContext
from emrun.streams.packing import packed, shared_empty
from emrun.streams.stream_pass import StreamPass, named

SAFE_PATH = "PYTHONSAFEPATH"
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that are sent to a whole process group; the loop handles them, worker processes ignore them."""
_LOOK_AGAIN = 1.0  # seconds
_TOO_MANY_FILES = (*map(os.strerror, (errno.EMFILE, errno.ENFILE)), "items of ancdata")
"""The texts of errors about too many open files: the system's, and Python's for a file that was sent."""


@dataclass
class Task:
    """The task of the worker processes of a pass.

    Args:
        name: the name of the stream.
        stream_pass: the pass; None for processes that are not forked, which read it from `pass_file`.
        count: the number of processes.
        ahead: the number of batches that each process may make before the loop takes the first one.
        folder: a folder of the processes, for `pass_file` and for their sockets.
        references: values of the environment -> their references, for processes that are not forked.
        path: the directories of the user's modules, for processes that are not forked.
        safe_path: the value of the environment variable `PYTHONSAFEPATH` in the process; None if it is not set.
    """

    name: str
    stream_pass: StreamPass | None
    count: int
    ahead: int
    folder: Path
    references: Mapping[str, str]
    path: list[str] = field(default_factory=list)
    safe_path: str | None = None

    @property
    def pass_file(self) -> Path:
        """The file with the pass, for processes that are not forked."""
        return self.folder / "pass.pickle"


class Last(NamedTuple):
    """The last message of a worker."""

    error: BaseException | None
    """The error that ended the worker before the end of the stream, if any."""


def work(task: Task, worker: int, pipe: Connection) -> None:
    """Read a worker's part of a pass; called in the worker process.

    Each batch is one message; the last message is `Last`. The loop answers every message that it has received.

    Args:
        task: the task of the workers.
        worker: the index of this worker.
        pipe: the connection to the loop.
    """
    os.register_at_fork(after_in_child=pipe.close)  # so that the pipe ends with this process
    _begin(task)
    waiting = 0  # messages
    with contextlib.suppress(EOFError, ConnectionError):  # the loop has ended
        for message in _messages(task, worker):
            pipe.send_bytes(message)
            waiting += 1
            while waiting == task.ahead or pipe.poll():  # a pipe full of answers would block the loop
                pipe.recv_bytes()
                waiting -= 1
        for _ in range(waiting - 1):  # the loop fetches shared memory from this process
            pipe.recv_bytes()


def _messages(task: Task, worker: int) -> Iterator[memoryview]:
    error = None
    try:
        stream_pass = task.stream_pass or cast(StreamPass, pickle.loads(task.pass_file.read_bytes()))
        for batch in stream_pass.read(worker, task.count):
            message = _message(batch, task)
            del batch  # not kept while the stream makes the next one
            yield message
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = _sendable(named(raised, task.name), worker)
    yield memoryview(pickle.dumps(Last(error)))  # without shared memory: this process may end before the loop reads it


@contextlib.contextmanager
def limit_named(name: str, count: int) -> Iterator[None]:
    """Add the limit and advice to errors about too many open files."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not any(text in str(error) for text in _TOO_MANY_FILES):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise StreamError(
            f"stream {name!r}: too many open files for its {count} worker processes; this process may open {limit} "
            "(`ulimit -n`); raise the limit, use fewer `workers`, or use `main_loop.buffer`, which reads in a thread"
        ) from error


def _message(batch: Any, task: Task) -> memoryview:
    try:
        with limit_named(task.name, task.count):
            return packed(batch)
    except (StorageError, StreamError):  # too little memory, too many open files
        raise
    except Exception as error:
        raise StreamError(
            f"a batch cannot be sent from a worker process to the loop ({type(error).__name__}: {error}); yield "
            "arrays, tensors, numbers and strings, or replace `workers` by `main_loop.buffer`, which reads in a thread"
        ) from error


def _sendable(error: BaseException, worker: int) -> BaseException:
    """Return an exception that can be sent to the loop; for errors other than emrun's, a note has the traceback."""
    text = "" if isinstance(error, EmrunError) else ":\n" + "".join(traceback.format_exception(error)).rstrip()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = StreamError(f"{type(error).__name__}: {error}")
    error.add_note(f"in worker process {worker}, pid {os.getpid()}{text}")
    return error


def _begin(task: Task) -> None:
    """Prepare a worker process, which runs until the loop ends it."""
    torch.set_num_threads(1)
    os.environ[SHARE] = "1"  # of the cores: the other workers have theirs
    StreamContext.allocate = staticmethod(shared_empty)
    # not SIG_IGN, because programs that the stream starts would inherit it, but for what nohup ignores
    handled = [number for number in GROUP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handle(dict.fromkeys(handled, lambda number, frame: None))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    if task.stream_pass is None:
        for value, reference in task.references.items():
            hide(value, reference)
        censor_standard_error()
        set_environment(SAFE_PATH, task.safe_path)
        sys.path += [each for each in task.path if each not in sys.path]
    threading.Thread(target=_end_with_the_loop, args=(task.folder,), daemon=True).start()
    # the folder for sockets of shared memory; a worker is killed, so a folder that it creates itself would stay behind
    multiprocessing.current_process()._config["tempdir"] = str(task.folder)  # type: ignore[attr-defined]


def _end_with_the_loop(folder: Path) -> None:
    """End this worker when the process of the loop has ended."""
    parent = multiprocessing.parent_process()
    started_by = os.getppid()
    assert parent is not None  # this is a worker
    while parent.is_alive() and os.getppid() == started_by:  # a child forked later may keep the sentinel open
        parent.join(_LOOK_AGAIN)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def set_environment(name: str, value: str | None) -> None:
    """Set an environment variable; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
