"""Parquet files, read row group by row group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError, MissingExtra, StreamError, reason_of
from emrun.base.wording import counted, meant_of
from emrun.datasets._arrow import check_types, has_nulls, sources_of, taken, unreadable_columns, views_of
from emrun.datasets._paths import files_of, identity
from emrun.datasets._splits import Splits
from emrun.stream_context import Rows, StreamContext

_KEPT = 2  # row groups in memory: a batch at the border of two needs both


class Parquet(Splits):
    """The rows of Parquet files, with only one or two row groups in memory at a time.

        dataset:
          class: Parquet
          train: data/train-*.parquet
          valid: data/valid.parquet
          columns: [image, label]
          batch_size: 32

    Streams: `train`, and `valid` and `test` if they are given. Each column is a source. Numbers become an array of
    shape (B,) with the dtype of the column. Lists of numbers become an array of shape (B, k) if all lists of the batch
    have k entries, otherwise a list of arrays. Strings and bytes become lists.

    A training pass reads the row groups in random order, and the rows of each row group in random order. So write files
    with shuffled rows, and with row groups of some thousand rows.

    Needs pyarrow (`pip install 'emrun[data]'`).

    Args:
        train: a path, a pattern such as `data/*.parquet` (its files are sorted by name), or a list of these.
        valid: the files for the stream `valid`, to evaluate on during the training.
        test: the files for the stream `test`, to evaluate on at the end.
        columns: the columns to read; by default all columns of the first file.
        batch_size: the number of examples in a batch.

    Raises:
        ArgumentError: a file is missing, is not a complete Parquet file or lacks a column, or a column has a type that
            cannot be a source, such as a date, or another type than in train; or a column has a null.
        StreamError: a list has a null, or a file cannot be read or has changed since the dataset was built.
    """

    def __init__(
        self,
        train: str | list[str],
        valid: str | list[str] | None = None,
        test: str | list[str] | None = None,
        columns: list[str] | None = None,
        batch_size: int = 32,
    ) -> None:
        if columns is not None:
            check_names("columns", columns)
            if not columns or len(set(columns)) < len(columns):
                raise ArgumentError("columns", f"{columns!r} is empty, or names a column twice")

        train_part: _RowGroups | None = None

        def part(argument: str, files: str | list[str]) -> _RowGroups:
            nonlocal train_part
            found = _RowGroups(argument, files_of(argument, files), columns)
            train_part = train_part or found
            check_types(argument, str(found.first), found.schema, train_part.schema)
            return found

        super().__init__(
            part("train", train),
            None if valid is None else part("valid", valid),
            None if test is None else part("test", test),
            batch_size=batch_size,
        )


@dataclass(frozen=True)
class _RowGroup:
    table: Any
    arrays: dict[str, np.ndarray[Any, Any]]  # of the table's memory: NumPy takes rows in less time than Arrow

    def sources(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Return the batch of these rows of the row group."""
        import pyarrow as pa

        batch: dict[str, Any] = {name: array.take(rows, axis=0) for name, array in self.arrays.items()}
        if others := [name for name in self.table.column_names if name not in batch]:
            batch |= sources_of(self.table.select(others).take(pa.array(rows)))
        return {name: batch[name] for name in self.table.column_names}


class _RowGroups:
    """The rows of files with one schema; pickled without the row groups in memory."""

    def __init__(self, argument: str, files: Sequence[Path], columns: Sequence[str] | None) -> None:
        self._files = files
        self._identities = [identity(path) for path in files]
        self._groups: list[tuple[int, int]] = []  # index of the file, index of the row group in the file
        sizes: list[int] = []
        self._kept: dict[int, _RowGroup] = {}
        self._footer: tuple[int, Any] | None = None  # of the file that was read last
        schema = None
        for index, path in enumerate(files):
            try:
                footer = _opened(path)
            except (OSError, ValueError) as error:
                raise ArgumentError(argument, f"{str(path)!r} is not a complete Parquet file: {error}") from error
            found = _chosen(path, footer.schema_arrow, columns, argument if columns is None or index else "columns")
            schema = found if schema is None else schema
            if not found.equals(schema):
                raise ArgumentError(
                    argument, f"{str(path)!r} and {str(files[0])!r} have different columns: {_differing(found, schema)}"
                )
            columns = schema.names
            _check_nulls(argument, path, footer.metadata, schema)
            for group in range(footer.metadata.num_row_groups):
                self._groups.append((index, group))
                sizes.append(footer.metadata.row_group(group).num_rows)
        if not sum(sizes):
            raise ArgumentError(argument, f"{', '.join(map(str, files))}: contains no examples")
        self._columns = columns
        self.first, self.schema = files[0], schema
        self.blocks: Sequence[int] | None = sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_footer": None}

    def read(self, rows: Rows, ctx: StreamContext) -> Mapping[str, Any]:
        """Return the batch of these rows; the row groups that were used last stay in memory for the next batch."""
        import pyarrow as pa

        groups = np.searchsorted(self._ends, rows, side="right")
        present = list(dict.fromkeys(groups.tolist()))
        tables, places = [], []
        for group in present:
            kept = self._kept
            found = kept.get(group)
            if found is None:
                self._kept = kept = dict(list(kept.items())[1 - _KEPT :])  # frees memory before it reads
                found = self._read_group(group, ctx)
            self._kept = {**{each: kept[each] for each in kept if each != group}, group: found}
            here = np.flatnonzero(groups == group)
            inside = rows[here] - (self._ends[group - 1] if group else 0)
            if len(present) == 1:
                return found.sources(inside)
            places.append(here)
            tables.append(found.table.take(pa.array(inside)))
        # Shapes of lists can differ between row groups, so that Arrow joins them.
        return sources_of(taken(tables, np.argsort(np.concatenate(places))))

    def _read_group(self, group: int, ctx: StreamContext) -> _RowGroup:
        file, number = self._groups[group]
        path = self._files[file]
        where = f"stream {ctx.stream_name!r}: {str(path)!r}, row group {number}"
        try:
            if identity(path) != self._identities[file]:
                raise StreamError(f"{where}: the file has changed since the dataset was built")
            footer = self._footer[1] if self._footer is not None and self._footer[0] == file else None
            with _opened(path, footer) as opened:
                self._footer = (file, opened.metadata)
                table = opened.read_row_group(number, columns=self._columns, use_threads=False).select(self._columns)
        except StreamError:
            raise
        except (OSError, ValueError) as error:
            raise StreamError(f"{where} cannot be read: {reason_of(error)}") from error
        for name in table.column_names:
            if has_nulls(table.column(name)):
                raise StreamError(f"{where}: column {name!r} has a null; fill it, or leave the column out of 'columns'")
        return _RowGroup(table, views_of(table))


def _opened(path: Path, footer: Any = None) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtra("Parquet", "pyarrow", "data") from error
    return ParquetFile(path, metadata=footer)


def _chosen(path: Path, schema: Any, columns: Sequence[str] | None, argument: str) -> Any:
    """Return the schema of the columns to read."""
    import pyarrow as pa

    for name in columns or schema.names:
        if schema.names.count(name) > 1:
            raise ArgumentError(argument, f"{str(path)!r}: {schema.names.count(name)} columns are named {name!r}")
        if name not in schema.names:
            raise ArgumentError(argument, f"{str(path)!r} has no column {name!r}{meant_of(name, schema.names)}")
    fields = [schema.field(name) for name in columns or schema.names]
    chosen = pa.schema([pa.field(field.name, field.type) for field in fields])
    if not fields:
        raise ArgumentError(argument, f"{str(path)!r} has no columns")
    if bad := unreadable_columns(chosen):
        raise ArgumentError(
            argument, f"{str(path)!r} has columns that cannot be sources: {bad}; list others in 'columns'"
        )
    return chosen


def _check_nulls(argument: str, path: Path, metadata: Any, schema: Any) -> None:
    """Check the numbers of nulls in a footer; those of lists count empty lists too, so that only reading can tell.

    Raises:
        ArgumentError: a column has a null.
    """
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, known = column.path_in_schema, column.statistics
            if name in schema.names and known is not None and known.has_null_count and known.null_count:
                where = f"{str(path)!r}, row group {group}"
                advice = "fill them, or leave the column out of 'columns'"
                raise ArgumentError(
                    argument, f"{where}: column {name!r} has {counted(known.null_count, 'null')}; {advice}"
                )


def _differing(found: Any, expected: Any) -> str:
    return ", ".join(
        f"{ours.name} ({ours.type}) and {theirs.name} ({theirs.type})"
        for ours, theirs in zip(found, expected, strict=True)
        if not ours.equals(theirs)
    )
