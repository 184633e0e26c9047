"""What a module would have if it were built once more: built by a child process, so that nothing happens twice here."""

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

from emrun.models.weights import Structure, structure

_LONGEST = 60  # seconds that a child lives, whatever happens to this process
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.utime", "os.kill", "os.killpg", "os.fork", "os.forkpty", "os.system", "os.exec", "os.posix_spawn"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "socket.sendto", "sqlite3.connect"),
)


class BuiltApart:
    """A child process, forked here, builds a module on the device meta, without memory for its values.

    It begins as this process is, so begin it before the module is built here. It has no open files, its output goes
    nowhere, and it ends before it would write a file, start a process, connect to something or use a GPU. This process
    never waits long for it, and it is gone with this object.

    Args:
        build: builds the module.
    """

    def __init__(self, build: Callable[[], torch.nn.Module]) -> None:
        self._answer, ours = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads, which the child does without
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
        """Return one, None where processes cannot be forked."""
        is_possible = hasattr(os, "fork") and sys.platform != "darwin" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not is_possible or threading.current_thread() is not threading.main_thread():
            return None
        try:
            return cls(build)
        except OSError:  # no memory, processes or files left
            return None

    def structure(self, seconds: float) -> Structure | None:
        """Return names, shapes and dtypes of the module, then end the child.

        Args:
            seconds: how long to wait for them at most.

        Returns:
            None where they are not known by then, or the module could not be built that way.
        """
        text, ends_at = b"", monotonic() + seconds
        poll = select.poll()
        poll.register(self._answer, select.POLLIN)
        while poll.poll(max(0.0, ends_at - monotonic()) * 1000) and (part := os.read(self._answer, 1 << 16)):
            text += part
        self.end()
        try:
            found = json.loads(text)
        except ValueError:  # nothing, or not all of them
            return None
        return {
            name: (None if shape is None else tuple(shape), getattr(torch, dtype))
            for name, (shape, dtype) in found.items()
        }


def _end(owner: int, child: int, answer: int) -> None:
    """Kill the child and wait for it, in the process that forked it."""
    with suppress(OSError):  # somebody else closed it, or waited for the child
        os.close(answer)
    with suppress(OSError):
        if os.getpid() == owner and os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _live(build: Callable[[], torch.nn.Module], answer: int) -> NoReturn:
    """Build the module, write what it has, and end; all of it in the child."""
    try:
        _cut_off(answer)
        with torch.device("meta"):
            found = structure(build())
        sent = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()}
        with os.fdopen(answer, "wb", closefd=False) as file:
            file.write(json.dumps(sent).encode())
    except BaseException:
        pass  # it cannot be built that way
    finally:
        os._exit(0)


def _cut_off(answer: int) -> None:
    """Take from the child what it could do to others, and see to its end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
    signal.alarm(_LONGEST)
    gc.disable()
    logging.disable()
    sys.dont_write_bytecode = True
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # it is the first to go where memory is short
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for path in list(Path("/dev/fd").iterdir()):  # whose positions it shares
        if int(path.name) not in (0, 1, 2, answer):
            with suppress(OSError):
                os.close(int(path.name))
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    torch.set_num_threads(1)
    torch.cuda._lazy_init = lambda: os._exit(0)
    sys.addaudithook(_end_before_effects)


def _end_before_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """End the child before something happens that others would notice."""
    is_effect = event in _EFFECTS
    if event == "open":
        path, _, flags = arguments
        is_effect = not isinstance(path, int) and isinstance(flags, int) and bool(flags & _WRITES)
    if is_effect:
        os._exit(0)
