"""Examples that one of two configs gets right and the other does not, by the predictions that runs have written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from emrun.base.errors import ConfigError, StorageError
from emrun.runs.stored_run import StoredRun
from emrun.storage.files import read_regular

_LARGEST = 500_000_000  # bytes of a file


def changed_examples(pairs: Sequence[Sequence[Path]], stream: str, variable: str) -> dict[str, Any] | None:
    """Return the examples of a stream that B gets right and A does not, and the other way round, in most pairs of runs.

    Args:
        pairs: the run directories of A and of B.
        stream: the stream.
        variable: what is 1 for an example that is right, and 0 for another one, such as the accuracy.

    Returns:
        `stream`, `pairs` (those with predictions of both), `fixed` and `broken`, the names of examples; None if there
        are no predictions.
    """
    votes: dict[str, tuple[list[float], list[float]]] = {}
    count = 0
    for places in pairs:
        a, b = (_right_in(each, stream, variable) for each in places)
        count += bool(a and b)
        for name in a if b else ():
            if name in b:
                of_a, of_b = votes.setdefault(name, ([], []))
                of_a.append(a[name])
                of_b.append(b[name])
    shares = {name: (fmean(a), fmean(b)) for name, (a, b) in votes.items()}
    if not shares:
        return None
    fixed = [name for name, (a, b) in shares.items() if a < 0.5 < b]
    broken = [name for name, (a, b) in shares.items() if b < 0.5 < a]
    return {"stream": stream, "pairs": count, "fixed": fixed, "broken": broken}


def _right_in(directory: Path, stream: str, variable: str) -> dict[str, float]:
    """Return example -> 0 or 1, by the file of `SavePredictions`; nothing without one, or if there are other values."""
    run = StoredRun(directory)
    with suppress(ConfigError, StorageError, ValueError, TypeError, KeyError):  # no predictions, or others' files
        given = [each["SavePredictions"] for each in run.final.get("hooks") or () if "SavePredictions" in each]
        files = [str(each["file"]) for each in given if each["stream"] == stream]
        for file in (each for each in files if each.endswith((".csv", ".jsonl"))):
            rows = _rows(file, read_regular(directory / file, _LARGEST, len(Path(file).parts)).decode())
            found = {str(row.get("id", row.get("position"))): float(row[variable]) for row in rows if variable in row}
            if found and set(found.values()) <= {0.0, 1.0}:
                return found
    return {}


def _rows(file: str, text: str) -> list[Mapping[str, Any]]:
    if file.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text)))
    return [json.loads(line) for line in text.splitlines()]
