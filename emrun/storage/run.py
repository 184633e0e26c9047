"""The run directory: how it is created, what a run writes into it, and what it contains."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.censor import reveal
from emrun.base.errors import RunExists, StorageError, UsageError
from emrun.base.wording import from_here, in_one_line, listed
from emrun.storage.code.snapshot import CodeSnapshot, remove_code
from emrun.storage.files import (
    aside_of,
    check_no_link,
    flush_lines,
    make_directory,
    opened_regular,
    storing,
)
from emrun.storage.lock import EVALUATIONS, RunLock
from emrun.storage.log import LOG, RunLog
from emrun.storage.plain import write_with_plain
from emrun.storage.trace import TRACE, Clock, Trace, last_status, local_time, read_trace

_LOG = logging.getLogger(__name__)

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
METRICS, STEPS, ROWS = "metrics.jsonl", "steps.jsonl", "rows.jsonl"
"""The files with the rows of a run, see the package `record`."""
FOREIGN = ("lost+found",)
"""Names in a directory that are of the file system, so that the directory is empty all the same."""
_FORMAT_VARIABLE = "EMRUN_OUTPUT_DIR_FORMAT"
_DEFAULT_FORMAT = "{name}{overrides}_{timestamp}"
_LONGEST_NAME = 80  # with overrides, without the time
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_SHOWN = 4  # runs in a message


class Run:
    """A run directory that this process writes.

    Args:
        directory: an existing directory.
        seed: the seed of the run, for the trace.
        command: the command that started the run, for the trace.
        clock: returns the time.
        lock: the lock of the directory, released at the end of the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int | None = None,
        command: Sequence[str] = (),
        clock: Clock = local_time,
        lock: RunLock | None = None,
    ) -> None:
        self.directory = directory
        places = {directory}
        with suppress(OSError):  # the current directory is gone
            places |= {directory.absolute(), directory.resolve(), Path.cwd()}
        reveal(*places)
        self._lock = lock
        self.trace = Trace(directory / TRACE, seed=seed, command=command, clock=clock)
        self.log = RunLog(directory / LOG)
        """Writes the log of a `with` block, and the traceback of an error that ends the block."""
        self.code: CodeSnapshot | None = None
        """Records what the run is made from; None if nothing does, as in an evaluation."""
        self.write_report: Callable[[Path], None] | None = None
        """Writes a page of the run into its directory, and raises no error; None if nothing does. See `close`."""

    def claim(self, names: Iterable[str]) -> None:
        """Note the names that hooks write, for the next time that the trace is written; see `AbstractHook.files`.

        Raises:
            UsageError: there is something under a name that this run has not had.
        """
        known = read_trace(self.directory).get("files")  # None: the trace is damaged
        claimed = dict.fromkeys(names)
        for name in claimed:
            is_new = known is not None and name not in known and name.strip("/.")
            existing = next(self.directory.glob(name.rstrip("/")), None) if is_new else None
            if existing is not None:
                raise UsageError(
                    f"the run has not written {from_here(existing)}, which one of its hooks would write; move it "
                    "elsewhere, or let the hook write under another name"
                )
        self.trace.add(files=list(dict.fromkeys([*(known or ()), *claimed])))

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.directory / CHECKPOINTS

    def release(self) -> None:
        """Release the lock, so that another process can write the directory."""
        if self._lock is not None:
            self._lock.release()

    def end(self, status: str, exit_status: int, reason: str | None, *done: int) -> None:
        """Write into the trace how the run ended; later calls do nothing.

        This releases the lock, unless a page is to be written; then `close` does.

        Args:
            status: finished, interrupted or failed.
            exit_status: the exit status of the command.
            reason: why the run ended, in one line.
            done: the numbers of finished epochs and iterations, if they are known.
        """
        if self.trace.has_ended:
            return
        if self.code is not None:
            self.code.end()
        counted = zip(("epochs_done", "iterations_done"), done, strict=False)
        self.trace.end(status=status, exit_status=exit_status, reason=reason, **dict(counted))
        try:
            flush_lines()
            self.trace.write()
        finally:
            if self.write_report is None:
                self.release()

    def close(self) -> None:
        """Write the page of a run that has ended and whose log is complete, and release the lock."""
        try:
            if self.write_report is not None and self.trace.has_ended:
                self.write_report(self.directory)
        finally:
            self.write_report = None
            self.release()


def create_run(
    config_text: str,
    name: str,
    *,
    output_root: Path,
    output_dir: Path | None,
    seed: int,
    command: Sequence[str] = (),
    clock: Clock = local_time,
    plain: Any = None,
    overrides: str = "",
) -> Run:
    """Create a new run directory and write its config.

    Args:
        config_text: the content of its `config.yaml`.
        name: the name of the run, part of the directory's name.
        output_root: the directory in which the run directory is created. It is named `{name}_{overrides}_{timestamp}`,
            followed by a number if that exists; the environment variable EMRUN_OUTPUT_DIR_FORMAT changes the format.
        output_dir: the path of the run directory, instead of a generated name. If it exists, it must be empty, or hold
            a run whose start failed: its log is kept, its config and its trace are replaced.
        seed: the seed of the run, for the trace.
        command: the command that started the run, for the trace.
        clock: returns the time.
        plain: the config in plain types, which lists of runs read.
        overrides: what the name of the directory shows of the overrides of the config, see `in_name`.

    Raises:
        RunExists: the directory holds a run (a `UsageError`).
        UsageError: EMRUN_OUTPUT_DIR_FORMAT is invalid, or the directory is not empty, or lies in a run directory.
        RunInUse: another process is writing the run.
        StorageError: the directory cannot be created.
    """
    # the directory
    directory = output_dir or output_root / _directory_name(name, overrides, clock)
    check_outside(directory)
    check_readable_name(directory)
    with storing(directory, "create"):
        if output_dir is not None:
            make_directory(directory, exist_ok=True)
        else:
            others = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
            directory = _make_free(itertools.chain((directory,), others))

    # what every run has in it from the beginning
    lock = RunLock(directory)
    try:
        check_links(directory)
        check_free(directory)
        files: list[str] = []
        if is_failed_start(directory):
            _LOG.info("the previous start of the run in %s failed: starting again and appending to the log", directory)
            remove_code(directory)
            files = read_trace(directory).get("files", [])
        write_with_plain(directory / CONFIG, config_text, plain)
        run = Run(directory, seed=seed, command=command, clock=clock, lock=lock)
        run.trace.add(files=files)
        run.trace.begin()
    except BaseException:
        lock.release()
        raise
    return run


def create_evaluation(
    root: Path,
    stream: str,
    config_text: str,
    command: Sequence[str] = (),
    clock: Clock = local_time,
    plain: Any = None,
) -> Run:
    """Create the directory `<stream>-<n>` for the results of an evaluation.

    Args:
        root: the directory in which it is created.
        stream: the name of the stream.
        config_text: the content of its `config.yaml`.
        command: the command that started the evaluation, for the trace.
        clock: returns the time.
        plain: see `create_run`.

    Raises:
        StorageError: the directory cannot be created.
    """
    if root.name == EVALUATIONS:
        check_no_link(root)
    with storing(root, "create"):
        make_directory(root, exist_ok=True)
        stem = safe_component("stream", stream)
        directory = _make_free(root / f"{stem}-{number}" for number in itertools.count(1))
    write_with_plain(directory / CONFIG, config_text, plain)
    run = Run(directory, command=command, clock=clock)
    run.trace.begin()
    return run


def holds_run(directory: Path) -> bool:
    """Return whether a directory is a run directory."""
    return (directory / CONFIG).exists() or (directory / TRACE).exists()


def check_outside(directory: Path) -> None:
    """Check that a directory does not lie in a run directory, whose files it would mix with those of another run.

    Raises:
        UsageError: it does.
    """
    outer = next((parent for parent in directory.absolute().parents if (parent / TRACE).is_file()), None)
    if outer is not None:
        shown = from_here(outer)
        raise UsageError(f"{shown} is a run directory, and a run cannot lie in another one; choose another directory")


def check_free(directory: Path) -> None:
    """Check that a new run may be created in a directory: that it is empty, or holds a run whose start failed.

    Raises:
        RunExists: the directory holds a run (a `UsageError`).
        UsageError: the directory is not empty. Hidden names do not count.
    """
    if is_failed_start(directory):
        return
    shown = from_here(directory)
    if holds_run(directory):
        raise RunExists(
            f"{shown} already holds a run ({last_status(read_trace(directory))}); choose another --output-dir, "
            "continue the run with `emrun resume`, or add --auto-resume"
        )
    with storing(directory, "read"):
        names = sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []
    visible = [name for name in names if not name.startswith(".") and name not in FOREIGN]
    if visible:
        first = visible[:_SHOWN]
        if len(visible) > _SHOWN:
            first.append("...")
        named = listed([in_one_line(name, 40) for name in first])
        raise UsageError(
            f"{shown} is not empty: it has {named}. A new run needs a new or an empty directory; choose another "
            f"--output-dir, and write what a job prints beside it, such as to {shown}.out"
        )


def check_links(directory: Path) -> None:
    """Check that the file system of a run has links, which name its checkpoints; the caller has the lock.

    Raises:
        StorageError: it has none, or the directory cannot be written.
    """
    link = aside_of(directory / CONFIG)  # is overwritten, should the process be killed here
    with storing(directory, "write in"):
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(CONFIG)
            link.unlink()
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            why = (
                "has no symbolic links (FAT, exFAT, some CIFS and FUSE mounts), but the names of checkpoints are links"
            )
            advice = "choose a directory elsewhere with -o or --output-dir; `cp -rL` copies a finished run here"
            raise StorageError(error.errno, f"the file system of {from_here(directory)} {why}; {advice}") from error


def check_config(directory: Path) -> None:
    """Check that the config of a run is a regular file; the config of a new run may be a pipe.

    Raises:
        StorageError: it is not.
    """
    with opened_regular(directory / CONFIG):
        pass


def check_readable_name(directory: Path) -> None:
    """Check that the files of a run can be read again: the format of the weights needs a path in UTF-8.

    Raises:
        UsageError: the path is not encoded in UTF-8.
    """
    try:
        str(directory.absolute()).encode()
    except UnicodeEncodeError as error:
        message = (
            f"the path {str(directory.absolute())!r} is not encoded in UTF-8, so that weights in it cannot be read"
        )
        raise UsageError(f"{message}; use another directory: a run that is there can be moved") from error


def is_failed_start(directory: Path) -> bool:
    """Return whether a directory holds a run that failed or was interrupted before it had any result.

    According to its trace, such a run ended before the first training batch; it has no metrics, checkpoints and
    evaluations.
    """
    trace = read_trace(directory)
    return (
        trace.get("status") in ("failed", "interrupted")
        and trace.get("epochs_done") == trace.get("iterations_done") == 0
        and not any((directory / name).exists() for name in (METRICS, CHECKPOINTS, EVALUATIONS))
    )


def no_run(place: Path, missing: str = CONFIG) -> UsageError:
    """Return the error for a path that is not a run directory although one is expected; what is `missing` there."""
    if not place.is_file():
        why = f"it has no {missing}" if place.exists() else "it does not exist"
        runs: list[Path] = []
        with suppress(OSError):
            runs = sorted((trace.parent for trace in place.glob(f"*/{TRACE}")), key=lambda trace: trace.stat().st_mtime)
        newest = [str(from_here(run)) for run in list(reversed(runs))[:_SHOWN]]
        if newest:
            why += f"; the newest runs in it: {listed(newest)}"
        return UsageError(f"{place} is not a run directory: {why}")
    if (place.parent / TRACE).exists():
        return UsageError(f"{place} is a file; give the run directory instead: {place.parent}")
    begin = f"; to start a run with this config: emrun train {place}" if place.suffix in (".yaml", ".yml") else ""
    return UsageError(f"{place} is a file; give a run directory instead, such as log/NAME_TIME{begin}")


def _make_free(candidates: Iterable[Path]) -> Path:
    """Create the first of these directories that does not exist."""
    for place in candidates:
        with suppress(FileExistsError):
            make_directory(place)
            return place
    raise AssertionError("candidates never end")


def _directory_name(name: str, overrides: str, clock: Clock) -> str:
    pattern = os.environ.get(_FORMAT_VARIABLE, _DEFAULT_FORMAT)
    name = safe_component("name", name)
    timestamp = clock().strftime("%Y%m%d-%H%M%S")
    shown = f"_{overrides}" if overrides and len(name) + len(overrides) < _LONGEST_NAME else ""
    try:
        directory_name = pattern.format(name=name, overrides=shown, timestamp=timestamp)
        return safe_component(_FORMAT_VARIABLE, directory_name, also="=+")
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        fields = "its fields are {name}, {overrides}, {timestamp}"
        raise UsageError(f"{_FORMAT_VARIABLE}={pattern!r} is not a valid format for {name!r}; {fields}") from error
