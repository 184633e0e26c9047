"""One process writes a run at a time: a lock on a file, its owner in another one, and a registry within the process.

The lock is one of the open file description. A POSIX record lock would be lost as soon as anything in this process
closes another descriptor of the file, as a hook does that copies its `output_dir`. Forked children share the open file
description and would keep the lock after the death of this process, so each of them closes its descriptor at once. On
systems without such locks the lock is a record lock.

The length of the lock is the pid of the process that holds it, which thereby is known as soon as the lock is.
"""

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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from emrun.errors import RunInUse, StorageError
from emrun.storage.files import guard, storing, unguard, write_atomically

_LOCK, _OWNER = ".lock", ".owner.json"
EVALUATIONS = "eval"
"""The directory of a run that evaluations write, which take no lock."""
_NOT_THERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a system or a file system without such locks
_FLOCK = "hhqqi4x"  # Linux' struct flock: l_type, l_whence, l_start, l_len, l_pid
_HELD: dict[Path, int] = {}  # the runs that this process writes -> the descriptor of the lock file
_OPENING = threading.RLock()  # also held by whoever forks: a child knows all descriptors that it has


class RunLock:
    """The right to write a run, held from construction until `release`.

    The lock ends with the process, however that ends. Until `release`, `emrun.storage.files` writes into the directory
    while nobody has taken the run over: somebody may have deleted the lock file, and a process on another host may
    have made a new one.

    Args:
        directory: the directory of the run.

    Raises:
        RunInUse: another process, or another training in this one, writes the run.
        StorageError: the lock file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        path = directory.resolve()
        owner = _Owner.of_this_process()
        descriptor = _open(path, directory)
        self.release = weakref.finalize(self, _release, path, directory.absolute(), descriptor, owner)
        """Let others write the run."""
        try:
            _lock(descriptor, directory)
            if _is_replaced(descriptor, path):
                raise RunInUse(f"{directory} was taken over by another process; try again when it has ended")
            write_atomically(directory / _OWNER, json.dumps(asdict(owner)) + "\n")
            check = partial(_check, path, directory, owner, (path / _OWNER).stat())
            guard(directory.absolute(), check, but=EVALUATIONS)
        except BaseException:
            self.release()
            raise


@dataclass(frozen=True, slots=True)
class _Owner:
    """A process that writes a run. Another one may have the same pid later, but not the same time of its start.

    Args:
        pid: its number.
        started: when it started, in the clock ticks of its host; None where the system does not say.
        host: the name of its host.
    """

    pid: int
    started: int | None
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of_this_process(cls) -> _Owner:
        return cls(os.getpid(), _start_of(os.getpid())[1], socket.gethostname())

    @classmethod
    def of(cls, run: Path) -> _Owner | None:
        """Return who the run's file says writes the run; None where it says nothing that can be used."""
        try:
            found = cls(**json.loads((run / _OWNER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        fits = type(found.pid) is int and found.pid > 0 and type(found.host) is str
        return found if fits and (found.started is None or type(found.started) is int) else None

    @property
    def lives_here(self) -> bool:
        """Whether the process is one of this host and has not ended."""
        return self.host == socket.gethostname() and _start_of(self.pid) == (True, self.started)


def _start_of(pid: int) -> tuple[bool, int | None]:
    """Return whether a process of this host lives, and when it started, if the system says so."""
    if sys.platform != "linux":
        with suppress(PermissionError):  # it is somebody else's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False, None
        return True, None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False, None
    return state not in (b"Z", b"X"), int(fields[18])


def _open(path: Path, directory: Path) -> int:
    """Open the lock file, enter its descriptor into the registry, and return it."""
    with _OPENING:
        if path in _HELD:
            raise RunInUse(f"{directory} is in use by another training of this process")
        with storing(directory / _LOCK, "write"):
            try:
                _HELD[path] = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                _refuse_if_owner_lives(path, directory)
                _HELD[path] = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return _HELD[path]


def _refuse_if_owner_lives(path: Path, directory: Path) -> None:
    """Refuse a run without a lock file whose owner lives: it holds the lock of a file that somebody deleted."""
    owner = _Owner.of(path)
    if owner is not None and owner.lives_here and owner != _Owner.of_this_process():
        raise RunInUse(
            f"{directory} is in use by {owner}, although its file {_LOCK} was deleted; try again when it has ended"
        )


def _lock(descriptor: int, directory: Path) -> None:
    """Lock the file; raise `RunInUse` with the process that has done so already."""
    while True:
        try:
            _set(descriptor, fcntl.F_WRLCK)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise StorageError(error.errno, f"cannot lock {directory / _LOCK}: {error.strerror}") from error
            pid = _holder(descriptor)
            if pid is not None:
                owner = _name_of(pid, directory)
                raise RunInUse(f"{directory} is in use by {owner}; try again when it has ended") from error


def _set(descriptor: int, kind: int) -> None:
    """Lock the file, as long as the number of this process, or unlock it."""
    if _command(descriptor, "F_OFD_SETLK", kind, os.getpid() if kind == fcntl.F_WRLCK else 0) is None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if kind == fcntl.F_WRLCK else fcntl.LOCK_UN)


def _holder(descriptor: int) -> int | None:
    """Return the process that holds the lock, 0 where the system does not tell; None when it has just ended."""
    found = _command(descriptor, "F_OFD_GETLK", fcntl.F_WRLCK, 0)
    if found is None:
        return 0
    return None if found[0] == fcntl.F_UNLCK else found[3]


def _command(descriptor: int, name: str, kind: int, length: int) -> tuple[int, ...] | None:
    """Ask for or set a lock of the open file description; return its struct, None where there are no such locks."""
    if sys.platform == "linux":
        asked = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, length, 0)
        try:
            return struct.unpack(_FLOCK, fcntl.fcntl(descriptor, getattr(fcntl, name), asked))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    return None


def _name_of(pid: int, directory: Path) -> str:
    """Return who holds the lock; its file may not be written yet, or be that of one before, which was killed."""
    here = socket.gethostname()
    owner = _Owner.of(directory)
    if owner is None or (owner.host == here and pid not in (0, owner.pid)):
        owner = _Owner(pid, _start_of(pid)[1], here)
    return str(owner) if owner.host != here or owner.lives_here else "another process"


def _is_same(path: Path, written: os.stat_result) -> bool:
    """Tell whether a file has not been written since, which is looked at several times an epoch, without reading it."""
    with suppress(OSError):
        found = path.stat()
        return os.path.samestat(found, written) and found.st_mtime_ns == written.st_mtime_ns
    return False


def _is_replaced(descriptor: int, path: Path) -> bool:
    """Tell whether the lock file is another one than that which was opened; one that is not there is not."""
    with suppress(OSError):
        return not os.path.samestat(os.fstat(descriptor), (path / _LOCK).stat())
    return False


def _check(path: Path, directory: Path, me: _Owner, written: os.stat_result) -> None:
    """Check that the run is still this process's to write.

    A lock file that is only missing is no harm: no process of this host makes a new one while this one lives.

    Raises:
        RunInUse: another one has taken the run over, or this process is a fork of the owner.
    """
    descriptor = _HELD.get(path)
    if descriptor is None:
        raise RunInUse(f"{directory} is in use by {me}; its forked child, process {os.getpid()}, cannot write the run")
    owner = me if _is_same(path / _OWNER, written) else _Owner.of(path)
    if owner is not None and owner != me:
        raise RunInUse(f"{directory} was taken over by {owner}; {me} writes nothing more into the run")
    if _is_replaced(descriptor, path):
        raise RunInUse(
            f"{directory} was taken over: its file {_LOCK} is not the one that {me} holds the lock of; it writes "
            "nothing more into the run"
        )


def _release(path: Path, guarded: Path, descriptor: int, me: _Owner) -> None:
    unguard(guarded)
    if _HELD.pop(path, None) is None:  # in a forked child
        return
    if _Owner.of(path) == me:
        with suppress(OSError):
            (path / _OWNER).unlink()
    with suppress(OSError):
        _set(descriptor, fcntl.F_UNLCK)  # closing would leave it to what is forked at this moment
    os.close(descriptor)


def _leave_to_the_parent() -> None:
    """Close the lock files in a forked child, without unlocking: the locks are those of the parent."""
    for descriptor in _HELD.values():
        os.close(descriptor)
    _HELD.clear()
    _OPENING.release()


os.register_at_fork(before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_leave_to_the_parent)
