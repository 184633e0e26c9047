"""One process writes a run at a time: a POSIX lock, and a registry of the runs that this process writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from emrun.errors import RunInUse, StorageError
from emrun.files import storing, write_atomically

_LOCK, _OWNER = ".lock", ".owner.json"
_FLOCK = "hhqqi"  # Linux' struct flock: l_type, l_whence, l_start, l_len, l_pid
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
            _lock(descriptor, directory)
        except BaseException:
            os.close(descriptor)
            _HELD.discard(path)
            raise
        self.release = weakref.finalize(self, _release, path, descriptor)
        """Let others write the run."""
        try:
            write_atomically(directory / _OWNER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        except BaseException:
            self.release()
            raise


def _lock(descriptor: int, directory: Path) -> None:
    """Lock the file; raise `RunInUse` with the process that has done so already."""
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise StorageError(error.errno, f"cannot lock {directory / _LOCK}: {error.strerror}") from error
            pid = _holder(descriptor)
            if pid is not None:
                owner = _owner(directory, pid)
                raise RunInUse(f"{directory} is in use by {owner}; try again when it has ended") from error


def _release(path: Path, descriptor: int) -> None:
    with suppress(OSError):  # the directory may be gone
        (path / _OWNER).unlink()
    os.close(descriptor)
    _HELD.discard(path)


def _holder(descriptor: int) -> int | None:
    """Return the process that holds the lock, 0 where the system does not tell; None when it has just ended."""
    if sys.platform != "linux":
        return 0
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _owner(directory: Path, pid: int) -> str:
    """Return who holds the lock; its file may not be written yet, or be that of one before, which was killed."""
    here = socket.gethostname()
    with suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((directory / _OWNER).read_text(encoding="utf-8"))
        if pid in (0, owner["pid"]) or owner["host"] != here:
            return f"process {owner['pid']} on {owner['host']}"
    return f"process {pid} on {here}" if pid else "another process"
