"""What separates the cells of a CSV file."""

from __future__ import annotations

import csv
import itertools
import re
from contextlib import suppress
from pathlib import Path

_OTHERS = ";\t|"
_MOST_ROWS = 1000  # in which a decimal comma is looked for
_DECIMAL = re.compile(r"\s*[+-]?\d+,\d+\s*")


def wrong_separator(path: Path) -> str | None:
    """Return what is wrong with what separates the cells of a CSV file, and what to do; None if it is commas.

    Only the beginning of the file is read, so that this can be said before its rows are read, which then do not fit.

    Raises:
        OSError: the file cannot be read.
    """
    with suppress(csv.Error), path.open(encoding="utf-8", errors="replace", newline="") as file:  # a cell is too long
        header = next(filter(None, csv.reader(file)), [])
        other = next((mark for mark in _OTHERS if len(header) == 1 and mark in header[0]), None)
        if other is None:
            return None
        advice = f"cells are separated by {other!r}; write commas"
        with suppress(csv.Error):
            file.seek(0)
            for row, cells in enumerate(itertools.islice(csv.reader(file, delimiter=other), _MOST_ROWS), start=1):
                decimal = next(filter(_DECIMAL.fullmatch, cells), None)
                if decimal is not None:
                    return f"{advice}, and decimal points in numbers such as {decimal.strip()!r} in row {row}"
        return advice
    return None
