"""The structure of a module that is built a second time, in a child process, so that nothing happens twice here."""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import torch

from emrun.models.loadable import Structure, structure

_LONGEST = 60  # seconds that a child lives at most, whatever happens to this process
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.utime", "os.kill", "os.killpg", "os.fork", "os.forkpty", "os.system", "os.exec", "os.posix_spawn"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "socket.sendto", "sqlite3.connect"),
)


class BuiltApart:
    """A forked child process that builds a module on the meta device, without memory for its values.

    The child starts as a copy of this process, so it must start before the module is built here. The child has no open
    files and no output, and it ends before it would write a file, start a process, connect to something or use a GPU.
    This process never waits long for the child, and the child ends with this object.

    Args:
        build: the function that builds the module.
    """

    def __init__(self, build: Callable[[], torch.nn.Module]) -> None:
        self._answer, ours = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about threads, which the child does not use
                child = os.fork()
            if child == 0:
                _live(build, ours)
            self.end = weakref.finalize(self, _end, os.getpid(), child, self._answer)
            """End the child."""
        except OSError:
            os.close(self._answer)
            raise
        finally:
            os.close(ours)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @classmethod
    def begin(cls, build: Callable[[], torch.nn.Module]) -> BuiltApart | None:
        """Start a child process; return None if processes cannot be forked here."""
        is_possible = hasattr(os, "fork") and sys.platform != "darwin" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not is_possible or threading.current_thread() is not threading.main_thread():
            return None
        try:
            return cls(build)
        except OSError:  # no memory, processes or files left
            return None

    def structure(self, seconds: float) -> Structure | None:
        """Return names, shapes and dtypes of the module, and end the child.

        Args:
            seconds: how long to wait for the child at most.

        Returns:
            None if the child has not answered by then, or could not build the module.
        """
        text, ends_at = b"", monotonic() + seconds
        poll = select.poll()
        poll.register(self._answer, select.POLLIN)
        while poll.poll(max(0.0, ends_at - monotonic()) * 1000) and (part := os.read(self._answer, 1 << 16)):
            text += part
        self.end()
        try:
            found = json.loads(text)
        except ValueError:  # no answer, or only a part of it
            return None
        return {
            name: (None if shape is None else tuple(shape), getattr(torch, dtype))
            for name, (shape, dtype) in found.items()
        }


def _end(owner: int, child: int, answer: int) -> None:
    """Kill the child and wait for it, in the process that forked it."""
    with suppress(OSError):  # the pipe is closed already, or the child has been waited for
        os.close(answer)
    with suppress(OSError):
        if os.getpid() == owner and os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _live(build: Callable[[], torch.nn.Module], answer: int) -> NoReturn:
    """Build the module, write its structure to the pipe, and exit; this runs in the child."""
    try:
        _cut_off(answer)
        with torch.device("meta"):
            found = structure(build())
        sent = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()}
        with os.fdopen(answer, "wb", closefd=False) as file:
            file.write(json.dumps(sent).encode())
    except BaseException:
        pass  # the child cannot build the module
    finally:
        os._exit(0)


def _cut_off(answer: int) -> None:
    """Prevent the child from affecting anything outside of it, and limit its lifetime."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
    signal.alarm(_LONGEST)
    gc.disable()
    logging.disable()
    sys.dont_write_bytecode = True
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first process to be killed if memory is short
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for path in list(Path("/dev/fd").iterdir()):  # their positions are shared with the parent
        if int(path.name) not in (0, 1, 2, answer):
            with suppress(OSError):
                os.close(int(path.name))
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    torch.set_num_threads(1)
    torch.cuda._lazy_init = lambda: os._exit(0)
    sys.addaudithook(_end_before_effects)


def _end_before_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """End the child before it does something that has an effect outside of it."""
    is_effect = event in _EFFECTS
    if event == "open":
        path, _, flags = arguments
        is_effect = not isinstance(path, int) and isinstance(flags, int) and bool(flags & _WRITES)
    if is_effect:
        os._exit(0)
