"""Writing files and directories so that each is complete or absent, and flushing them to disk."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import BinaryIO

from emrun.base.errors import TIMED_OUT, ReadTimeout, StorageError, UsageError, is_timeout
from emrun.base.wording import size_of

_APPENDED: set[Path] = set()  # files with lines that are not flushed, and the directories of new ones
# absolute directory with a / -> the check, which raises if this process may not write it any more; unguarded part
_GUARDS: dict[str, tuple[Callable[[], None], str]] = {}
_WRITTEN: dict[str, set[str]] = {}  # absolute run directory with a / -> the files that were written, relative to it
_OF_USER: set[str] = set()  # those that had files before the run
LIST = ".files"
"""The file in a run directory that lists what the run has written, but for folders with lists of their own."""
_LISTED_ELSEWHERE = ("checkpoints/", "failures/", "eval/", ".")
_LARGEST_LIST = 50_000_000  # bytes


@contextmanager
def storing(path: Path, what: str) -> Iterator[None]:
    """Turn an operating system's error about emrun's own files into a `StorageError` that names the operation.

    Raises:
        StorageError: with exit status 74.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if what == "read":
            refuse_timeout(error, path)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else error.strerror or str(error)
        raise StorageError(error.errno or errno.EIO, f"cannot {what} {path}: {reason}") from error


def refuse_timeout(error: BaseException, path: Path) -> None:
    """Raise `ReadTimeout` if an error, or the error that caused it, is a time-out.

    A file that could not be read in time must be treated neither as damaged nor as missing: its state is unknown.

    Raises:
        ReadTimeout: the error is a time-out; with exit status 74.
    """
    found: BaseException | None = error
    while found is not None:
        if is_timeout(found):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {path}: {TIMED_OUT}") from error
        found = found.__cause__ or found.__context__


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a file that may be anybody's: a regular file, and not too large.

    Args:
        path: the file.
        most: the largest size in bytes.

    Raises:
        StorageError: there is no such file, or it cannot be read, is larger, or is a directory, a pipe or a device.
    """
    with storing(path, "read"):
        descriptor = _open_regular(path)
        try:
            content = os.read(descriptor, most + 1)
            while len(content) <= most and (more := os.read(descriptor, most + 1 - len(content))):
                content += more
        finally:
            os.close(descriptor)
    if len(content) > most:
        raise StorageError(errno.EFBIG, f"cannot read {path}: it is larger than {size_of(most)}")
    return content


@contextmanager
def opened_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file that may be anybody's for reading; a pipe or a device, which may never end, is refused.

    Raises:
        StorageError: there is no such file, or it cannot be read; also if that happens in the block.
    """
    with storing(path, "read"), open(_open_regular(path), "rb") as file:
        yield file


def _open_regular(path: Path) -> int:
    """Open a file that is a regular one itself, and no link to one, without waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def guard(directory: Path, check: Callable[[], None], but: str) -> None:
    """Call `check` before every change below an absolute directory: a write, a cut, an appended line, a checkpoint.

    If `check` raises, the change is not made. The subdirectory `but` is not guarded.
    """
    _GUARDS[f"{directory}{os.sep}"] = check, f"{directory}{os.sep}{but}{os.sep}"


def unguard(directory: Path) -> None:
    """Remove the check that `guard` set."""
    _GUARDS.pop(f"{directory}{os.sep}", None)


def note_writes(directory: Path, *known: str, is_of_user: bool = False) -> None:
    """Note from now on what is written below the directory of a run; see `write_list`.

    Args:
        directory: the run directory.
        known: names of files that the run has written already.
        is_of_user: whether files were there before the run: those that it would change are the user's.
    """
    place = f"{directory.absolute()}{os.sep}"
    _WRITTEN[place] = {*known, *map(str, listed_files(directory) or ())}
    (_OF_USER.add if is_of_user else _OF_USER.discard)(place)


def listed_files(directory: Path) -> list[PurePath] | None:
    """Return what `write_list` has written; None if there is no list."""
    try:
        names = read_regular(directory / LIST, _LARGEST_LIST).decode(errors="surrogateescape").split("\0")
    except StorageError:
        return None
    found = [PurePath(name) for name in names if name]
    return [each for each in found if not each.is_absolute() and ".." not in each.parts]


def write_list(directory: Path) -> None:
    """Write the list of what the run in a directory has written, if it is not complete."""
    written = _WRITTEN.get(f"{directory.absolute()}{os.sep}")
    if written is not None and written != {str(each) for each in listed_files(directory) or ()}:
        write_atomically(directory / LIST, "\0".join(sorted(written)).encode(errors="surrogateescape"))


def check_guards(path: Path) -> None:
    """Check that a file may be changed, and note that the run writes it.

    Raises:
        RunInUse: the file is part of a run that another process has taken over from this one.
        UsageError: the file was there before the run.
    """
    if _GUARDS or _WRITTEN:
        absolute = str(path.absolute())
        for directory, written in _WRITTEN.items():
            if absolute.startswith(directory) and not absolute.startswith(_LISTED_ELSEWHERE, len(directory)):
                name = absolute[len(directory) :]
                if directory in _OF_USER and name not in written and os.path.lexists(absolute):
                    message = f"{path} was there before the run, which would change it"
                    raise UsageError(f"{message}; choose another directory, or move the file")
                written.add(name)
        for directory, (check, free) in list(_GUARDS.items()):
            if absolute.startswith(directory) and not absolute.startswith(free):
                check()


@contextmanager
def written_aside(place: Path, aside: Path | None = None) -> Iterator[Path]:
    """Let the block write a file or a folder to a temporary path, then rename it to `place`.

    The block must flush what it writes to disk; the rename is flushed here. If the block fails, nothing is left behind.

    Args:
        place: the final path.
        aside: the temporary path, in the same directory; by default a path that no other process uses.

    Returns:
        A context with the path `aside`, where nothing exists.
    """
    aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp") if aside is None else aside
    _delete(aside)
    try:
        yield aside
        aside.rename(place)
    finally:
        _delete(aside)
    flush_directory(place.parent)


def remove_files(files: Iterable[Path], home: Path) -> None:
    """Remove files and links, and the directories in which nothing is left then, up to and with `home`.

    Raises:
        OSError: a file cannot be removed.
    """
    folders: dict[Path, None] = {}
    for path in files:
        path.unlink(missing_ok=True)
        folders.update(dict.fromkeys(each for each in path.parents if each.is_relative_to(home)))
    for each in sorted(folders, key=lambda path: -len(path.parts)):
        with suppress(OSError):  # it is not empty, or a mount point
            each.rmdir()


def _delete(path: Path) -> None:
    """Delete a file or a folder; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write a temporary file, flush it to disk and rename it, so that the file is never incomplete."""
    check_guards(path)
    with storing(path, "write"), written_aside(path, aside_of(path)) as aside:
        aside.write_bytes(text.encode() if isinstance(text, str) else text)
        flush_file(aside)


def aside_of(path: Path) -> Path:
    """Return the temporary file of `write_atomically`, which a process that was killed leaves behind."""
    return path.with_name(f".{path.name}.tmp")


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Create a directory and its parents, and flush their names to disk.

    Raises:
        FileExistsError: the directory exists and `exist_ok` is false.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for each in new:
        flush_directory(each.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, completely or not at all; `flush_lines` flushes it to disk.

    Until then the line survives the end of the process, but not a loss of power.
    """
    check_guards(path)
    with storing(path, "write"):
        is_new = not os.path.lexists(path)
        if not is_new:
            os.close(_open_regular(path))  # a pipe would wait for a reader
        size = 0 if is_new else path.stat().st_size
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise
        _APPENDED.update((path, path.parent) if is_new else (path,))


def flush_lines() -> None:
    """Flush the lines that `append_line` wrote to disk.

    Raises:
        StorageError: a flush failed; the lines may get lost if the power fails.
    """
    with suppress(KeyError):  # nothing is left; another thread may have taken the last one
        while True:
            path = _APPENDED.pop()
            with storing(path, "write"), suppress(FileNotFoundError):  # another process deleted it
                flush_file(path)


def truncate(path: Path, length: int) -> None:
    """Cut a file down to its first `length` bytes if it is longer; a missing file stays missing."""
    check_guards(path)
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
    check_guards(link)
    with storing(link, "write"):
        aside = link.with_name(f".{link.name}.tmp")
        aside.unlink(missing_ok=True)
        try:
            aside.symlink_to(target)
            aside.replace(link)
        finally:
            aside.unlink(missing_ok=True)
