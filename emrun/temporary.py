"""Folders of the system's directory for temporary files that are cleared away also after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_TEMPORARY, _IS_OURS = "emrun-", ".emrun"  # how the names of temporary folders begin, and what marks them


class TemporaryFolder:
    """A folder `emrun-*` of the system's directory for such, until `delete` or the end of a `with` block.

    A process that is killed leaves its folder behind. It is locked as long as the process or a forked child lives; the
    next process that makes one clears away those that nobody holds.

    Args:
        purpose: part of its name.
    """

    def __init__(self, purpose: str = "") -> None:
        _clear_temporary_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{purpose}{purpose and '-'}"))
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.path.rmdir()
            raise
        with suppress(OSError):  # a file system without locks: without the mark, nobody clears it away
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / _IS_OURS).touch()

    def delete(self) -> None:
        """Delete the folder; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.delete()


@cache
def _clear_temporary_folders() -> None:
    """Delete the folders of processes that were killed; only those with emrun's own mark, and of this user."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # somebody else's, or somebody else deletes it too
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or not (folder / _IS_OURS).is_file():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
