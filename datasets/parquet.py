"""Parquet files, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_names, check_one_of
from emrun.base.errors import ArgumentError, StreamError, needing, reason_of
from emrun.base.sources import NEW
from emrun.base.types import Batch, Json, Named, Strings
from emrun.datasets._arrow import (
    agree,
    alike,
    array_of,
    as_texts,
    column_of,
    formed,
    gaps_of,
    has_nulls,
    learn_fill,
    sources_of,
    types_as_text,
    types_of,
    unreadable_columns,
    views_of,
)
from emrun.datasets._categories import ColumnForms
from emrun.datasets._division import Readable, SplitForm, Texts
from emrun.datasets._paths import Files, check_unchanged, files_of, first_of, identity
from emrun.datasets._prepared import PreparedColumns
from emrun.datasets._splits import Part
from emrun.datasets._statistics import FillForm, Normalize, scale_of, scaled
from emrun.stream_context import Array, Rows, StreamContext

with needing("Parquet", "pyarrow", "data"):
    import pyarrow as pa

_KEPT = 2  # row groups in memory: a batch at the border of two needs both


class Parquet(PreparedColumns):
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

    A null is an error, unless `fill` has a value for its column. A column of `categories`, of texts or whole numbers,
    becomes numbers of dtype int64: 0, 1, ... in the order of the categories that the train rows have, and the next
    number, the largest, for all other categories, which are a warning. So an embedding of n categories has n + 1 rows:

        dataset:
          class: Parquet
          train: data/people-train.parquet
          valid: data/people-valid.parquet
          fill: {age: .nan, city: "?"}
          categories: [city]

    Needs pyarrow (`pip install 'emrun[data]'`).

    Args:
        train: a path, a pattern such as `data/*.parquet` (its files are sorted by name), or a list of these.
        valid: the files for the stream `valid`, to evaluate on during the training.
        test: the files for the stream `test`, to evaluate on at the end.
        normalize: column -> how its numbers are scaled, see `Table`. Whole numbers become float32.
        columns: the columns to read; by default all columns of the first file.
        fill: column -> the value that replaces nulls. Whole numbers become float64 if the value is not one, as `.nan`.
            `{by: median}` and `{by: most_frequent}` take the value from the train rows.
        categories: columns whose values become numbers. A run keeps their names in `classes.json`: `resume`, `eval` and
            `predict` use the same numbers, whatever the train rows are then.
        batch_size: the number of examples in a batch.
        split: divides the rows of `train`, see `Table`; any column of the files may be named, and `files` are patterns
            for the files. Each part keeps the row groups.
        balance: the column of the classes of which training passes draw the same number of rows, see `Table`.
        preparation: what the run keeps of the data, which emrun supplies.

    Raises:
        ArgumentError: a file is missing, is not a complete Parquet file or lacks a column, or a column has a type that
            cannot be a source, such as a date, or another type than in train; or a column has a null; or `fill` or
            `categories` do not fit the columns.
        StreamError: a list has a null, or a file cannot be read or has changed since the dataset was built.
    """

    train_only = ("train", "batch_size", "balance")

    def __init__(
        self,
        train: Files,
        valid: Files | None = None,
        test: Files | None = None,
        columns: list[str] | None = None,
        batch_size: int = 32,
        fill: Mapping[str, Any | FillForm] | None = None,
        categories: list[str] | None = None,
        split: SplitForm | None = None,
        normalize: Mapping[str, Normalize] | None = None,
        balance: str | None = None,
        preparation: Json | None = None,
    ) -> None:
        if columns is not None:
            check_names("columns", columns)
            if not columns or len(set(columns)) < len(columns):
                raise ArgumentError("columns", f"{columns!r} is empty, or names a column twice")
        self._columns = columns
        self._kinds: Named = {}
        forms = ColumnForms(fill, categories, normalize)
        files = {"train": train, "valid": valid, "test": test}
        super().__init__(forms, files, batch_size, split, preparation, balance)

    def _files_at(self, path: Path) -> Files:
        return str(path / "*.parquet" if path.is_dir() else path)

    def _read(self, name: str, files: Any) -> dict[str, _RowGroups]:
        paths = files_of(name, files)
        columns = list(self._kinds) if name == NEW else self._columns
        return {name: _RowGroups(name, paths, columns, self._forms, self._kinds, self._helpers)}

    def _learnt(self) -> Json:
        return {"types": types_as_text(self._kinds), **self._forms.learnt}

    def _use(self, learnt: Json) -> None:
        self._kinds |= types_of(learnt["types"])
        self._forms.restore(learnt)


@dataclass(frozen=True)
class _RowGroup:
    table: Any
    arrays: dict[str, Array]  # of the table's memory: NumPy takes rows in less time than Arrow

    def sources(self, rows: Array) -> Named:
        """Return the batch of these rows of the row group."""
        batch: Named = {name: array.take(rows, axis=0) for name, array in self.arrays.items()}
        if others := [name for name in self.table.column_names if name not in batch]:
            batch |= sources_of(self.table.select(others).take(pa.array(rows)))
        return {name: batch[name] for name in self.table.column_names}


class _RowGroups(Readable, Part):
    """The rows of files; pickled without the row groups in memory.

    Args:
        argument: the argument with the files.
        files: the files.
        columns: the columns to read; None for those of the first file.
        forms: how gaps and categories are read.
        kinds: column -> its type in all files so far, which is changed.
        helpers: the columns that only divide the rows.
    """

    def __init__(
        self,
        argument: str,
        files: Sequence[Path],
        columns: Strings | None,
        forms: ColumnForms,
        kinds: Named,
        helpers: Strings,
    ) -> None:
        self._files = files
        self._forms = forms
        self._kinds = kinds
        self._identities = [identity(path) for path in files]
        self._groups: list[tuple[int, int]] = []  # index of the file, index of the row group in the file
        sizes: list[int] = []
        self._kept: dict[int, _RowGroup] = {}
        self._footer: tuple[int, Any] | None = None  # of the file that was read last
        for index, path in enumerate(files):
            try:
                footer = _opened(path)
            except (OSError, ValueError) as error:
                raise ArgumentError(argument, f"{str(path)!r} is not a complete Parquet file: {error}") from error
            where = argument if columns is None or index else "columns"
            if columns is None:
                columns = [name for name in footer.schema_arrow.names if name not in helpers]
            if argument == NEW and not index:  # perhaps without targets
                columns = [name for name in columns if name in footer.schema_arrow.names]
            schema = _chosen(path, footer.schema_arrow, columns, where)
            agree(argument, str(path), schema, kinds)
            columns = schema.names
            if not index and argument != NEW:
                forms.check(columns, columns, columns)
            if not index:
                for name in columns:
                    formed(forms, name, pa.array([], kinds[name]))
            unfilled = [name for name in columns if name not in (*forms.fill, *forms.fill_by)]
            _check_nulls(argument, path, footer.metadata, unfilled, forms)
            for group in range(footer.metadata.num_row_groups):
                self._groups.append((index, group))
                sizes.append(footer.metadata.row_group(group).num_rows)
        self.count = sum(sizes)
        if not self.count:
            raise ArgumentError(argument, f"{', '.join(map(str, files))}: contains no examples")
        self._columns = columns
        self.blocks: Sequence[int] | None = sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._begins = self._ends - sizes
        self.place = first_of([str(path) for path in files])

    def train(self, *, learns: bool) -> None:
        """Learn from the train rows: values that fill gaps, categories and scales, one column at a time."""
        if not learns:
            return
        forms = self._forms
        for name in forms.fill_by:
            whole = pa.concat_tables(self._tables([name], is_raw=True))
            learn_fill(forms, name, whole.column(name), self.place)
        for name, by in forms.normalize.items():
            parts = [array_of(table.column(name)) for table in self._tables([name])]
            numbers = [each.astype(np.float64) for each in parts if each is not None and each.dtype.kind in "iuf"]
            if len(numbers) < len(parts):
                raise ArgumentError(f"normalize.{name}", f"column {name!r} has no numbers, or lists of several lengths")
            values = np.concatenate(numbers)
            columns = values.reshape(len(values), -1).T
            forms.scales[name] = scale_of(by, ((name, each) for each in columns), self.place)
        found: dict[str, set[str]] = {name: set() for name in forms.categories}
        tables = self._tables(forms.categories) if found else ()
        for table in tables:
            for name, known in found.items():
                known.update(table.column(name).unique().to_pylist())
        for name, known in found.items():
            forms.learn(name, known)

    def _tables(self, columns: Strings, *, is_raw: bool = False) -> Iterator[Any]:
        """Yield columns of the rows, row group by row group."""
        for group in range(len(self._groups)):
            table = self._columns_of(group, columns, "train", is_raw=is_raw)
            if self.chosen is not None:
                begin, end = np.searchsorted(self.chosen, [self._begins[group], self._ends[group]])
                table = table.take(pa.array(self.chosen[begin:end] - self._begins[group]))
            yield table

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows, with the row groups that they are in."""
        super().restrict(rows)
        self._kept = {}
        self.blocks = np.bincount(self._groups_of(rows), minlength=len(self._ends)).tolist()

    def files(self) -> list[str]:
        """Return the file of each row."""
        groups = self._groups_of(np.arange(len(self))).tolist()
        return [str(self._files[self._groups[group][0]]) for group in groups]

    def texts(self, argument: str, name: str) -> Texts:
        """Return a column as texts."""
        found: list[str | None] = []
        for path in self._files:
            with _opened(path) as opened:
                check_one_of(argument, name, opened.schema_arrow.names, f"{str(path)!r} has no column {name!r}")
                found += as_texts(opened.read([name], use_threads=False).column(name))
        return found

    def gaps(self, name: str) -> int:
        """Return how many gaps of a column `fill` fills; 0 if there is no such column."""
        count = 0
        for path in self._files if name in (self._columns or ()) else ():
            with _opened(path) as opened:
                count += gaps_of(self._forms, name, opened.read([name], use_threads=False).column(name))
        return count

    def where(self, row: int) -> str:
        """Return the file, the row group and the number of a row in it."""
        group = int(self._groups_of(np.array([row]))[0])
        file, number = self._groups[group]
        return f"{str(self._files[file])!r}, row group {number}, row {row - self._begins[group]}"

    def _groups_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._ends, rows, side="right")

    def __getstate__(self) -> Named:
        return {**self.__dict__, "_kept": {}, "_footer": None}

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows; the row groups that were used last stay in memory for the next batch."""
        rows = self.numbers(rows)
        groups = self._groups_of(rows)
        present = list(dict.fromkeys(groups.tolist()))
        tables, places = [], []
        for group in present:
            found = self._kept.pop(group, None)
            if found is None:
                for each in [*self._kept][: 1 - _KEPT]:  # frees memory before it reads
                    self._kept.pop(each, None)
                found = self._read_group(group, ctx)
            self._kept[group] = found
            here = np.flatnonzero(groups == group)
            inside = rows[here] - self._begins[group]
            if len(present) == 1:
                return found.sources(inside)
            places.append(here)
            tables.append(found.table.take(pa.array(inside)))
        # Shapes of lists can differ between row groups, so that Arrow joins them.
        return sources_of(pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(places)))))

    def _read_group(self, group: int, ctx: StreamContext) -> _RowGroup:
        table = self._columns_of(group, self._columns or (), ctx.stream_name)
        changed = {}
        forms = self._forms
        for name in forms.names.keys() & table.column_names:
            found = table.column(name).combine_chunks().dictionary_encode()
            names = found.dictionary.to_pylist()
            indices = found.indices.to_numpy()
            changed[name] = forms.numbers(name, names, indices, self._where(group, ctx.stream_name))
        for name in forms.scales.keys() & table.column_names:
            values: Any = array_of(table.column(name))
            changed[name] = scaled(values, forms.scales[name], partial(self._error_of, name, group))
        for name, values in changed.items():
            table = table.set_column(table.schema.get_field_index(name), name, column_of(values))
        return _RowGroup(table, views_of(table))

    def _error_of(self, name: str, group: int, row: int, what: str) -> StreamError:
        return StreamError(f"{self.where(int(self._begins[group]) + row)}: column {name!r}: {what}")

    def _where(self, group: int, stream: str) -> str:
        file, number = self._groups[group]
        return f"stream {stream!r}: {str(self._files[file])!r}, row group {number}"

    def _columns_of(self, group: int, columns: Strings, stream: str, *, is_raw: bool = False) -> Any:
        """Return columns of a row group, with their gaps filled, and categories as texts, unless they stay as they are.

        Raises:
            StreamError: the row group cannot be read, has changed, or has a null.
        """
        file, number = self._groups[group]
        path = self._files[file]
        where = self._where(group, stream)
        check_unchanged(path, self._identities[file], where)
        try:
            footer = self._footer[1] if self._footer is not None and self._footer[0] == file else None
            with _opened(path, footer) as opened:
                self._footer = (file, opened.metadata)
                table = opened.read_row_group(number, columns=columns, use_threads=False).select(columns)
            table = alike(table, self._kinds)
        except (OSError, ValueError) as error:
            raise StreamError(f"{where} cannot be read: {reason_of(error)}") from error
        for index, name in enumerate(() if is_raw else columns):
            column = formed(self._forms, name, table.column(name))
            if has_nulls(column):
                raise StreamError(f"{where}: {_null(self._forms, stream, name)}")
            if column is not table.column(name):
                table = table.set_column(index, name, column)
        return table


def _opened(path: Path, footer: Any = None) -> Any:
    with needing("Parquet", "pyarrow", "data"):
        from pyarrow.parquet import ParquetFile
    return ParquetFile(path, metadata=footer)


def _chosen(path: Path, schema: Any, columns: Strings, argument: str) -> Any:
    """Return the schema of the columns to read."""
    for name in columns:
        if schema.names.count(name) > 1:
            raise ArgumentError(argument, f"{str(path)!r}: {schema.names.count(name)} columns are named {name!r}")
        check_one_of(argument, name, schema.names, f"{str(path)!r} has no column {name!r}")
    fields = [schema.field(name) for name in columns]
    chosen = pa.schema([pa.field(field.name, field.type) for field in fields])
    if not fields:
        raise ArgumentError(argument, f"{str(path)!r} has no columns")
    if bad := unreadable_columns(chosen):
        raise ArgumentError(
            argument, f"{str(path)!r} has columns that cannot be sources: {bad}; list others in 'columns'"
        )
    return chosen


def _null(forms: ColumnForms, stream: str, name: str, count: int = 1) -> str:
    advice = forms.way_to_fill(name, is_new=stream == NEW)
    return f"column {name!r} has {'a null' if count == 1 else f'{count} nulls'}; {advice}"


def _check_nulls(argument: str, path: Path, metadata: Any, columns: Strings, forms: ColumnForms) -> None:
    """Check the numbers of nulls in a footer; those of lists count empty lists too, so that only reading can tell.

    Raises:
        ArgumentError: a column has a null.
    """
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, known = column.path_in_schema, column.statistics
            if name in columns and known is not None and known.has_null_count and known.null_count:
                where = f"{str(path)!r}, row group {group}"
                raise ArgumentError(argument, f"{where}: {_null(forms, argument, name, known.null_count)}")
