"""One process writes a run at a time: a POSIX lock, and a registry of the runs that this process writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from emrun.errors import RunInUse, StorageError
from emrun.files import storing, write_atomically

_LOCK, _OWNER = ".lock", ".owner.json"
_REGISTRY = threading.Lock()
_HELD: set[Path] = set()  # POSIX locks do not keep a process from locking a file twice


class RunLock:
    """The right to write a run, held from construction until `release`.

    The lock file is opened once and only here: closing any other descriptor of it in this process would drop the lock.
    The lock ends with the process, however that ends; who holds it stands in another file.

    Args:
        directory: the directory of the run.

    Raises:
        RunInUse: another process, or another training in this one, writes the run.
        StorageError: the lock file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        path = directory.resolve()
        with _REGISTRY:
            if path in _HELD:
                raise RunInUse(f"{directory} is in use by another training of this process")
            _HELD.add(path)
        try:
            with storing(directory / _LOCK, "write"):
                descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except BaseException:
            _HELD.discard(path)
            raise
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            _HELD.discard(path)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise RunInUse(f"{directory} is in use by {_owner(directory)}; try again when it has ended") from error
            raise StorageError(error.errno, f"cannot lock {directory / _LOCK}: {error.strerror}") from error
        self.release = weakref.finalize(self, _release, path, descriptor)
        """Let others write the run."""
        try:
            write_atomically(directory / _OWNER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        except BaseException:
            self.release()
            raise


def _release(path: Path, descriptor: int) -> None:
    with suppress(OSError):  # the directory may be gone
        (path / _OWNER).unlink()
    os.close(descriptor)
    _HELD.discard(path)


def _owner(directory: Path) -> str:
    try:
        owner = json.loads((directory / _OWNER).read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just beginning, or just ending
        return "another process"
