"""Run directories: their names, how a new one is made, what one holds."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from emrun.arguments import safe_component
from emrun.censor import Censor
from emrun.errors import RunExists, UsageError
from emrun.storage.files import make_directory, storing, write_atomically
from emrun.storage.lock import EVALUATIONS, RunLock
from emrun.storage.metrics import METRICS
from emrun.storage.run import CHECKPOINTS, CONFIG, Run
from emrun.storage.trace import TRACE, Clock, last_status, local_time, read_trace

_LOG = logging.getLogger(__name__)

_FORMAT_VARIABLE = "EMRUN_OUTPUT_DIR_FORMAT"
_DEFAULT_FORMAT = "{name}_{timestamp}"


def create_run(
    config_text: str,
    name: str,
    *,
    output_root: Path,
    output_dir: Path | None,
    seed: int,
    command: Sequence[str] = (),
    clock: Clock = local_time,
    censor: Censor | None = None,
) -> Run:
    """Make a new run directory and write its config.

    Args:
        config_text: the content of its `config.yaml`.
        name: the name of the run, part of the directory's.
        output_root: the directory in which it is made, named `{name}_{timestamp}`, with a number when that is taken;
            the environment variable EMRUN_OUTPUT_DIR_FORMAT changes the name.
        output_dir: a path of its own instead; it may exist, but must not hold a run. One whose start failed is taken
            over: its log is kept, its config and its trace are replaced.
        seed: see `Run`, likewise the others.
        command: see `Run`.
        clock: see `Run`.
        censor: see `Run`.

    Raises:
        RunExists: the directory holds a run (a `UsageError`).
        UsageError: the format of its name cannot be used.
        RunInUse: somebody writes it at the moment.
        StorageError: it cannot be made.
    """
    directory = output_dir or output_root / _directory_name(name, clock)
    with storing(directory, "create"):
        if output_dir is not None:
            make_directory(directory, exist_ok=True)
        else:
            others = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
            directory = _make_free(itertools.chain((directory,), others))
    lock = RunLock(directory)
    try:
        if is_failed_start(directory):
            _LOG.info("the start of the run in %s failed: beginning anew, the log is kept", directory)
        elif holds_run(directory):
            raise RunExists(
                f"{directory} holds a run already ({last_status(read_trace(directory))}); choose another "
                "--output-dir, go on with it by `emrun resume`, or add --auto-resume"
            )
        write_atomically(directory / CONFIG, config_text)
        run = Run(directory, seed=seed, command=command, clock=clock, lock=lock, censor=censor)
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
    censor: Censor | None = None,
) -> Run:
    """Make the directory `<stream>-<n>` for the results of an evaluation.

    Args:
        root: the directory in which it is made.
        stream: the name of the stream.
        config_text: the content of its `config.yaml`.
        command: see `Run`.
        clock: see `Run`.

    Raises:
        StorageError: it cannot be made.
    """
    with storing(root, "create"):
        make_directory(root, exist_ok=True)
        stem = safe_component("stream", stream)
        directory = _make_free(root / f"{stem}-{number}" for number in itertools.count(1))
    write_atomically(directory / CONFIG, config_text)
    run = Run(directory, command=command, clock=clock, censor=censor)
    run.trace.begin()
    return run


def holds_run(directory: Path) -> bool:
    """Tell whether a directory is that of a run."""
    return (directory / CONFIG).exists() or (directory / TRACE).exists()


def is_failed_start(directory: Path) -> bool:
    """Tell whether a directory holds a run that failed or was interrupted before it came to anything worth keeping.

    That is: before the first training batch, without metrics, checkpoints and evaluations, as its trace says.
    """
    trace = read_trace(directory)
    return (
        trace.get("status") in ("failed", "interrupted")
        and trace.get("epochs_done") == trace.get("iterations_done") == 0
        and not any((directory / name).exists() for name in (METRICS, CHECKPOINTS, EVALUATIONS))
    )


def no_run(place: Path) -> UsageError:
    """Return the error for a path that was given for the directory of a run and is something else."""
    if not place.is_file():
        return UsageError(f"{place} is no run directory: it has no {CONFIG}")
    if (place.parent / TRACE).exists():
        return UsageError(f"{place} is a file; name the directory of the run: {place.parent}")
    begin = f"; to begin a run with it: emrun train {place}" if place.suffix in (".yaml", ".yml") else ""
    return UsageError(f"{place} is a file; name the directory of a run, such as log/NAME_TIME{begin}")


def _make_free(candidates: Iterable[Path]) -> Path:
    """Make the first of these directories that does not exist."""
    for place in candidates:
        with suppress(FileExistsError):
            make_directory(place)
            return place
    raise AssertionError("candidates never end")


def _directory_name(name: str, clock: Clock) -> str:
    pattern = os.environ.get(_FORMAT_VARIABLE, _DEFAULT_FORMAT)
    fields = {"name": safe_component("name", name), "timestamp": clock().strftime("%Y%m%d-%H%M%S")}
    try:
        return safe_component(_FORMAT_VARIABLE, pattern.format(**fields))
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{_FORMAT_VARIABLE}={pattern!r} cannot be used for {name!r}; its fields are {{name}}, {{timestamp}}"
        ) from error
