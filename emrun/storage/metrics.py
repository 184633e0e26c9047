"""The lines of metrics.jsonl: the metrics of each epoch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emrun.storage.lines import read_lines

_LOG = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_READ = json.JSONDecoder().raw_decode


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; lines that are incomplete or not of an epoch are left out with a warning."""
    lines: list[dict[str, Any]] = []
    for number, epoch in epochs_of(path):
        if epoch is None:
            _LOG.warning("%s: line %d is damaged or not the metrics of an epoch; the line is ignored", path, number)
        else:
            lines.append(epoch)
    return lines


def epochs_of(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the content of each line of a metrics file; None for a damaged line.

    Raises:
        StorageError: the file cannot be read.
    """
    for number, line in enumerate(read_lines(path), start=1):
        yield number, epoch_of(line)


def epoch_of(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line of `metrics.jsonl`; None if the line is damaged."""
    try:
        text = line.decode().strip()
        content, end = _READ(text)
    except (ValueError, RecursionError):
        return None
    return content if end == len(text) and type(content) is dict and _is_epoch(**content) else None


def _is_epoch(epoch: Any = None, streams: Any = None, **others: Any) -> bool:
    """Return whether fields are those of an epoch: there may be a million lines, so this is written for its speed."""
    is_count = type(epoch) is int and 0 <= epoch < 2**63
    return is_count and type(streams) is dict and all(type(each) is dict for each in streams.values())


def is_before(line: bytes, end: int) -> bool:
    """Return whether a line is complete and not of epoch `end` or a later one, or of the end of a run."""
    epoch = epoch_of(line)
    return line.endswith(b"\n") if epoch is None else bool(epoch["epoch"] < end and "at_end" not in epoch)


def in_words(names: Sequence[str]) -> str:
    """Return a list of epochs for a message; a long list is abbreviated."""
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:9])}, ..., {names[-1]} ({len(names)} in all)"


def numbers(value: Any) -> Any:
    """Return numbers in types that JSON has: NaN and infinity as strings; values that are not numbers are left out."""
    if isinstance(value, Mapping):
        entries = {str(key): numbers(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a tensor or an array with one number
        value = value.item()
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    return None
