"""Processes for trials: each is forked from this one, which has imported PyTorch and never computed anything with it.

A trial costs no start of Python and no imports. Where a fork is not safe, because the import of a class has started
threads or uses a GPU, or on another system than Linux, a child begins a new Python instead.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from emrun.base.cores import SHARE, share_of
from emrun.base.signals import forget_in_child
from emrun.base.terminal import PLACES

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_MOST = 100_000  # bytes of a trial's output that are shown
THREADS = "OMP_NUM_THREADS"
"""The environment variable that says how many threads PyTorch and NumPy use; it counts when they are imported."""


def threads_per_job(jobs: int) -> int | None:
    """Return how many threads each of several trials gets; None for one trial, which gets what PyTorch chooses.

    If OMP_NUM_THREADS is set, that is the number.
    """
    given = os.environ.get(THREADS, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return None if jobs == 1 else share_of(jobs)


def is_fork_safe() -> bool:
    """Return whether a child of this process can compute: no library has threads here, and no GPU is in use.

    OpenBLAS, which NumPy and SciPy use, ends its threads before a fork and starts them again when it needs them. So a
    fork that does nothing shows whether there are others, such as those of OpenMP, for which a child would wait.
    """
    torch = sys.modules.get("torch")
    if sys.platform != "linux" or (torch is not None and torch.cuda.is_initialized()):
        return False
    if _count_threads() > 1:
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return _count_threads() == 1


def _count_threads() -> int:
    """Return how many threads this process has, those of libraries included, but for one that survives a fork."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(path.read_text(encoding="utf-8").strip())
    return len(names) - names.count("jemalloc_bg_thd")  # of PyArrow's memory; jemalloc begins anew in a child


class Job:
    """A process that trains a trial.

    Args:
        pid: the process.
        slot: which of the processes that run at the same time it is: 0, 1, ...
        output: what it prints.
    """

    def __init__(self, pid: int, slot: int, output: IO[bytes]) -> None:
        self.pid = pid
        self.slot = slot
        self.began = time.monotonic()
        self._output = output
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def result(self) -> tuple[int, str]:
        """Wait for the process; return its exit status, negative for a signal, and what it has printed."""
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._status, self.output()
        finally:
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def output(self) -> str:
        """Return what the process has printed, only the end of it if it is long, and free it."""
        with self._output as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST))
            return file.read().decode(errors="replace")


class Jobs:
    """Starts processes for trials.

    Args:
        run: called in the child with its arguments; returns the exit status.
        command: begins a new Python that does the same; the arguments are appended.
        devices: the GPUs, as CUDA_VISIBLE_DEVICES names them; None to leave them as they are.
        may_fork: whether a fork is safe here.
        share: how many cores a process gets; None to leave this as it is.
    """

    def __init__(
        self,
        run: Callable[[Sequence[str]], int],
        command: Sequence[str],
        devices: Sequence[str] | None,
        may_fork: Callable[[], bool] = is_fork_safe,
        share: int | None = None,
    ) -> None:
        self._run = run
        self._command = command
        self._devices = devices
        self._may_fork = may_fork
        self._share = share
        gc.freeze()  # the children share the memory of what is there

    def start(self, arguments: Sequence[str], slot: int, threads: int | None) -> Job:
        """Start a process.

        Args:
            arguments: what to call the function with.
            slot: which of the processes that run at the same time it will be; says which device it gets.
            threads: the number of threads; None to leave it as it is.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115 - the job closes it
        forks = self._may_fork()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings(action="ignore"):  # about threads: see `may_fork`
                pid = os.fork()
            if pid == 0:
                self._live(parent, arguments, slot, threads, forks, output)
        except OSError:
            output.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Job(pid, slot, output)

    def _live(
        self, parent: int, arguments: Sequence[str], slot: int, threads: int | None, forks: bool, output: IO[bytes]
    ) -> NoReturn:
        """Be the child: do what `start` asks, and end."""
        status = 1
        try:
            os.setpgid(0, 0)  # a Ctrl-C on the terminal reaches the sweep, which passes it on
            end_with(parent, signal.SIGTERM)
            with Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            for place in PLACES:
                os.dup2(output.fileno(), place)
            device = None if self._devices is None else self._devices[slot % len(self._devices)]
            variables = {"CUDA_VISIBLE_DEVICES": device, THREADS: threads, SHARE: self._share}
            os.environ |= {name: str(value) for name, value in variables.items() if value is not None}
            forget_in_child()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            if not forks:
                os.execv(self._command[0], [*self._command, *arguments])
            torch = sys.modules.get("torch")
            if torch is not None and threads is not None and torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            status = self._run(arguments)
            threading._shutdown()  # type: ignore[attr-defined]  # what Python does at its end, but for clearing the modules
            atexit._run_exitfuncs()
        except BaseException:  # as Python does at the top
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def end_with(parent: int, number: int) -> None:
    """Get a signal when the parent ends, so that this process does not outlive it; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
