"""Folders in the system's directory for temporary files, which are deleted even if the process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_TEMPORARY, _IS_OURS = "emrun-", ".emrun"  # the prefix of temporary folders, and the file that marks them


class TemporaryFolder:
    """A folder `emrun-*` for temporary files, which exists until `delete` or the end of a `with` block.

    A process that is killed leaves its folder behind. The folder is locked as long as the process or a forked child
    runs; the next process that creates a temporary folder deletes those that are not locked.

    Args:
        purpose: a part of the folder's name.
    """

    def __init__(self, purpose: str = "") -> None:
        _clear_temporary_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{purpose}{purpose and '-'}"))
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.path.rmdir()
            raise
        with suppress(OSError):  # the file system has no locks; without the mark, no process deletes the folder
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / _IS_OURS).touch()

    def delete(self) -> None:
        """Delete the folder; may be called only once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.delete()


@cache
def _clear_temporary_folders() -> None:
    """Delete folders of processes that were killed; only folders of this user that have emrun's mark."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # it belongs to another user, or another process deletes it
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or not (folder / _IS_OURS).is_file():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
