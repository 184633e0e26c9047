"""Which files of a run directory emrun has written; everything else belongs to the user, and is never deleted.

A run lists what it writes in the file `.files`. Checkpoints, failed steps and the record of the code have lists of
their own. In runs that were made before this file, the names that emrun's own parts write count.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from emrun.base.wording import counted, in_one_line, listed
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.manifest import ASIDE, FILE, Contents, files_to_resume, is_directory_name
from emrun.storage.code.files import recorded_files
from emrun.storage.code.record import code_records
from emrun.storage.files import LIST, check_guards, listed_files, remove_files, storing
from emrun.storage.lock import EVALUATIONS, LOCK_FILES
from emrun.storage.log import LOG
from emrun.storage.run import CHECKPOINTS, CONFIG, METRICS, ROWS, STEPS
from emrun.storage.sealed import files_of
from emrun.storage.trace import TRACE

_ALWAYS = re.compile(rf"\.*({CONFIG}|{TRACE})(\.json)?(\.tmp)?|train-\d+\.log|stacks-\d+\.txt|{re.escape(LIST)}")
_BEFORE = re.compile(
    rf"{LOG}|{METRICS}|{STEPS}|{ROWS}|config-[1-9]\d*\.yaml|report\.html|training\.csv|metrics\.sqlite|trackers/\w+(-\d+)?\.json"
    r"|tensorboard/events\.out\.tfevents\.[\d.]+\.emrun|confusion_matrix_epoch_[\w.-]*\.(png|csv)"
)
_MOST_NAMES = 5
_FAILURES, _FAILURE = "failures", "failure.json"
_MOUNTS = Path("/proc/self/mountinfo")


def own_files(directory: Path) -> Iterator[Path]:
    """Yield the files and links in a run directory that emrun has written, those without which it is no run last.

    Nothing is behind a link or below a mount point.

    Args:
        directory: the run directory.
    """
    mounts = {each for each in _mount_points() if each.is_relative_to(directory.resolve())}
    last = dict.fromkeys(PurePath(name) for name in (LIST, CONFIG, TRACE))
    found = dict.fromkeys(each for each in _found_in(directory) if each not in last)
    for path in (*found, *last):
        place = directory / path
        parents = [directory / each for each in list(path.parents)[:-1]]
        if any(each.is_symlink() or each.resolve() in mounts for each in parents) or place.absolute() in mounts:
            continue
        with suppress(OSError):
            mode = place.lstat().st_mode
            if stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and path.parent.name == CHECKPOINTS):
                yield place


def others_in(directory: Path, own: set[Path]) -> Iterator[Path]:
    """Yield what a run directory has besides: files, links, pipes, mount points. Links are not followed."""
    for folder, folders, files in os.walk(directory):
        here = Path(folder)
        yield from (here / name for name in files if here / name not in own)
        left = [name for name in folders if (here / name).is_symlink() or (here / name).is_mount()]
        yield from (here / name for name in left if here / name not in own)
        folders[:] = [name for name in folders if name not in left]


def files_written_by(directory: Path) -> list[PurePath]:
    """Return the files that the run in a directory has listed, or without a list, those with names of emrun's parts.

    Raises:
        StorageError: the list cannot be read.
    """
    listed = listed_files(directory)
    if listed is not None:
        return listed
    code = [PurePath(place.name, each) for _, place in code_records(directory) for each in recorded_files(place)]
    return [*code, *(path for path in _files_below(directory, depth=1) if _BEFORE.fullmatch(path.as_posix()))]


def remove_run(directory: Path, *, keeps_directory: bool = False) -> list[Path]:
    """Delete what a run has written, and its directory unless something else is in it.

    Args:
        directory: the run directory.
        keeps_directory: whether the directory stays in any case.

    Returns:
        What stays.

    Raises:
        RunInUse: another process has taken the run over; nothing is deleted.
        StorageError: something cannot be deleted.
    """
    check_guards(directory / TRACE)
    locks = [directory / name for name in LOCK_FILES if not keeps_directory]
    with storing(directory, "delete"):
        remove_files([*own_files(directory), *locks], directory)
    return sorted(others_in(directory, {directory / name for name in LOCK_FILES}))


def what_stays(directory: Path, left: Sequence[Path]) -> str:
    """Return why a directory is not deleted, in words."""
    names = [in_one_line(str(each.relative_to(directory)), 40) for each in left]
    shown = listed([*names[:_MOST_NAMES], *["..."] * (len(names) > _MOST_NAMES)])
    return f"stays, with {counted(len(names), 'file')} of yours: {shown}"


def _found_in(directory: Path) -> Iterator[PurePath]:
    """Yield the paths that may be emrun's, relative to a directory."""
    for path in files_written_by(directory):
        yield from (path, path.with_name(f".{path.name}.tmp"))
    with suppress(OSError):
        yield from (PurePath(name) for name in os.listdir(directory) if _ALWAYS.fullmatch(name))  # noqa: PTH208
    for name in (CHECKPOINTS, f".{CHECKPOINTS}.removed"):
        yield from (PurePath(name) / each for each in _of_checkpoints(directory / name))
    for each in _folders_in(directory / _FAILURES):
        yield from (PurePath(_FAILURES, each, file) for file in files_of(directory / _FAILURES / each / _FAILURE))
    for number in _folders_in(directory / EVALUATIONS):
        inner = directory / EVALUATIONS / number
        if StoredRun(inner).is_evaluation:  # and not another run
            yield from (PurePath(EVALUATIONS, number, each.relative_to(inner)) for each in own_files(inner))
    for _, place in code_records(directory):
        yield from (PurePath(place.name, each) for each in recorded_files(place))


def _of_checkpoints(root: Path) -> Iterator[PurePath]:
    """Yield the names of checkpoints and their files; a folder that is being written or deleted is emrun's."""
    if root.is_symlink() or not root.is_dir():
        return
    here = Contents.of(root)
    yield from map(PurePath, here.links)
    for name in _folders_in(root):
        if name.startswith(ASIDE):
            yield from (PurePath(name, each) for each in _files_below(root / name))
        elif is_directory_name(name) or name in here.named:
            yield from (PurePath(name, each) for each in (*files_of(root / name / FILE), *files_to_resume(root / name)))


def _folders_in(directory: Path) -> list[str]:
    with suppress(OSError):
        if not directory.is_symlink():
            with os.scandir(directory) as entries:
                return sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    return []


def _files_below(directory: Path, depth: int = 9) -> Iterator[PurePath]:
    with suppress(OSError), os.scandir(directory) as entries:
        for each in list(entries):
            if each.is_dir(follow_symlinks=False) and depth:
                yield from (PurePath(each.name, inner) for inner in _files_below(directory / each.name, depth - 1))
            elif not each.is_dir(follow_symlinks=False):
                yield PurePath(each.name)


def _mount_points() -> Iterator[Path]:
    with suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            fields = line.split(" ")
            if len(fields) > 4:
                yield Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
