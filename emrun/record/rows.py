"""The reader of a run's record: epochs, steps, and rows in the order in which they arose."""

from __future__ import annotations

import base64
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from emrun.base.types import Json
from emrun.epoch_data import as_float, numbers, statistics
from emrun.record.metrics import epoch_of, epochs_of
from emrun.record.steps import NOT_FINITE, Chunk, chunks_of
from emrun.shown import Counts, Picture, Text, Written
from emrun.storage.files import opened_regular
from emrun.storage.run import METRICS, ROWS, STEPS

_LOG = logging.getLogger(__name__)
_Read = TypeVar("_Read")
_OF_MEANS = ("every", "stream", "epoch", "iteration", "updates", "time")


@dataclass(frozen=True)
class Row:
    """What a run has measured up to an iteration: the statistics of an epoch, or means since the row before.

    Args:
        iteration: the number of batches that the model was trained on; rows come in its order.
        updates: the number of updates of the weights; None if it is not known.
        epoch: the number of the epoch.
        every: the interval of a row of means, such as `50 updates`; None for an epoch.
        stream: the train stream, of a row of means.
        time: when the row arose, in seconds since 1970.
        means: name -> mean over the interval, of a learning rate the last value; empty for an epoch.
        seconds: the duration of the epoch.
        streams: stream -> variable -> a number, or aggregation -> number.
        shown: name -> what hooks have shown in the epoch: a `Picture`, a `Text` or `Counts` of a histogram.
        at_end: whether this is the evaluation after a limit has ended the training; `epoch` may be unfinished.
        unknown: stream and variable -> the type of a value that is not a number.
        is_new: whether the run writes the row at this moment, rather than that it is read again.
    """

    iteration: int
    updates: int | None
    epoch: int
    every: str | None = None
    stream: str = ""
    time: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    streams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shown: Mapping[str, Written] = field(default_factory=dict)
    at_end: bool = False
    unknown: Mapping[tuple[str, str], str] = field(default_factory=dict)
    is_new: bool = False

    @property
    def values(self) -> dict[str, float]:
        """Name -> number: `STREAM/VARIABLE` for means and plain numbers of an epoch, `STREAM/VARIABLE/AGGREGATION` for
        others, and `steps/NAME` for means between epochs."""
        of_epoch = {
            f"{stream}/{name}": as_float(value)
            for stream, variables in self.streams.items()
            for name, value in statistics(variables)
            if not isinstance(value, Mapping)
        }
        return {**{f"steps/{name}": value for name, value in self.means.items()}, **of_epoch}


class Reader:
    """Reads the record of a run; what is damaged is left out.

    Args:
        directory: the run directory.
        note: gets a sentence about what was left out of `epochs` or `steps`; by default, it is a warning.
    """

    def __init__(self, directory: Path, note: Callable[[str], None] | None = None) -> None:
        self._directory = directory
        self._note = note or (lambda sentence: _LOG.warning("%s/%s", directory, sentence))
        self._offsets = {METRICS: 0, ROWS: 0}  # up to which `rows` has read the files
        self._epochs = 0  # lines of `metrics.jsonl` that `rows` has read
        self._newest = -1  # the count of the newest line about an epoch
        self._made: deque[Json] = deque()  # lines of `rows.jsonl` that were not given yet

    @property
    def size(self) -> int:
        """The bytes of the record: epochs, steps and rows."""
        total = 0
        for name in (METRICS, STEPS, ROWS):
            with suppress(OSError):
                total += (self._directory / name).stat().st_size
        return total

    def epochs(self) -> Iterator[Json]:
        """Yield the lines of `metrics.jsonl` one after another.

        Each has `epoch`, `streams` (stream -> variable -> a number or a mapping aggregation -> number) and usually
        `iteration` and `seconds`; other values are possible, since a file may be damaged.

        Raises:
            StorageError: the file cannot be read.
        """
        return self._intact(METRICS, epochs_of(self._directory / METRICS))

    def steps(self) -> Iterator[Chunk]:
        """Yield the chunks of `steps.jsonl` one after another.

        Raises:
            StorageError: the file cannot be read.
        """
        return self._intact(STEPS, chunks_of(self._directory / STEPS))

    def _intact(self, name: str, lines: Iterator[_Read | str]) -> Iterator[_Read]:
        """Yield what is not the reason why a line was left out; note the first reason."""
        reasons: list[str] = []
        for line in lines:
            if not isinstance(line, str):
                yield line
            else:
                reasons.append(line if not reasons else "")
        if reasons:
            self._note(f"{name}: {reasons[0]}{f', and {len(reasons) - 1} more' if len(reasons) > 1 else ''}")

    def rows(self) -> Iterator[Row]:
        """Yield the rows that were written since the last call."""
        metrics = list(self._new_lines(METRICS))  # first: the lines about an epoch are written before its own
        for line in self._new_lines(ROWS):
            content = _content_of(line)
            if content is not None:
                self._add(content)
        for line in metrics:
            for means in self._next(are_means=True):
                yield means["row"]
            about_epoch = list(self._next(are_means=False))
            self._epochs += 1
            epoch = epoch_of(line)
            if epoch is not None:
                yield row_of_epoch(epoch, about_epoch)
        for means in self._next(are_means=True):
            yield means["row"]

    def _add(self, line: Json) -> None:
        """Add a line of `rows.jsonl`; if other code has removed epochs before it, leave out what is about them."""
        if "about" in line:
            epochs_left = line["epochs"]
            if epochs_left <= self._newest:
                kept = (row for row in self._made if "every" in row or row["epochs"] < epochs_left)
                self._made = deque({**row, "epochs": min(row["epochs"], epochs_left)} for row in kept)
            self._newest = epochs_left
        self._made.append(line)

    def _next(self, *, are_means: bool) -> Iterator[Json]:
        """Yield the lines with means before the next epoch, or then those about the epoch."""
        while self._made and self._made[0]["epochs"] <= self._epochs and ("every" in self._made[0]) is are_means:
            yield self._made.popleft()

    def _new_lines(self, name: str) -> Iterator[bytes]:
        path = self._directory / name
        if not path.exists():
            return
        with opened_regular(path) as file:
            file.seek(self._offsets[name])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[name] += len(line)
                yield line


def line_of_means(row: Row) -> Json:
    """Return a row of means as a line of `rows.jsonl`."""
    return {**{name: getattr(row, name) for name in _OF_MEANS}, "means": numbers(row.means)}


def row_of_epoch(line: Json, about_epoch: list[Json]) -> Row:
    """Return the row of a line of `metrics.jsonl`.

    Args:
        line: the line.
        about_epoch: the lines of `rows.jsonl` about the epoch.
    """
    about: Json = next((entry["about"] for entry in about_epoch if "about" in entry), {})
    return Row(
        line.get("iteration", 0),
        about.get("updates"),
        line["epoch"],
        time=about.get("time", 0.0),
        seconds=line.get("seconds", 0.0),
        streams=as_floats(line["streams"]),
        shown={entry["shown"]: _shown(entry) for entry in about_epoch if "shown" in entry},
        at_end="at_end" in line,
        unknown=_unknown(about),
    )


def _unknown(about: Json) -> dict[tuple[str, str], str]:
    return {(stream, name): kind for stream, name, kind in about.get("unknown", ())}


def newest_shown(path: Path) -> dict[str, Written]:
    """Return what hooks have shown by a `rows.jsonl`, of each name the newest.

    Raises:
        StorageError: the file cannot be read.
    """
    shown: dict[str, Written] = {}
    if path.exists():
        with opened_regular(path) as file:
            lines = (_content_of(raw) for raw in file if b'"shown": "' in raw)
            shown.update((line["shown"], _shown(line)) for line in lines if line is not None and "shown" in line)
    return shown


def as_floats(value: Any) -> Any:
    """Return values of a file as numbers: the files have those that are not finite as strings."""
    if type(value) is dict:
        return {name: as_floats(item) for name, item in value.items()}
    return float(value) if type(value) is str and value in NOT_FINITE else value


def line_of(name: str, shown: Written) -> Json:
    """Return what a hook shows as a line of `rows.jsonl`."""
    if isinstance(shown, Picture):
        return {"shown": name, "png": base64.b64encode(shown.png).decode()}
    return {"shown": name, "text": shown.text} if isinstance(shown, Text) else {"shown": name, **vars(shown)}


def _shown(line: Json) -> Written:
    if "png" in line:
        return Picture(base64.b64decode(line["png"]))
    if "text" in line:
        return Text(str(line["text"]))
    return Counts(line["edges"], line["counts"], line["total"], line["squares"])


def _content_of(line: bytes) -> Json | None:
    """Return the content of a line of `rows.jsonl`, and the row of one with means; None if the line is damaged."""
    try:
        content: Json = json.loads(line)
        if not isinstance(content["epochs"], int) or not isinstance(content.get("shown", ""), str):
            return None
        if "every" in content:
            content["row"] = Row(**{name: content[name] for name in _OF_MEANS}, means=as_floats(content["means"]))
        elif "shown" in content:
            _shown(content)
        else:
            _unknown(content["about"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return content
