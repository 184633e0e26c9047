"""A run as its directory describes it; see `StoredRun`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from emrun.base.errors import ConfigError, Position, StorageError
from emrun.base.types import Json
from emrun.config.config import Config
from emrun.config.interpolation import interpolate
from emrun.config.overrides import hooks_at
from emrun.config.yaml_tree import node_of, parse
from emrun.epoch_data import as_float, named, statistics
from emrun.record.rows import Reader
from emrun.record.steps import Chunk
from emrun.storage.files import read_regular
from emrun.storage.lock import writer_of
from emrun.storage.plain import plain_of
from emrun.storage.run import CONFIG, METRICS, STEPS
from emrun.storage.trace import TRACE, known_fields

MISSING: Final = object()
"""Stands for a value that is not there; null is None."""
STATUSES = ("running", "finished", "interrupted", "failed", "pruned", "killed", "damaged")
"""What `StoredRun.status` may be."""
_LARGEST_TRACE = 1_000_000  # bytes
_LARGEST_CONFIG = 2_000_000
_WRITTEN = (METRICS, STEPS, TRACE, "train.log")


class StoredRun:
    """A run as its directory describes it. Every part is read when it is first asked for, and nothing is written.

    What cannot be read is left out, and `problems` says so; the methods that return one part raise an error instead.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        """What is damaged, as far as it has been read, each in a sentence."""
        self.record = Reader(directory, self.note)

    @cached_property
    def trace(self) -> Mapping[str, Any]:
        """The fields of `trace.yaml`; those with an invalid value, or all, are missing if the file is damaged."""
        try:
            text = self._text(TRACE, _LARGEST_TRACE)
            content = plain_of(self.directory / TRACE, text)
            known, problems = known_fields(parse(text, TRACE).plain() if content is None else content)
        except (ConfigError, StorageError) as error:
            self.note(str(error).partition("\n")[0])
            return {}
        if not problems and "status" not in known:
            problems = ["status is missing"]
        for problem in problems:
            self.note(f"{TRACE}: {problem}")
        return known

    @property
    def is_evaluation(self) -> bool:
        """Whether the directory has the results of an evaluation, which have the same files but no seed."""
        return "status" in self.trace and self.trace.get("seed") is None

    @cached_property
    def status(self) -> str:
        """How the run stands: one of `STATUSES`.

        `killed`: it has not ended, and no process writes it. `damaged`: its trace does not say.
        """
        status = self.trace.get("status")
        if status is None:
            return "damaged"
        if status == "running" and writer_of(self.directory) is None:
            return "killed"
        return str(status)

    @property
    def reason(self) -> str | None:
        """Why the run ended, in one line."""
        return self.trace.get("reason")

    @cached_property
    def epochs_done(self) -> int:
        """The number of finished epochs."""
        return self._counted("epochs_done", "epoch")

    @cached_property
    def iterations_done(self) -> int:
        """The number of batches of the train stream that were run, as of the last epoch or the end."""
        return self._counted("iterations_done", "iteration")

    @property
    def begin(self) -> datetime | None:
        """When the run began."""
        return moment(self.trace.get("train_begin"))

    @cached_property
    def end(self) -> datetime | None:
        """When the run ended; of a run that was killed, when its files were last written; None while it runs."""
        if self.status == "running":
            return None
        if self.status in ("killed", "damaged") or self.trace.get("train_end") is None:
            return self.last_written
        return moment(self.trace.get("train_end"))

    def seconds(self, now: datetime) -> float | None:
        """Return how long the run took from its begin to its end, or takes until now; None if it is not known."""
        return None if self.begin is None else max(0.0, ((self.end or now) - self.begin).total_seconds())

    @property
    def last_written(self) -> datetime | None:
        """When the files that a run writes were last written."""
        times = []
        for name in _WRITTEN:
            with suppress(OSError):
                times.append((self.directory / name).lstat().st_mtime)
        return datetime.fromtimestamp(max(times)).astimezone() if times else None

    @cached_property
    def size(self) -> int:
        """The size of all files below the directory in bytes; links are not followed."""
        return size_below(self.directory)

    @cached_property
    def config_text(self) -> str:
        """The text of `config.yaml`.

        Raises:
            StorageError: it cannot be read, or is not UTF-8.
        """
        return self._text(CONFIG, _LARGEST_CONFIG)

    @cached_property
    def config(self) -> Config:
        """The config of the run. Other files are not read, and no value of the environment; see `final`.

        Raises:
            StorageError: it cannot be read.
            ConfigError: it is not a config.
        """
        root = parse(self.config_text, str(self.directory / CONFIG))
        if not isinstance(root.value, dict):
            raise root.error("a config must be a mapping with the keys dataset, model, ...")
        return Config(root, self.directory.name, self.config_text)

    def value(self, key: str) -> Any:
        """Return a value of the config in plain types; `MISSING` if there is none. Nothing is constructed.

        A config that cannot be read has no values; this is one of `problems`.

        Args:
            key: a key path as in overrides: `model.module.channels`, `hooks.StopAfter.epochs`, `hooks.0`.
        """
        path = key.split(".")
        try:
            value: Any = self.final
        except (ConfigError, StorageError) as error:
            self.note(str(error).partition("\n")[0])
            return MISSING
        hooks = value.get("hooks") if path[0] == "hooks" and len(path) > 1 else None
        if isinstance(hooks, list) and all(isinstance(hook, str | dict) for hook in hooks):
            names = [hook if isinstance(hook, str) else str(next(iter(hook), "")) for hook in hooks]
            indices, _, path = hooks_at(path[1:], names)
            hook = hooks[indices[0]] if indices else {}
            value = hook if isinstance(hook, str) else next(iter(hook.values()), MISSING)
        for name in path:
            value = _item_of(value, name)
        return value

    def note(self, problem: str) -> None:
        """Add a sentence to `problems`."""
        if problem not in self.problems:
            self.problems.append(problem)

    def epochs(self) -> Iterator[Json]:
        """Yield the lines of `metrics.jsonl`; see `Reader.epochs`, and `number` for values."""
        return self.record.epochs()

    def steps(self) -> Iterator[Chunk]:
        """Yield the chunks of `steps.jsonl`; see `Reader.steps`."""
        return self.record.steps()

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """The config in plain types, as it is written.

        Raises:
            StorageError: it cannot be read.
            ConfigError: it is not a config.
        """
        content = plain_of(self.directory / CONFIG, self.config_text)
        return content if isinstance(content, dict) else self.config.root.plain()

    @cached_property
    def final(self) -> Mapping[str, Any]:
        """The config in plain types with references to other values replaced.

        Raises:
            StorageError: it cannot be read.
            ConfigError: it is not a config, or a reference leads nowhere.
        """
        if "${" not in self.config_text:
            return self.written
        root = node_of(self.written, Position(str(self.directory / CONFIG)))
        return interpolate(root, reads_environment=False).plain()  # type: ignore[no-any-return]

    def _text(self, name: str, most: int) -> str:
        content = read_regular(self.directory / name, most)
        try:
            return content.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise StorageError(0, f"cannot read {self.directory / name}: it is not encoded in UTF-8") from error

    @cached_property
    def last_epoch(self) -> Mapping[str, Any]:
        """The last line of `metrics.jsonl`."""
        last: Mapping[str, Any] = {}
        with suppress(StorageError):
            for epoch in self.epochs():
                last = epoch
        return last

    def _counted(self, field: str, name: str) -> int:
        """Return a count of the trace; of the last line of `metrics.jsonl`, if that is newer: the run has no end."""
        counted = self.trace.get(field)
        if counted is not None and self.trace.get("status") not in (None, "running"):
            return int(counted)
        newer = self.last_epoch.get(name)
        return max(int(counted or 0), newer if type(newer) is int and 0 <= newer < 2**63 else 0)


def _item_of(value: Any, name: str) -> Any:
    """Return the item of a mapping or a list with a key or an index, as text; `MISSING` if there is none."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            if str(key) == name:
                return item
    return MISSING


def number(value: Any) -> float | None:
    """Return a number of `metrics.jsonl`, in which values that are not finite are strings; None for another value."""
    if type(value) is str:
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    return as_float(value) if type(value) in (int, float) else None


def statistic(epoch: Mapping[str, Any], address: str) -> float | None:
    """Return a statistic of an epoch; None if the epoch does not have it.

    Args:
        epoch: a line of `metrics.jsonl`.
        address: `stream/variable/aggregation`, or `stream/variable` for the mean or a plain number. The name of a
            variable may contain slashes.
    """
    stream, name = named(address)
    return number(dict(statistics(epoch["streams"].get(stream, {}))).get(name))


def numbers_of(epoch: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the address, `stream/variable` or `stream/variable/aggregation`, and the value of each number of an epoch.

    Args:
        epoch: a line of `metrics.jsonl`.
    """
    for stream, variables in epoch["streams"].items():
        for name, value in statistics(variables):
            finite = number(value)
            if finite is not None:
                yield f"{stream}/{name}", finite


def size_of_files(paths: Iterable[Path]) -> int:
    """Return the size of files in bytes: each once, even with several names; what cannot be read has none."""
    sizes = {}
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            sizes[status.st_dev, status.st_ino] = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return sum(sizes.values())


def size_below(directory: Path) -> int:
    """Return the size of all files below a directory in bytes; see `size_of_files`."""
    walk = os.walk(directory)  # follows no links; those to directories are among the folders
    return size_of_files(Path(folder, name) for folder, folders, files in walk for name in (*folders, *files))


def moment(text: str | None) -> datetime | None:
    """Return a time in ISO 8601 with its time zone, by default the local one; None if the text is not one."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        return time if time.tzinfo else time.astimezone()
    except (ValueError, OverflowError, OSError):
        return None
