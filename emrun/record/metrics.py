"""The lines of metrics.jsonl: the metrics of each epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emrun.base.types import Json
from emrun.storage.lines import read_lines

_READ = json.JSONDecoder().raw_decode


def epochs_of(path: Path) -> Iterator[Json | str]:
    """Yield the content of each line of a metrics file; for a line that is left out, the reason.

    Raises:
        StorageError: the file cannot be read.
    """
    for number, line in enumerate(read_lines(path), start=1):
        yield epoch_of(line) or f"line {number} is damaged or not of an epoch; it is ignored"


def epoch_of(line: bytes) -> Json | None:
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
    return is_count and type(streams) is dict and all(type(variables) is dict for variables in streams.values())


def is_before(line: bytes, end: int) -> bool:
    """Return whether a line is complete and not of epoch `end` or a later one, or of the end of a run."""
    epoch = epoch_of(line)
    return line.endswith(b"\n") if epoch is None else bool(epoch["epoch"] < end and "at_end" not in epoch)
