"""A file or a folder that a hook writes over several events: it appears when it is complete."""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack
from pathlib import Path

from emrun.storage.files import check_owner, flush_file, make_directory, storing, written_aside

_LOG = logging.getLogger(__name__)


class Aside:
    """A file or a folder that is written to a temporary path, and then takes the place of the one before.

    Args:
        place: the final path.
        is_folder: whether it is a folder with files.
    """

    def __init__(self, place: Path, *, is_folder: bool = False) -> None:
        self.place = place
        self._is_folder = is_folder
        self._open: ExitStack | None = None
        self._path = place

    def begin(self, *, by_one_process: bool = True) -> Path:
        """Return the temporary path: of no file, or of an empty folder.

        Args:
            by_one_process: whether no other process writes the same place. Then the temporary path is always the same,
                and what a process that was killed has left there is deleted.

        Raises:
            StorageError: it cannot be written.
        """
        check_owner(self.place)
        with storing(self.place, "write"), ExitStack() as stack:
            aside = self.place.with_name(f".{self.place.name}.tmp") if by_one_process else None
            if self._is_folder:
                make_directory(self.place.parent, exist_ok=True)
            self._path = stack.enter_context(written_aside(self.place, aside))
            if self._is_folder:
                self._path.mkdir()
            self._open = stack.pop_all()
        return self._path

    def finish(self) -> None:
        """Flush what was written to disk, and rename it.

        Raises:
            StorageError: it cannot be written.
        """
        opened = self._open
        self._open = None
        if opened is None:
            return
        with storing(self.place, "write"), opened:
            flush_file(self._path)
            if self._is_folder:
                for file in sorted(self._path.iterdir()):
                    check_owner(self.place / file.name)
                    flush_file(file)
                if self.place.is_dir():
                    shutil.rmtree(self.place)

    def drop(self) -> None:
        """Delete what was written since `begin`, if it is not complete."""
        opened = self._open
        self._open = None
        if opened is not None:
            _LOG.debug("%s was not completed", self.place)
            opened.__exit__(_Dropped, _Dropped(), None)


class _Dropped(Exception):
    """Ends the writing of what is not complete."""
