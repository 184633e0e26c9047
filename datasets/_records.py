"""Rows of CSV, JSON lines and Parquet files, each with its file and line."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_one_of
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.types import Strings
from emrun.datasets._division import Readable, Texts
from emrun.datasets._paths import first_of

_CUT = "is the line cut?"


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    header: Strings
    values: Callable[[str], list[Any]]
    """Returns a column, with None for gaps."""
    lines: Sequence[int]
    """The number of the line of each row."""
    word: str = "line"


class Records(Readable):
    """The rows of files.

    Args:
        argument: the argument with the files.
        paths: the files.

    Raises:
        ArgumentError: a file cannot be read, a line is cut, or there are no rows.
    """

    def __init__(self, argument: str, paths: Sequence[Path]) -> None:
        self.argument = argument
        self.place = first_of(list(map(str, paths)))
        self._files = [_opened(argument, path) for path in paths]
        ends = np.cumsum([len(each.lines) for each in self._files], dtype=np.int64)
        self._ends = ends
        self.count = int(ends[-1])
        if not self.count:
            raise ArgumentError(argument, f"{self.place}: contains no examples")

    def name_by(self, column: str) -> None:
        """Take the names of the rows from a column.

        Raises:
            ArgumentError: a file has no such column.
        """
        self.ids = [each or "" for each in self.texts("id", column)]

    @property
    def names(self) -> Strings:
        """The names of the columns of all files."""
        return list(dict.fromkeys(name for each in self._files for name in each.header))

    def has(self, name: str) -> bool:
        """Return whether all files have a column."""
        return all(name in each.header for each in self._files)

    def column(self, argument: str, name: str) -> list[Any]:
        """Return a column, with None for gaps.

        Raises:
            ArgumentError: a file has no such column.
        """
        found: list[Any] = []
        for each in self._files:
            check_one_of(argument, name, each.header, f"{str(each.path)!r} has no column {name!r}")
            found += each.values(name)
        return found if self.chosen is None else [found[row] for row in self.chosen.tolist()]

    def texts(self, argument: str, name: str) -> Texts:
        """Return a column as texts, with None for gaps and empty cells."""
        return [None if each is None or each == "" else str(each) for each in self.column(argument, name)]

    def files(self) -> list[str]:
        """Return the file of each row."""
        return [str(self._place_of(row)[0].path) for row in range(len(self))]

    def where(self, row: int) -> str:
        """Return the file and the line of a row."""
        file, index = self._place_of(row)
        return f"{str(file.path)!r}, {file.word} {file.lines[index]}"

    def _place_of(self, row: int) -> tuple[_File, int]:
        number = int(self.numbers(row))
        index = int(np.searchsorted(self._ends, number, side="right"))
        return self._files[index], number - int(self._ends[index]) + len(self._files[index].lines)

    def forget(self) -> None:
        """Forget the values of the columns, which have been read."""
        self._files = [_File(each.path, each.header, _gone, each.lines, each.word) for each in self._files]


def _gone(name: str) -> list[Any]:
    raise AssertionError(f"column {name!r} has been read and forgotten")


def _opened(argument: str, path: Path) -> _File:
    reading = {".csv": _csv, ".json": _json, ".jsonl": _json, ".ndjson": _json, ".parquet": _parquet}
    ending = path.suffix.lower()
    if ending not in reading:
        raise ArgumentError(argument, f"{str(path)!r} is not a .csv, .jsonl or .parquet file")
    try:
        return reading[ending](argument, path)
    except UnicodeDecodeError as error:
        what = f"byte {error.start} of {str(path)!r} is not UTF-8 text; save the file as UTF-8"
        raise ArgumentError(argument, what) from error
    except (OSError, csv.Error) as error:
        raise ArgumentError(argument, f"{str(path)!r} cannot be read: {reason_of(error)}") from error


def _refused(argument: str, path: Path, line: int, what: object) -> ArgumentError:
    return ArgumentError(argument, f"{str(path)!r}, line {line}: {what}; {_CUT}")


@contextmanager
def _texts_of_any_length() -> Iterator[None]:
    """Let the block read cells of any length; the limit of Python's module is one for all of a process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(argument: str, path: Path) -> _File:
    rows: list[list[str]] = []
    lines: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as file, _texts_of_any_length():
        reader = csv.reader(file, strict=True)
        header: list[str] = []
        line = 1
        with _at_line(argument, path, lambda: line):
            for cells in reader:
                if not header:
                    header = [name.strip() for name in cells]
                elif cells and len(cells) != len(header):
                    raise _refused(argument, path, line, f"{len(cells)} cells, but the header has {len(header)}")
                elif cells:
                    rows.append(cells)
                    lines.append(line)
                line = reader.line_num + 1
    twice = next((name for index, name in enumerate(header) if name in header[:index]), None)
    if twice is not None:
        raise ArgumentError(argument, f"{str(path)!r} has two columns {twice!r}; rename one of them")
    return _File(path, header, lambda name: [row[header.index(name)] for row in rows], lines)


@contextmanager
def _at_line(argument: str, path: Path, line: Callable[[], int]) -> Iterator[None]:
    """Name the line of an error in the block."""
    try:
        yield
    except (csv.Error, json.JSONDecodeError) as error:
        raise _refused(argument, path, line() + getattr(error, "lineno", 1) - 1, error) from error


def _json(argument: str, path: Path) -> _File:
    """Read JSON lines, or one list of objects."""
    text = path.read_text(encoding="utf-8-sig")
    rows: list[Any] = []
    lines: list[int] = []
    number = 1
    is_list = text.lstrip()[:1] == "["
    with _at_line(argument, path, lambda: number):
        if is_list:
            rows = json.loads(text)
            lines = list(range(1, len(rows) + 1))
        else:
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    rows.append(json.loads(line))
                    lines.append(number)
    word = "entry" if is_list else "line"
    for number, row in zip(lines, rows, strict=True):
        if not isinstance(row, Mapping):
            what = f'a {type(row).__name__}, not an object such as {{"text": ...}}'
            raise ArgumentError(argument, f"{str(path)!r}, {word} {number} is {what}")
    header = list(dict.fromkeys(name for row in rows for name in row))
    return _File(path, header, lambda name: [row.get(name) for row in rows], lines, word)


def _parquet(argument: str, path: Path) -> _File:
    with needing("a Parquet file", "pyarrow", "data"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowException as error:
        raise ArgumentError(argument, f"{str(path)!r} is not a complete Parquet file: {error}") from error
    return _File(path, file.schema_arrow.names, partial(_of_parquet, path), range(file.metadata.num_rows), "row")


def _of_parquet(path: Path, name: str) -> list[Any]:
    from pyarrow import parquet

    values: list[Any] = parquet.read_table(path, columns=[name], use_threads=False).column(0).to_pylist()
    return values
