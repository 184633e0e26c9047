"""What runs in a worker process: it reads its part of a pass, and gives the batches through a pipe."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from emrun.censor import Censor, censor_standard_error, terminal_censor
from emrun.errors import EmrunError, StreamError
from emrun.streams.packing import packed
from emrun.streams.reuse import checked_for_reuse
from emrun.streams.stream_pass import StreamPass, named

SAFE_PATH = "PYTHONSAFEPATH"
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are sent to a whole process group; the loop handles them, worker processes do nothing."""
_LOOK_AGAIN = 1.0  # seconds


@dataclass
class Task:
    """What worker processes get to know.

    Args:
        name: the name of the stream.
        stream_pass: the pass; None for processes that are not forked, which read it from `pass_file`.
        count: how many processes there are.
        ahead: how many batches each of them may make before the loop takes the first.
        folder: a folder of theirs: a process writes its stacks there, and puts its sockets there.
        censor: what keeps secrets from what is written to standard error, if anything does.
        path: where the user's modules are, for a process that begins anew.
        safe_path: what its environment says of `PYTHONSAFEPATH`.
    """

    name: str
    stream_pass: StreamPass | None
    count: int
    ahead: int
    folder: Path
    censor: Censor | None
    path: list[str] = field(default_factory=list)
    safe_path: str | None = None

    @property
    def pass_file(self) -> Path:
        """Where the pass lies for processes that are not forked."""
        return self.folder / "pass.pickle"

    def stacks_file(self, worker: int) -> Path:
        """Return where a process writes its stacks on SIGUSR2; there as soon as it has begun."""
        return self.folder / str(worker)


class Last(NamedTuple):
    """The last that comes from a worker."""

    error: BaseException | None
    """What ended it before the end of the stream."""


def work(task: Task, worker: int, pipe: Connection) -> None:
    """Read a worker's part of a pass; called in its process.

    Each batch is a message, and then comes `Last`. The loop answers every message that it took.

    Args:
        task: what there is to do.
        worker: which of the workers this is.
        pipe: to the loop and back.
    """
    os.register_at_fork(after_in_child=pipe.close)  # so that it ends with this process
    stacks_file = _begin(task, worker)  # open as long as this process lives
    waiting = 0  # messages
    with stacks_file, contextlib.suppress(EOFError, ConnectionError):  # the loop is gone
        for message in _messages(task, worker):
            pipe.send_bytes(message)
            waiting += 1
            while waiting == task.ahead or pipe.poll():  # a pipe that is full of answers would stop the loop
                pipe.recv_bytes()
                waiting -= 1
        for _ in range(waiting - 1):  # shared memory is fetched from this process
            pipe.recv_bytes()


def _messages(task: Task, worker: int) -> Iterator[memoryview]:
    error = None
    try:
        stream_pass = task.stream_pass or cast(StreamPass, pickle.loads(task.pass_file.read_bytes()))
        batches = stream_pass.read(worker, task.count)
        for batch in checked_for_reuse(batches, task.name, task.ahead + 1):  # the loop has one
            yield _message(batch)
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = _sendable(named(raised, task.name), worker)
    yield memoryview(pickle.dumps(Last(error)))  # without shared memory: this process may end before the loop has it


def _message(batch: Any) -> memoryview:
    try:
        return packed(batch)
    except Exception as error:
        raise StreamError(
            f"a batch cannot be sent from a worker process to the loop ({type(error).__name__}: {error}); give arrays, "
            "tensors, numbers and texts, or use `main_loop.buffer`, which reads in a thread, instead of `workers`"
        ) from error


def _sendable(error: BaseException, worker: int) -> BaseException:
    """Return an exception that can be sent to the loop, with the traceback as a note unless its message says enough."""
    text = "" if isinstance(error, EmrunError) else ":\n" + "".join(traceback.format_exception(error)).rstrip()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = StreamError(f"{type(error).__name__}: {error}")
    error.add_note(f"in worker process {worker} (pid {os.getpid()}){text}")
    return error


def _begin(task: Task, worker: int) -> Any:
    """Prepare a worker process: it writes its stacks when it is asked to, and lives until the loop ends it.

    Returns:
        The file of its stacks.
    """
    torch.set_num_threads(1)
    for number in GROUP_SIGNALS:
        # unlike SIG_IGN, a program that the stream starts does not inherit it
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    if task.censor is not None and terminal_censor() is None:  # not forked
        censor_standard_error(task.censor)
    if task.stream_pass is None:
        set_environment(SAFE_PATH, task.safe_path)
        sys.path += [each for each in task.path if each not in sys.path]
    threading.Thread(target=_end_with_the_loop, args=(task.folder,), daemon=True).start()
    # where its sockets for shared memory go: it is killed, so that a folder of its own would stay behind
    multiprocessing.current_process()._config["tempdir"] = str(task.folder)  # type: ignore[attr-defined]
    file = task.stacks_file(worker).open("w")
    faulthandler.register(signal.SIGUSR2, file=file)
    return file


def _end_with_the_loop(folder: Path) -> None:
    """End this worker when the loop's process is gone."""
    parent, started_by = multiprocessing.parent_process(), os.getppid()
    assert parent is not None  # this is a worker
    while parent.is_alive() and os.getppid() == started_by:  # a process that was forked later may hold what tells it
        parent.join(_LOOK_AGAIN)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def set_environment(name: str, value: str | None) -> None:
    """Set a variable of the environment; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
