"""Worker processes that read a pass over a stream, and the loop's end of the pipe to each."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from emrun.base.censor import references
from emrun.base.errors import StreamError
from emrun.base.user_modules import user_directories
from emrun.streams.stream_pass import StreamPass
from emrun.streams.worker_process import GROUP_SIGNALS, SAFE_PATH, Last, Task, limit_named, set_environment, work

_LOG = logging.getLogger(__name__)
_STARTING = threading.Lock()  # held while `sys.path` and the environment are prepared for new processes
_PATIENCE = 10.0  # seconds to wait for the end of a process that was killed
_LOOK_AGAIN = 0.05  # seconds
_BEFORE_THEY_ARE_JOINED = 10  # at the end of Python, multiprocessing joins its processes with priority 0


class Workers(Iterator[Any]):
    """Reads a pass in worker processes; yields the batches in the same order as a single process would.

    The batches of a stream that uses `ctx.batches` are shared among all workers; another stream is read by the first
    worker. Tensors and arrays are sent through shared memory. If a process ends early, its pipe ends too.

    Args:
        stream_pass: the pass.
        count: the number of processes.
        each_ahead: the number of batches that each process reads ahead.
        start_method: fork, forkserver or spawn; None for Python's default.

    Raises:
        StreamError: the stream cannot be sent to a process with this start method.
    """

    def __init__(self, stream_pass: StreamPass, count: int, each_ahead: int, start_method: str | None) -> None:
        self._processes: list[Any] = []
        self._turns: deque[tuple[int, Any]] = deque()  # the index of a worker, and the pipe to it
        with limit_named(stream_pass.name, count):
            folder = Path(tempfile.mkdtemp(prefix="emrun-"))
            self._task = Task(stream_pass.name, stream_pass, count, each_ahead, folder, references())
            ended = self._processes, stream_pass.name, folder
            self.close = Finalize(self, _end, ended, exitpriority=_BEFORE_THEY_ARE_JOINED)
            """Kill the processes; this ends a wait for a batch."""
            try:
                self._start(stream_pass, start_method or multiprocessing.get_start_method())
            except BaseException:
                self.close()
                raise

    def _start(self, stream_pass: StreamPass, method: str) -> None:
        """Start the processes; meanwhile, change the settings that they must not inherit.

        Signals are blocked: a Ctrl-C reaches the processes too, before they can set a handler.

        `sys.path` is made safe: in processes that are not forked, Python puts the current directory first, so their
        first imports could find the user's modules. So they start with PYTHONSAFEPATH and without the directories of
        the user's modules, and add these directories after they have imported emrun.
        """
        task = self._task
        context: Any = multiprocessing.get_context(method)
        with contextlib.ExitStack() as stack:
            if method != "fork":
                task.stream_pass = None
                _write(stream_pass, task, method)
                stack.enter_context(_STARTING)
                task.path = user_directories()
                task.safe_path = os.environ.get(SAFE_PATH)
                stack.callback(set_environment, SAFE_PATH, task.safe_path)
                set_environment(SAFE_PATH, "1")
                stack.callback(sys.path.extend, task.path)
                del sys.path[len(sys.path) - len(task.path) :]
                resource_tracker.ensure_running()  # before signals are blocked, because it unblocks them
            if method == "forkserver":
                context.set_forkserver_preload([__name__])  # imports torch once
            before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            for index in range(task.count):
                pipe, other_end = context.Pipe()
                process = context.Process(target=work, args=(task, index, other_end), daemon=True)
                process.start()
                other_end.close()  # before the next fork: a pipe ends when the last process closes it
                self._processes.append(process)
                self._turns.append((index, pipe))

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            BaseException: the error of the stream, with the traceback in the worker as a note.
            StreamError: a process ended early.
        """
        while self._turns:
            index, pipe = self._turns[0]
            try:
                with limit_named(self._task.name, self._task.count):
                    item = pipe.recv()
            except Exception as error:
                if not self.close.still_active():
                    raise StopIteration from None
                process = self._processes[index]
                if isinstance(error, EOFError | OSError) and (exitcode := _exitcode(process)) is not None:
                    what = f"worker process {index} (pid {process.pid}) {_how_it_ended(exitcode)}"
                    raise StreamError(f"stream {self._task.name!r}: {what}") from None
                raise
            with contextlib.suppress(OSError):  # the worker has ended; the next `recv` reports it
                pipe.send_bytes(b"")
            if item.__class__ is not Last:
                self._turns.rotate(-1)
                return item
            if item.error is not None:
                raise item.error
            self._turns.popleft()
        raise StopIteration


def _end(processes: list[Any], name: str, folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        if _exitcode(process) is None:
            _LOG.warning("stream %r: worker process (pid %d) cannot be killed and is left behind", name, process.pid)
    shutil.rmtree(folder, ignore_errors=True)


def _exitcode(process: Any) -> int | None:
    """Return the exit code of a process that is about to end; None if it does not end in time.

    The wait uses short intervals, because a child forked from the process may keep its sentinel open.
    """
    ends_at = time.monotonic() + _PATIENCE
    while process.exitcode is None and time.monotonic() < ends_at:
        process.join(_LOOK_AGAIN)
    process.join(0)  # so that multiprocessing forgets the process
    return process.exitcode  # type: ignore[no-any-return]


def _write(stream_pass: StreamPass, task: Task, start_method: str) -> None:
    """Write the pass to the file from which processes that are not forked read it.

    If a large pass were sent through the pipe that starts a process, this process would block if the other one died.
    """
    try:
        with task.pass_file.open("wb") as file:
            pickle.dump(stream_pass, file, pickle.HIGHEST_PROTOCOL)
    except OSError:  # the disk is full
        raise
    except Exception as error:
        raise StreamError(
            f"stream {task.name!r} cannot be sent to worker processes with start method {start_method}: {error}; "
            "create what cannot be pickled inside the stream function, use `start_method: fork`, or `workers: 0`",
            first_batch=True,
        ) from None


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}; see its output on standard error"
    name = signal.Signals(-exitcode).name
    hints = {
        "SIGKILL": "; the system does this when memory runs out: use fewer workers, smaller batches, or a smaller "
        "buffer",
        "SIGBUS": "; the shared memory (/dev/shm) may be full: use fewer workers or a smaller buffer",
        "SIGSEGV": "; a library that the stream uses crashed",
    }
    return f"was killed by {name}{hints.get(name, '')}"
