"""The names in a run directory that a run writes: only these are removed, and only if nothing else is there.

The names of emrun's own files are here. Hooks declare theirs (`files`), and the trace keeps them. Other hidden names,
such as those of editors and file systems, are neither removed nor a reason not to remove the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from emrun.base.errors import ReadTimeout, StorageError
from emrun.base.wording import counted, in_one_line, listed
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.manifest import FILE, files_to_resume, is_directory_name
from emrun.storage.code.files import RECORD, recorded_files
from emrun.storage.files import check_owner, remove_files, storing
from emrun.storage.lock import EVALUATIONS, LOCK_FILES
from emrun.storage.run import CHECKPOINTS, CONFIG, FOREIGN
from emrun.storage.sealed import files_of
from emrun.storage.trace import TRACE

_FILES = re.compile(
    r"config(-\d+)?\.yaml|trace\.yaml|\.(config|trace)\.yaml\.json|train(-\d+)?\.log"
    r"|(metrics|steps|rows)\.jsonl|report\.html|(classes|preparation)\.json"
    r"|code(-\d+)?/(record\.json|packages\.txt|batches\.jsonl|diff(-\d+)?\.patch|modules/.+\.py)"
    r"|(checkpoints|failures)/\.tmp-.+"
    r"|stacks-\d+\.txt|\.files|(.+/)?\.[^/]+\.places"  # of runs of earlier versions
)
_FOLDERS = re.compile(
    r"checkpoints(/it-[\d-]+)?|failures(/\d+)?|(checkpoints|failures)/\.tmp-.+|eval|code(-\d+)?(/modules(/.+)?)?"
)
_TEMPORARY = re.compile(r"\.([^/]+?)(\.[0-9a-f]{16})?\.tmp")  # as `written_aside` names a file until it is complete
_FAILURES = "failures"
_FAILURE = "failure.json"
_MOUNTS = Path("/proc/self/mountinfo")
_MOST_NAMES = 5


@dataclass
class RunFiles:
    """What is in a run directory.

    Args:
        files: files and links that the run has written, those without which the directory is not a run last.
        folders: folders of the run, each after those in it.
        others: what else is there; of a folder that is a mount point or a link, or that cannot be read, only itself.
    """

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path) -> RunFiles:
        """Look at a run directory.

        Raises:
            ReadTimeout: the file system does not return a file in time.
        """
        content = cls()
        mounts = {mount for mount in _mount_points() if mount.is_relative_to(directory.resolve())}
        content._add(directory, directory, _Names(directory), mounts)
        content.files.sort(key=lambda path: path.name in (CONFIG, TRACE) and path.parent == directory)
        return content

    def _add(self, folder: Path, run: Path, names: _Names, mounts: set[Path]) -> None:
        """Add what is in a folder of a run."""
        try:
            with os.scandir(folder) as entries:
                contents = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            self.others.append(folder)
            return
        for entry in contents:
            path = Path(entry.path)
            place = path.relative_to(run).as_posix()
            is_hidden = entry.name.startswith(".")
            is_mount = bool(mounts) and path.parent.resolve() / path.name in mounts
            if entry.is_dir(follow_symlinks=False) and not is_mount:
                if path.parent == run / EVALUATIONS and StoredRun(path).is_evaluation:
                    self._add(path, path, _Names(path), mounts)
                    self.folders.append(path)
                elif names.has_folder(place):
                    self._add(path, run, names, mounts)
                    self.folders.append(path)
                elif not is_hidden and entry.name not in FOREIGN:
                    self.others.append(path)
            elif not is_mount and names.has(place, entry):
                self.files.append(path)
            elif not is_hidden and place not in LOCK_FILES:
                self.others.append(path)


class _Names:
    """The names that a run writes.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        declared = StoredRun(directory).trace.get("files") or ()
        self._patterns = [re.compile(_pattern(name)) for name in declared]
        folders = {str(parent) for name in declared for parent in Path(f"{name}-").parents}
        self._folders = [re.compile(_pattern(folder)) for folder in folders]
        self._recorded = {place.name: _recorded_in(place) for place in directory.glob("code*") if _has_record(place)}

    def has(self, place: str, entry: os.DirEntry[str]) -> bool:
        """Return whether a file or a link has a name of the run."""
        head, _, name = place.rpartition("/")
        if entry.is_symlink():
            return head == CHECKPOINTS and is_directory_name(str(Path(entry.path).readlink()))
        if not entry.is_file(follow_symlinks=False):
            return False
        folder = self._directory / head
        if folder.parent == self._directory / CHECKPOINTS and is_directory_name(folder.name):
            return name in (*files_of(folder / FILE), *files_to_resume(folder))
        if folder.parent == self._directory / _FAILURES and not folder.name.startswith("."):
            return name in files_of(folder / _FAILURE)
        return any(self._is_own(candidate) for candidate in (place, _complete(place)))

    def _is_own(self, place: str) -> bool:
        folder, _, inner = place.partition("/")
        if folder in self._recorded:
            return inner in self._recorded[folder]
        return bool(_FILES.fullmatch(place)) or any(pattern.fullmatch(place) for pattern in self._patterns)

    def has_folder(self, place: str) -> bool:
        """Return whether a folder has a name of the run, or files of the run may be in it."""
        complete = _complete(place)
        is_within = any(pattern.fullmatch(f"{complete}/-") for pattern in self._patterns)
        is_above = any(pattern.fullmatch(complete) for pattern in self._folders)
        return is_within or is_above or bool(_FOLDERS.fullmatch(place))


def _has_record(place: Path) -> bool:
    """Return whether a directory `code` is complete: the record is written last."""
    return not place.is_symlink() and os.path.lexists(place / RECORD)


def _recorded_in(place: Path) -> set[str]:
    """Return the files that the record in a directory `code` names; none if it is not a record of emrun."""
    try:
        return {str(path) for path in recorded_files(place)}
    except ReadTimeout:
        raise
    except StorageError:
        return set()


def _pattern(name: str) -> str:
    """Return the expression for the places of a declared name, relative to the run directory."""
    expression = re.escape(name).replace(r"\*", "[^/]*")
    return f"{expression}.+" if name.endswith("/") else expression


def _complete(place: str) -> str:
    """Return the place that a file gets, or the folder of a file, once it is complete."""
    parts = []
    for part in place.split("/"):
        temporary = _TEMPORARY.fullmatch(part)
        parts.append(part if temporary is None else temporary[1])
    return "/".join(parts)


def remove_run(directory: Path, *, keeps_directory: bool = False) -> list[Path]:
    """Delete a run, if there is nothing in its directory but what a run writes.

    Args:
        directory: the run directory.
        keeps_directory: whether the empty directory stays.

    Returns:
        What else is in the directory; then nothing was deleted.

    Raises:
        RunInUse: another process has taken the run over; nothing is deleted.
        StorageError: something cannot be deleted.
    """
    check_owner(directory / TRACE)
    content = RunFiles.of(directory)
    if not content.others:
        locks = [] if keeps_directory else [directory / name for name in LOCK_FILES]
        with storing(directory, "delete"):
            remove_files([*content.files, *locks], directory)
            remove_empty(content.folders)
            if not keeps_directory:
                remove_empty([directory])
    return content.others


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders in which nothing is, in their order; others stay."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def others_shown(directory: Path, others: Sequence[Path]) -> str:
    """Return why a directory is not removed, in words."""
    names = [in_one_line(str(path.relative_to(directory)), 40) for path in others]
    more = ["..."] if len(names) > _MOST_NAMES else []
    shown = listed([*names[:_MOST_NAMES], *more])
    return (
        f"has {counted(len(names), 'name')} that the run does not write: {shown}; "
        "move or delete what is yours, or name what a hook of yours writes in its attribute `files`"
    )


def _mount_points() -> Iterator[Path]:
    with suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            fields = line.split(" ")
            if len(fields) > 4:
                yield Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
