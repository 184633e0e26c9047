"""Only one process at a time writes a run: a lock on a file, its owner in another file, and a registry in the process.

The lock is an open file description lock. A POSIX record lock would be lost as soon as any code of this process closes
another descriptor of the file, for example a hook that copies its `output_dir`. Forked children share the open file
description and would keep the lock after the end of this process, so each child closes its descriptor at once. On
systems without open file description locks, the lock is a record lock.

The length of the locked range is the pid of the process that holds the lock, so that others can read the pid at once.
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
from time import monotonic, sleep

from emrun.base.errors import RunInUse, StorageError
from emrun.storage.files import guard, read_regular, storing, unguard, write_atomically

_LOCK, _OWNER = ".lock", ".owner.json"
LOCK_FILES = (_LOCK, _OWNER)
"""The files of the lock in a run directory."""
ANOTHER = "another process"
"""What `writer_of` returns if only the lock is known: a child of a process that has ended may hold it for a moment."""
EVALUATIONS = "eval"
"""The directory of a run that evaluations write; evaluations take no lock."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LARGEST_OWNER = 10_000  # bytes
_PATIENCE = 10.0  # seconds in which the children of a process that has ended let go of the lock
_NOT_THERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the system or the file system does not have such locks
_FLOCK = "hhqqi4x"  # struct flock of Linux: l_type, l_whence, l_start, l_len, l_pid
_HELD: dict[Path, int] = {}  # the runs that this process writes -> the descriptor of the lock file
_OPENING = threading.RLock()  # also held during a fork, so that a child knows all descriptors that it has


class RunLock:
    """The right to write a run, held from construction until `release`.

    The lock ends with the process, however the process ends. Until `release`, `emrun.storage.files` writes into the
    directory only while no other process has taken the run over. That can happen if the lock file is deleted and a
    process on another host creates a new one.

    Args:
        directory: the directory of the run.

    Raises:
        RunInUse: another process, or another run object of this process, writes the run.
        StorageError: the lock file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        path = directory.resolve()
        owner = _Owner.of_this_process()
        descriptor = _open(path, directory)
        self.release = weakref.finalize(self, _release, path, descriptor, owner)
        """Release the lock, so that another process can write the run."""
        try:
            _lock(descriptor, directory)
            if _is_replaced(descriptor, path):
                raise RunInUse(f"{directory} was taken over by another process; try again when it has ended")
            write_atomically(path / _OWNER, json.dumps(asdict(owner)) + "\n")
            check = partial(_check, path, directory, owner, (path / _OWNER).stat())
            guard(path, check, but=EVALUATIONS)
        except BaseException:
            self.release()
            raise


@dataclass(frozen=True, slots=True)
class _Owner:
    """A process that writes a run. A later process may have the same pid, but not the same start time.

    Args:
        pid: the process id.
        started: when the process started, in clock ticks of the host; None if the system does not provide this.
        host: the host's name.
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
        """Return the owner that is recorded in a run; None if there is no valid record."""
        try:
            owner = cls(**json.loads(read_regular(run / _OWNER, _LARGEST_OWNER)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        fits = type(owner.pid) is int and owner.pid > 0 and type(owner.host) is str
        return owner if fits and (owner.started is None or type(owner.started) is int) else None

    @property
    def lives_here(self) -> bool:
        """Whether the process runs on this host and has not ended."""
        return self.host == socket.gethostname() and _start_of(self.pid) == (True, self.started)


def writer_of(directory: Path) -> str | None:
    """Return the process that writes a run, in words; None if no process does. The lock is only looked at.

    On a file system without locks, a process on another host counts as ended.

    Args:
        directory: the directory of the run.
    """
    owner = _Owner.of(directory)
    if directory.resolve() in _HELD:
        return f"process {os.getpid()}"
    is_here = owner is not None and owner.lives_here
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it was deleted, or cannot be read
        return str(owner) if is_here else None
    try:
        state = _command(descriptor, "F_OFD_GETLK", fcntl.F_WRLCK, 0)
    finally:
        os.close(descriptor)
    if state is None:
        return str(owner) if is_here else None
    return None if state[0] == fcntl.F_UNLCK else _name_of(state[3], directory)


def last_writer_elsewhere(directory: Path) -> str | None:
    """Return the process of another host that has not released the lock of a run, in words; None if there is none.

    Whether it has ended can only be seen on that host, unless the file system shares locks.
    """
    owner = _Owner.of(directory)
    return str(owner) if owner is not None and owner.host != socket.gethostname() else None


def process_of(host: object, pid: object) -> str | None:
    """Return a process in words, unless it is known to have ended."""
    if not isinstance(pid, int) or (host == socket.gethostname() and not _start_of(pid)[0]):
        return None
    return f"process {pid} on {host}"


def _start_of(pid: int) -> tuple[bool, int | None]:
    """Return whether a process of this host is running, and when it started, None if that is not known."""
    if sys.platform != "linux":
        with suppress(PermissionError):  # the process belongs to another user
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
    """Open the lock file, add its descriptor to the registry, and return the descriptor."""
    with _OPENING:
        if path in _HELD:
            raise RunInUse(f"{directory} is in use by another run of this process")
        with storing(directory / _LOCK, "write"):
            try:
                _HELD[path] = os.open(path / _LOCK, _FLAGS)
            except FileNotFoundError:
                _refuse_if_owner_lives(path, directory)
                _HELD[path] = os.open(path / _LOCK, _FLAGS | os.O_CREAT, 0o666)
        return _HELD[path]


def _refuse_if_owner_lives(path: Path, directory: Path) -> None:
    """Raise `RunInUse` if the lock file is missing but its owner is running: the owner still locks the deleted file."""
    owner = _Owner.of(path)
    if owner is not None and owner.lives_here and owner != _Owner.of_this_process():
        raise RunInUse(
            f"{directory} is in use by {owner}, although its file {_LOCK} was deleted; try again when it has ended"
        )


def _lock(descriptor: int, directory: Path) -> None:
    """Lock the file; raise `RunInUse`, which names the owner, if another process has locked it.

    A process may be killed while it starts a command, such as git. Its child has the lock until it executes the
    command, a moment that is long on a busy machine.
    """
    ends_at = monotonic() + _PATIENCE
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
                if not pid or owner != ANOTHER or monotonic() > ends_at:
                    raise RunInUse(f"{directory} is in use by {owner}; try again when it has ended") from error
                sleep(0.01)


def _set(descriptor: int, kind: int) -> None:
    """Lock a range of the file as long as the pid of this process, or unlock the file."""
    if _command(descriptor, "F_OFD_SETLK", kind, os.getpid() if kind == fcntl.F_WRLCK else 0) is None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if kind == fcntl.F_WRLCK else fcntl.LOCK_UN)


def _holder(descriptor: int) -> int | None:
    """Return the pid of the lock's holder, 0 if the system does not provide it; None if the holder has just ended."""
    state = _command(descriptor, "F_OFD_GETLK", fcntl.F_WRLCK, 0)
    if state is None:
        return 0
    return None if state[0] == fcntl.F_UNLCK else state[3]


def _command(descriptor: int, name: str, kind: int, length: int) -> tuple[int, ...] | None:
    """Query or set an open file description lock; return its struct, None if the system does not have such locks."""
    if sys.platform == "linux":
        request = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, length, 0)
        try:
            return struct.unpack(_FLOCK, fcntl.fcntl(descriptor, getattr(fcntl, name), request))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    return None


def _name_of(pid: int, directory: Path) -> str:
    """Return the name of the lock's holder; the owner file may be missing or outdated."""
    here = socket.gethostname()
    owner = _Owner.of(directory)
    if owner is None or (owner.host == here and pid not in (0, owner.pid)):
        owner = _Owner(pid, _start_of(pid)[1], here)
    return str(owner) if owner.host != here or owner.lives_here else ANOTHER


def _is_same(path: Path, written: os.stat_result) -> bool:
    """Return whether a file is unchanged, without reading it, because this is checked several times per epoch."""
    with suppress(OSError):
        now = path.stat()
        return os.path.samestat(now, written) and now.st_mtime_ns == written.st_mtime_ns
    return False


def _is_replaced(descriptor: int, path: Path) -> bool:
    """Return whether the lock file was replaced by another file; False if it is missing."""
    with suppress(OSError):
        return not os.path.samestat(os.fstat(descriptor), (path / _LOCK).stat())
    return False


def _check(path: Path, directory: Path, me: _Owner, written: os.stat_result) -> None:
    """Check that this process may still write the run.

    A missing lock file is harmless: no process of this host creates a new one while this process is running.

    Raises:
        RunInUse: another process has taken the run over, or this process is a fork of the owner.
    """
    descriptor = _HELD.get(path)
    if descriptor is None:
        raise RunInUse(f"{directory} is in use by {me}; its forked child, process {os.getpid()}, cannot write the run")
    owner = me if _is_same(path / _OWNER, written) else _Owner.of(path)
    if owner is not None and owner != me:
        raise RunInUse(f"{directory} was taken over by {owner}; {me} no longer writes into it")
    if _is_replaced(descriptor, path):
        raise RunInUse(
            f"{directory} was taken over by another process, which replaced its file {_LOCK}; {me} no longer "
            "writes into it"
        )


def _release(path: Path, descriptor: int, me: _Owner) -> None:
    unguard(path)
    if _HELD.pop(path, None) is None:  # in a forked child
        return
    if _Owner.of(path) == me:
        with suppress(OSError):
            (path / _OWNER).unlink()
    with suppress(OSError):
        _set(descriptor, fcntl.F_UNLCK)  # after a mere close, a child that is being forked would keep the lock
    os.close(descriptor)


def _leave_to_the_parent() -> None:
    """Close the lock files in a forked child without unlocking them: the locks belong to the parent."""
    for descriptor in _HELD.values():
        os.close(descriptor)
    _HELD.clear()
    _OPENING.release()


os.register_at_fork(before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_leave_to_the_parent)
