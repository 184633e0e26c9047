"""Files of predictions: columns that grow batch by batch, written as Parquet, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.errors import HookError, needing
from emrun.hooks._shared.columns import Column, csv_of, plain

_ROWS = 65536  # rows in a row group of Parquet
_BYTES = 64 << 20  # bytes in a row group, roughly; 64 MiB


class PredictionFile(ABC):
    """A file that rows are added to; it is complete after `close`.

    Args:
        path: where to write.
        owner: the class of the hook, for messages.
    """

    ending: str
    """How the names of such files end."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path = path
        self.owner = owner
        self.columns: list[str] = []
        self._file = path.open("wb")

    @classmethod
    def library(cls) -> Any:
        """Return the optional library that writes such a file; None if none is needed."""
        return None

    @abstractmethod
    def add(self, columns: Mapping[str, Column]) -> None:
        """Add the rows of a batch.

        Args:
            columns: name -> values; all columns have the same length, and all batches the same columns.

        Raises:
            HookError: the file cannot hold the values.
            OSError: the file cannot be written.
        """

    def close(self) -> None:
        """Write what is pending, and close the file."""
        self._file.close()

    def _cannot(self, name: str, why: str) -> HookError:
        return HookError(f"{self.owner}: {self.ending} cannot hold {name!r}: {why}")


class CsvFile(PredictionFile):
    """CSV with a header. A value of several numbers has a column for each: `logits.0`, `logits.1`, ...

    Strings are quoted. Numbers are written with all their digits; a value that is not finite is `nan`, `inf` or `-inf`.
    """

    ending = ".csv"

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(path, owner)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, columns: Mapping[str, Column]) -> None:
        """Add the rows of a batch; see `PredictionFile.add`."""
        shapes = {name: self._shape(name, values) for name, values in columns.items()}
        if not self.columns:
            several = {name: shape if np.prod(shape) > 1 else () for name, shape in shapes.items()}
            places = ((name, *index) for name, shape in several.items() for index in np.ndindex(shape))
            self.columns = [".".join(map(str, place)) for place in places]
            if len(set(self.columns)) < len(self.columns):
                twice = next(column for column in self.columns if self.columns.count(column) > 1)
                raise self._cannot(twice, "two columns would have this name; choose another format")
            self._file.write(csv_of([self.columns]))
        arrays = [np.asarray(column, getattr(column, "dtype", object)) for column in columns.values()]
        flat = [array.reshape(len(array), -1).tolist() for array in arrays]
        rows = (chain(*parts) for parts in zip(*flat, strict=True))
        self._file.write(csv_of(rows, quoting=csv.QUOTE_NONNUMERIC))

    def _shape(self, name: str, values: Column) -> tuple[int, ...]:
        """Return the shape of the values of an example, which all examples must have."""
        if not isinstance(values, np.ndarray) and not all(isinstance(value, str) for value in values):
            raise self._cannot(name, "its values have different shapes; choose .parquet or .jsonl")
        shape = values.shape[1:] if isinstance(values, np.ndarray) else ()
        was = self._shapes.setdefault(name, shape)
        if was != shape:
            raise self._cannot(name, f"its shape changes from {was} to {shape}; choose .parquet or .jsonl")
        return shape


class JsonLinesFile(PredictionFile):
    """A JSON object for each example; a number that is not finite is the string `NaN`, `Infinity` or `-Infinity`."""

    ending = ".jsonl"

    def add(self, columns: Mapping[str, Column]) -> None:
        """Add the rows of a batch; see `PredictionFile.add`."""
        self.columns = list(columns)
        for name, values in columns.items():
            if isinstance(values, np.ndarray) and values.dtype.kind == "c":
                raise self._cannot(name, "JSON has no complex numbers; choose .csv")
        lists = [plain(values) for values in columns.values()]
        lines = []
        for row in zip(*lists, strict=True):
            line = json.dumps(dict(zip(columns, row, strict=True)))
            if "NaN" in line or "Infinity" in line:  # perhaps as a number, which JSON does not have
                line = json.dumps(json.loads(line, parse_constant=str))
            lines.append(f"{line}\n")
        self._file.write("".join(lines).encode())


class ParquetFile(PredictionFile):
    """Parquet, by pyarrow; a value of several dimensions is a list, of lists if there are more than one."""

    ending = ".parquet"

    @classmethod
    def library(cls) -> Any:
        """Return pyarrow.

        Raises:
            MissingExtra: it is not installed.
        """
        with needing("a Parquet file", "pyarrow", "data"):
            import pyarrow
            import pyarrow.parquet
        return pyarrow

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(path, owner)
        self._arrow = self.library()
        self._writer: Any = None
        self._pending: list[Any] = []
        self._rows = self._bytes = 0

    def add(self, columns: Mapping[str, Column]) -> None:
        """Add the rows of a batch; see `PredictionFile.add`."""
        self.columns = list(columns)
        arrays = []
        for name, values in columns.items():
            kind = self._writer.schema.field(name).type if self._writer is not None else None
            try:
                array = self._array(values)
                arrays.append(array if kind in (None, array.type) else array.cast(kind))  # refuses a loss of digits
            except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, self._arrow.ArrowNotImplementedError) as why:
                raise self._cannot(name, str(why).splitlines()[0]) from why
        batch = self._arrow.RecordBatch.from_arrays(arrays, names=self.columns)
        if self._writer is None:
            self._writer = self._arrow.parquet.ParquetWriter(self._file, batch.schema)
        self._pending.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            self._write()

    def _array(self, values: Column) -> Any:
        if isinstance(values, np.ndarray):
            return self._arrow.array(_rows(values))
        filled = [
            [] if isinstance(value, np.ndarray) and not value.size else value for value in values
        ]  # [] has no dtype
        return self._arrow.array(_rows(filled))

    def _write(self) -> None:
        if self._pending:
            self._writer.write_table(self._arrow.Table.from_batches(self._pending), row_group_size=_ROWS)
        self._pending = []
        self._rows = 0
        self._bytes = 0

    def close(self) -> None:
        """Write the last row group and the footer, and close the file."""
        try:
            if self._writer is not None:
                self._write()
                self._writer.close()
        finally:
            super().close()


def _rows(value: Any) -> Any:
    """Return an array of several axes as lists of arrays of one axis, which pyarrow takes, also those in a list."""
    if isinstance(value, str) or (isinstance(value, np.ndarray) and value.ndim < 2):
        return value
    return [_rows(item) for item in value]


FILES: Mapping[str, type[PredictionFile]] = {kind.ending: kind for kind in (ParquetFile, CsvFile, JsonLinesFile)}
"""The ending of a file's name -> the class that writes it."""
