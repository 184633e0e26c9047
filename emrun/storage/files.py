"""Files and directories that are complete or absent, and names that are safe to give them."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from emrun.errors import TIMED_OUT, ReadTimeout, StorageError, is_timeout

_APPENDED: set[Path] = set()  # files with lines that are not flushed, and the directories of those that are new
# absolute directory with a / -> what raises when it is not ours to write any more, and what of it is not guarded
_GUARDS: dict[str, tuple[Callable[[], None], str]] = {}


@contextmanager
def storing(path: Path, what: str) -> Iterator[None]:
    """Turn an operating system's error about emrun's own files into one that says what could not be done.

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
    """Raise what says that a file could not be read in time, if an error or what caused it says that.

    Nothing is known of such a file: it is not to be taken for damaged, nor for one that is not there.

    Raises:
        ReadTimeout: with exit status 74.
    """
    found: BaseException | None = error
    while found is not None:
        if is_timeout(found):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {path}: {TIMED_OUT}") from error
        found = found.__cause__ or found.__context__


def guard(directory: Path, check: Callable[[], None], but: str) -> None:
    """Call `check` before a file below an absolute directory is written or cut, a line appended, a checkpoint saved.

    What it raises keeps the change from being made. The part of the directory named `but` is not guarded.
    """
    _GUARDS[f"{directory}{os.sep}"] = check, f"{directory}{os.sep}{but}{os.sep}"


def unguard(directory: Path) -> None:
    """End what `guard` began."""
    _GUARDS.pop(f"{directory}{os.sep}", None)


def check_guards(path: Path) -> None:
    """Check that a file may be changed.

    Raises:
        RunInUse: it is part of a run that this process was writing until another one took it over.
    """
    if _GUARDS:
        absolute = str(path.absolute())
        for directory, (check, free) in list(_GUARDS.items()):
            if absolute.startswith(directory) and not absolute.startswith(free):
                check()


@contextmanager
def written_aside(place: Path, aside: Path | None = None) -> Iterator[Path]:
    """Put what the block writes, a file or a folder, in its place in one step; what fails leaves nothing behind.

    The block flushes what it writes to disk; after it comes the rename, whose name is flushed too.

    Args:
        place: the place.
        aside: where the block writes, in the same directory; by default a path that no other process has.

    Returns:
        A context with the path `aside`, where nothing is.
    """
    aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp") if aside is None else aside
    _delete(aside)
    try:
        yield aside
        aside.rename(place)
    finally:
        _delete(aside)
    flush_directory(place.parent)


def _delete(path: Path) -> None:
    """Delete a file or a folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write a file aside, flush it to disk and rename it, so that it is never half a file."""
    check_guards(path)
    with storing(path, "write"), written_aside(path, path.with_name(f".{path.name}.tmp")) as aside:
        aside.write_bytes(text.encode() if isinstance(text, str) else text)
        flush_file(aside)


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Make a directory and those above it, and flush their names to disk.

    Raises:
        FileExistsError: it exists, and may not.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for each in new:
        flush_directory(each.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, whole or not at all; `flush_lines` brings it to disk.

    Until then a loss of power may take it away, but no death of the process.
    """
    check_guards(path)
    with storing(path, "write"):
        is_new = not path.exists()
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
    """Flush to disk what `append_line` wrote.

    Raises:
        StorageError: that failed; what is in the files is as safe as the system makes it.
    """
    with suppress(KeyError):  # nothing is left, maybe as another thread took it
        while True:
            path = _APPENDED.pop()
            with storing(path, "write"), suppress(FileNotFoundError):  # somebody deleted it
                flush_file(path)


def truncate(path: Path, length: int) -> None:
    """Cut a file down to its first `length` bytes, if it is longer; a file that is not there counts as empty."""
    check_guards(path)
    with storing(path, "write"):
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)
            flush_file(path)


def flush_file(path: Path) -> None:
    """Flush what was written to a file, by whomever, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    flush_file(path)


def link_atomically(link: Path, target: str) -> None:
    """Make `link` a relative link to `target` beside it, replacing an older one in one step; it is not flushed."""
    check_guards(link)
    with storing(link, "write"):
        aside = link.with_name(f".{link.name}.tmp")
        aside.unlink(missing_ok=True)
        try:
            aside.symlink_to(target)
            aside.replace(link)
        finally:
            aside.unlink(missing_ok=True)
