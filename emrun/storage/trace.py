"""The trace of a run: when the run began, how many epochs it has finished, how it ended."""

from __future__ import annotations

import io
import logging
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import emrun
from emrun.base.censor import hidden_in
from emrun.base.fields import (
    ANYTHING,
    FLAG,
    TEXT,
    choice,
    fitting,
    mapping_of,
    optional,
    sequence_of,
    shown,
    whole,
)
from emrun.ranks.group import ranks
from emrun.storage.code.git import head_of
from emrun.storage.files import refuse_timeout
from emrun.storage.plain import read_plain, write_with_plain

_LOG = logging.getLogger(__name__)

TRACE = "trace.yaml"
_MAY_HOLD_ANYTHING = ("reason", "command", "resumes")
_INTERVAL = timedelta(seconds=10)
_KEPT = ("train_begin", "epochs_done", "iterations_done", "has_checkpoints")
_KINDS = {
    "train_begin": optional(TEXT),
    "train_end": optional(TEXT),
    "epochs_done": whole(),
    "iterations_done": whole(),
    "exit_status": optional(whole(most=255)),
    "status": choice("running", "finished", "interrupted", "failed", "pruned"),
    "reason": optional(TEXT),
    "seed": optional(whole(-(2**63))),
    "threads": optional(whole()),
    "ranks": whole(1),
    "command": sequence_of(TEXT),
    "host": TEXT,
    "device": optional(TEXT),
    "pid": whole(),
    "directory": TEXT,
    "files": sequence_of(TEXT),
    "has_checkpoints": FLAG,
    "resumes": sequence_of(mapping_of(ANYTHING)),
}
"""Field of a trace -> the kind of its value, for the fields that emrun reads."""


Clock = Callable[[], datetime]


def local_time() -> datetime:
    """Return the time in the local time zone, with its offset."""
    return datetime.now().astimezone()


_LARGEST = 64_000_000  # bytes


class Trace:
    """The trace of a run that this process writes.

    Args:
        path: the file.
        seed: the seed of the run.
        command: the command that started the run.
        clock: returns the time.
    """

    def __init__(self, path: Path, *, seed: int | None, command: Sequence[str], clock: Clock) -> None:
        self._path = path
        self._clock = clock
        torch = sys.modules.get("torch")  # last bits of results may depend on its threads
        self._entries: dict[str, Any] = {
            "train_begin": None,
            "train_end": None,
            "epochs_done": 0,
            "iterations_done": 0,
            "exit_status": None,
            "status": "running",
            "reason": None,
            "seed": seed,
            "threads": None if torch is None else int(torch.get_num_threads()),
            "ranks": ranks().size,
            "emrun": emrun.__version__,
            "torch": None if torch is None else str(torch.__version__),
            "python": platform.python_version(),
            "command": list(command),
            "directory": str(path.parent.absolute()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "git_commit": head_of(Path()),
            "files": [],
        }
        self._shown: dict[str, Any] = {}  # the entries in the file
        self._texts: dict[str, str] = {}  # the YAML of each
        self._written_at: datetime | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the trace records how the run ended."""
        return self._entries["train_end"] is not None

    def begin(self) -> None:
        """Write that the run begins."""
        self._written_at = self._clock()
        self.write(train_begin=_in_text(self._written_at))

    def begin_again(self, previous: Mapping[str, Any], resumed: Mapping[str, Any], **others: Any) -> None:
        """Write that the run continues.

        Args:
            previous: the trace before this resume.
            resumed: the entry to add to the list of resumes.
            others: other entries of the trace.
        """
        self._written_at = self._clock()
        now = _in_text(self._written_at)
        kept = {key: previous[key] for key in _KEPT if previous.get(key) is not None}
        before = {key: previous.get(key) for key in ("reason", "command", "directory", "host", "pid")}
        entry = {"time": now, **resumed, "before": {"status": last_status(previous), **before}}
        resumes = previous.get("resumes")
        self.add(**others, train_begin=now)
        self.add(**kept)  # with `train_begin`, if it has one
        if resumed.get("checkpoint"):
            self.add(has_checkpoints=True)
        self.write(resumes=[*(resumes if isinstance(resumes, list) else []), entry])

    def count(self, epochs_done: int, iterations_done: int) -> None:
        """Set the number of finished epochs and iterations; at most every ten seconds, the file is written."""
        self.add(epochs_done=epochs_done, iterations_done=iterations_done)
        now = self._clock()
        if self._written_at is None or not timedelta(0) <= now - self._written_at < _INTERVAL:  # it may be set back
            self._written_at = now
            self.write()

    def add(self, **entries: Any) -> None:
        """Add entries, for the next time that the file is written."""
        self._entries.update(entries)

    def end(self, **entries: Any) -> None:
        """Add when and how the run ended; the caller writes the file."""
        self.add(train_end=_in_text(self._clock()), **entries)

    def write(self, **entries: Any) -> None:
        """Add entries and write the file."""
        self.add(**entries)
        shown = {key: hidden_in(value) if key in _MAY_HOLD_ANYTHING else value for key, value in self._entries.items()}
        changed = {key: value for key, value in shown.items() if key not in self._texts or value != self._shown[key]}
        parts = re.split(r"(?m)^(?=\w+:)", _as_yaml(changed))[1:]  # to write YAML takes most of the time
        self._texts |= dict(zip(changed, parts, strict=True))
        self._shown = shown
        write_with_plain(self._path, "".join(map(self._texts.__getitem__, shown)), shown)


def mark_pruned(directory: Path, reason: str) -> None:
    """Write into the trace of a run that has ended that it is not worth continuing; the caller holds its lock.

    Args:
        directory: the directory of the run.
        reason: why, in one line.
    """
    entries = {**read_plain(directory / TRACE, _LARGEST), "status": "pruned", "reason": reason}
    write_with_plain(directory / TRACE, _as_yaml(entries), entries)


def _as_yaml(entries: Mapping[str, Any]) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(dict(entries), text)
    return text.getvalue()


def _in_text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


def last_status(trace: Mapping[str, Any]) -> str:
    """Return how a run ended; the caller knows that no process holds the lock of the run."""
    status = str(trace.get("status", "unknown"))
    return "killed" if status == "running" else status


def read_trace(directory: Path) -> dict[str, Any]:
    """Return the trace of a run; an empty dict if it is missing or damaged.

    A trace is only used to describe a run, and it has no checksum. So a field with an invalid value is left out, with a
    warning.
    """
    try:
        trace = read_plain(directory / TRACE, _LARGEST)
    except (OSError, ValueError, YAMLError) as error:
        refuse_timeout(error, directory / TRACE)
        return {}
    except Exception as error:  # the YAML library raises other errors for unexpected content
        _LOG.warning("%s is damaged (%s)", directory / TRACE, type(error).__name__)
        return {}
    known, problems = known_fields(trace)
    for problem in problems:
        _LOG.warning("%s: %s", directory / TRACE, problem)
    return known


def known_fields(trace: object) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a trace without fields that have an invalid value, and what is wrong with those.

    Args:
        trace: the content of the file, in plain types.
    """
    if not isinstance(trace, dict):
        return {}, []
    known, problems = {}, []
    for name, value in trace.items():
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None or fitting(value, kind):
            known[name] = value
        else:
            problems.append(f"{name} is {shown(value)}, but must be {kind.allowed}")
    return known, problems
