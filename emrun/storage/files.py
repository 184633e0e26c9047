"""Writing files and directories so that each is complete or absent, and flushing them to disk."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from emrun.base.errors import TIMED_OUT, ReadTimeout, StorageError, is_timeout
from emrun.base.wording import size_of

_APPENDED: set[Path] = set()  # files with lines that are not flushed, and the directories of new ones
# absolute directory with a / -> the check, which raises if this process may not write it any more; unguarded part
_GUARDS: dict[str, tuple[Callable[[], None], str]] = {}


@contextmanager
def storing(path: Path, what: str, *others: type[Exception]) -> Iterator[None]:
    """Turn an operating system's error about emrun's own files into a `StorageError` that names the operation.

    Args:
        path: the file.
        what: the operation, such as `read`.
        others: classes of other errors that mean the same, such as those of a format.

    Raises:
        StorageError: with exit status 74.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, *others) as error:  # type: ignore[misc]  # mypy does not know the star
        if what == "read":
            refuse_timeout(error, path)
        number = getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise StorageError(number or errno.EIO, f"cannot {what} {path}: {reason}") from error


def refuse_timeout(error: BaseException, path: Path) -> None:
    """Raise `ReadTimeout` if an error, or the error that caused it, is a time-out.

    A file that could not be read in time must be treated neither as damaged nor as missing: its state is unknown.

    Raises:
        ReadTimeout: the error is a time-out; with exit status 74.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_timeout(cause):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {path}: {TIMED_OUT}") from error
        cause = cause.__cause__ or cause.__context__


def read_regular(path: Path, most: int, depth: int = 1) -> bytes:
    """Return the content of a file that may be anybody's: a regular file, and not too large.

    Args:
        path: the file.
        most: the largest size in bytes.
        depth: see `opened_regular`.

    Raises:
        StorageError: there is no such file, or it cannot be read, is larger, or is a directory, a pipe or a device.
    """
    with opened_regular(path, depth) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise StorageError(errno.EFBIG, f"cannot read {path}: it is larger than {size_of(most)}")
    return content


@contextmanager
def opened_regular(path: Path, depth: int = 1) -> Iterator[BinaryIO]:
    """Open a file that may be anybody's for reading; a pipe or a device, which may never end, is refused.

    Args:
        path: the file.
        depth: how many parts at the end of the path are those of a run: 1 for a file in the run directory. None of them
            may be a link.

    Raises:
        StorageError: there is no such file, or it cannot be read; also if that happens in the block.
    """
    with storing(path, "read"), open(_open_regular(path, depth), "rb") as file:
        yield file


def _open_regular(path: Path, depth: int = 1, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting, each of the last parts of the path from the directory before it."""
    folder = os.open(Path(*path.parts[:-depth]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path.parts[-depth:-1]:
            before, folder = folder, _open_within(folder, part, os.O_DIRECTORY)
            os.close(before)
        descriptor = _open_within(folder, path.name, flags | os.O_NONBLOCK)  # a pipe would wait for a reader
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def copy_regular(source: Path, target: Path, depth: int = 1) -> None:
    """Copy a regular file of a run with its times; see `opened_regular`.

    Raises:
        OSError: there is no such file, or it cannot be copied.
    """
    os.close(_open_regular(source, depth))
    shutil.copy2(source, target, follow_symlinks=False)


def check_no_link(directory: Path | str) -> None:
    """Check that a directory of a run is not a link.

    Raises:
        StorageError: it is.
    """
    if os.path.islink(directory):  # noqa: PTH114 - asked for each file that is written
        raise StorageError(errno.ELOOP, f"{directory} is a link, and links in a run are not followed")


def _open_within(folder: int, part: str, flags: int) -> int:
    try:
        return os.open(part, os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666, dir_fd=folder)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(
            os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
        )
        if is_link:
            raise OSError(errno.ELOOP, f"{part} is a link, which is not followed") from error
        raise


def guard(directory: Path, check: Callable[[], None], but: str) -> None:
    """Call `check` before every change below an absolute directory: a write, a cut, an appended line, a checkpoint.

    If `check` raises, the change is not made. The subdirectory `but` is not guarded.
    """
    _GUARDS[f"{directory}{os.sep}"] = check, f"{directory}{os.sep}{but}{os.sep}"


def unguard(directory: Path) -> None:
    """Remove the check that `guard` set."""
    _GUARDS.pop(f"{directory}{os.sep}", None)


def check_owner(path: Path) -> None:
    """Check that this process may still write a file.

    Raises:
        RunInUse: it is part of a run that another process has taken over from this one.
    """
    absolute = str(path.absolute()) if _GUARDS else ""
    for directory, (check, free) in list(_GUARDS.items()):
        if absolute.startswith(directory) and not absolute.startswith(free):
            check()


@contextmanager
def written_aside(place: Path, aside: Path | None = None, *, flushes: bool = True) -> Iterator[Path]:
    """Let the block write a file, a folder or a link to a temporary path, then rename it to `place`.

    The block must flush what it writes to disk. If the block fails, nothing is left behind.

    Args:
        place: the final path.
        aside: the temporary path, in the same directory; by default a path that no other process uses.
        flushes: whether the rename is flushed to disk.

    Returns:
        A context with the path `aside`, where nothing exists.
    """
    aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp") if aside is None else aside
    _delete(aside)
    try:
        yield aside
        aside.rename(place)
    except BaseException:
        _delete(aside)
        raise
    if flushes:
        flush_directory(place.parent)


def remove_files(files: Iterable[Path], home: Path) -> None:
    """Remove files and links, and each directory when nothing is left in it, up to and with `home`.

    Raises:
        OSError: a file cannot be removed.
    """
    for path in files:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if not parent.is_relative_to(home):
                break
            with suppress(OSError):  # it is not empty, gone, or a mount point
                parent.rmdir()


def _delete(path: Path) -> None:
    """Delete a file or a folder; errors are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write a temporary file, flush it to disk and rename it, so that the file is never incomplete."""
    check_owner(path)
    with storing(path, "write"), written_aside(path, aside_of(path)) as aside:
        write_flushed(aside, text.encode() if isinstance(text, str) else text)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk, with few calls of the system: each of a thread can hold up the training."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, rest: bytes) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def aside_of(path: Path) -> Path:
    """Return the temporary file of `write_atomically`, which a process that was killed leaves behind."""
    return path.with_name(f".{path.name}.tmp")


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Create a directory and its parents, and flush their names to disk.

    Raises:
        FileExistsError: the directory exists and `exist_ok` is false.
    """
    new = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for directory in new:
        flush_directory(directory.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which need not exist; see `append`."""
    append(path, f"{line}\n".encode(), os.O_CREAT)


def append(path: Path, data: bytes, flags: int = 0) -> None:
    """Append to a file that exists, completely or not at all; `flush_lines` flushes it to disk.

    Until then the data survive the end of the process, but not a loss of power.
    """
    check_owner(path)
    with storing(path, "write"):
        descriptor = _open_regular(path, 1, os.O_WRONLY | os.O_APPEND | flags)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
            except OSError:
                with suppress(OSError):
                    os.truncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        _APPENDED.update((path,) if size else (path, path.parent))


def flush_lines() -> None:
    """Flush what `append` and `append_line` wrote to disk.

    Raises:
        StorageError: a flush failed; lines may get lost if the power fails.
    """
    with suppress(KeyError):  # nothing is left; another thread may have taken the last one
        while True:
            path = _APPENDED.pop()
            with storing(path, "write"), suppress(FileNotFoundError):  # another process deleted it
                flush_file(path)


def truncate(path: Path, length: int) -> None:
    """Cut a file down to its first `length` bytes if it is longer; a missing file stays missing."""
    check_owner(path)
    with storing(path, "write"):
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)
            flush_file(path)


def flush_file(path: Path) -> None:
    """Flush everything that was written to a file, by any process, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    flush_file(path)


def link_atomically(link: Path, target: str) -> None:
    """Make `link` a link to `target` in the same directory, replacing an old link in one step; nothing is flushed."""
    check_owner(link)
    if link.exists() and not link.is_symlink():
        raise StorageError(errno.EEXIST, f"cannot write {link}: it is not a link; move it elsewhere")
    with storing(link, "write"), written_aside(link, aside_of(link), flushes=False) as aside:
        aside.symlink_to(target)
