"""Copy files into the run directory before the training."""

from __future__ import annotations

import filecmp
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from emrun.base.arguments import check_names, expanded
from emrun.base.errors import ArgumentError
from emrun.hook import AbstractHook
from emrun.storage.files import check_owner, flush_file, make_directory, storing, written_aside

_LOG = logging.getLogger(__name__)

DIRECTORY = "files"
"""The directory for the files, in the run directory."""


class SaveFile(AbstractHook):
    """Copies files to the folder `files` of the run directory before the training.

        hooks:
          - SaveFile: {files: [labels.txt, tokenizer.json]}

    Every run records its config, its code and its packages anyway. This hook is for other files that the results depend
    on, such as a vocabulary or a list of examples; for data that is too large, a list with checksums is enough.

    A run that is resumed keeps the copies that it began with, and a warning names files that have changed since.

    Args:
        files: the paths of the files. Relative paths start from the current directory.

    Raises:
        ArgumentError: this is not a list of files with different names, or a file is missing or a directory.
        StorageError: a file cannot be read or copied.
    """

    reads = ()
    files = (f"{DIRECTORY}/",)

    def __init__(self, files: Sequence[str], output_dir: str | Path | None = None) -> None:
        super().__init__(output_dir=output_dir)
        check_names("files", files)
        self._copies: dict[Path, Path] = {}
        for index, name in enumerate(files):
            path = expanded(name)
            place = Path(output_dir or ".")
            copy = place / DIRECTORY / path.name
            if copy in self._copies.values():
                raise ArgumentError(f"files[{index}]", f"there are two files with the name {path.name!r}; rename one")
            if path.is_dir():
                raise ArgumentError(f"files[{index}]", f"{name!r} is a directory; list its files")
            kept = (copy, place.parent.parent / DIRECTORY / path.name)  # of a resume, of an evaluation below the run
            if not path.is_file() and not any(candidate.is_file() for candidate in kept):
                where = "" if path.is_absolute() else f" (the current directory is {Path.cwd()})"
                raise ArgumentError(f"files[{index}]", f"there is no file {name!r}{where}")
            self._copies[path.absolute()] = copy

    def before_training(self) -> None:
        """Copy the files that are not there yet.

        Raises:
            StorageError: a file cannot be read or copied.
        """
        if self.main_loop.evaluating:
            return
        for path, copy in self._copies.items():
            if not copy.exists():
                check_owner(copy)
                with storing(copy, "write"):
                    make_directory(copy.parent, exist_ok=True)
                    with written_aside(copy) as aside:
                        shutil.copyfile(path, aside)
                        flush_file(aside)
            elif path.is_file():
                with storing(path, "read"):
                    if not filecmp.cmp(path, copy, shallow=False):
                        _LOG.warning("SaveFile: %s has changed since the run began; %s is kept", path, copy)
