"""Tables of examples in NumPy or CSV files, loaded into memory or memory-mapped."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_flag, expanded
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.wording import listed, meant_of
from emrun.datasets._categories import ColumnForms
from emrun.datasets._paths import check_unchanged, identity
from emrun.datasets._splits import Part, Splits
from emrun.stream_context import Array, Rows, StreamContext

_BLOCK = 2**24  # bytes of a CSV file that are read at once; a row must not be longer
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class Table(Splits):
    """Examples from a `.npz` file, a `.csv` file, or one `.npy` file per source.

        dataset:
          class: Table
          train: train.csv
          valid: valid.csv
          columns: {x: [height, width], label: species}
          batch_size: 32

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Sources: the arrays of
    a `.npz` file; the columns of a CSV file, or the sources that `columns` names; the keys of a mapping. The first axis
    of an array counts the examples, and arrays keep their dtype. All streams must have the same sources with the same
    dtypes.

    A CSV file is UTF-8 text with commas, and its first line names the columns (RFC 4180); pyarrow reads it
    (`pip install 'emrun[data]'`). A column of numbers that are whole in all files becomes int64. Any other
    column of numbers, `nan` and `inf`, becomes float32. Other columns are errors, and so is an
    empty cell, unless `fill` has a value for its column.

    A column of `categories`, or such an array of strings or whole numbers, becomes numbers of dtype int64: 0, 1, ... in
    the order of the categories that the train rows have, and the next number, the largest, for all other categories,
    which are a warning. So an embedding of n categories has n + 1 rows:

        dataset:
          class: Table
          train: people-train.csv
          valid: people-valid.csv
          fill: {age: .nan, city: "?"}
          categories: [city]

    Args:
        train: a `.npz` or `.csv` file, or a mapping source -> `.npy` file. Relative paths start from the current
            directory.
        valid: the same for the stream `valid`, to evaluate on during the training.
        test: the same for the stream `test`, to evaluate on at the end.
        batch_size: the number of examples in a batch.
        columns: only for CSV files: source -> a column, or a list of columns, which become one float32 source of shape
            (B, number of columns). If it is null, every column is a source.
        fill: only for CSV files: column -> the value that replaces empty cells. The column is float32 if the value is
            not a whole number, as `.nan`.
        categories: columns of CSV files, or sources of other files, whose values become numbers. Each is a source of
            its own. A run keeps their names in `classes.json`: `resume`, `eval` and `predict` use the same numbers,
            whatever the train rows are then.
        memory_map: read from `.npy` files only the examples of each batch, for tables that are larger than the memory.
            Such a file must not change during the training.

    Raises:
        ArgumentError: a file cannot be read, its sources differ in length or from those of `train`, or a cell of a
            source is empty or not a number; the message has file, column and row.
        StreamError: a memory-mapped file has changed.
    """

    def __init__(
        self,
        train: str | Path | Mapping[str, str | Path],
        valid: str | Path | Mapping[str, str | Path] | None = None,
        test: str | Path | Mapping[str, str | Path] | None = None,
        batch_size: int = 32,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        memory_map: bool = False,
        fill: Mapping[str, str | float] | None = None,
        categories: Sequence[str] | None = None,
    ) -> None:
        check_flag("memory_map", memory_map)
        _check_columns(columns)
        self._forms = ColumnForms(fill, categories)
        parts: dict[str, _Sources] = {}
        for name, files in (("train", train), ("valid", valid), ("test", test)):
            if files is not None:
                parts[name] = _Sources(name, files, columns, self._forms, memory_map, parts.get("train"))
        super().__init__(parts, batch_size)

    def classes_names(self) -> Mapping[str, Sequence[str]]:
        """Return source of `categories` -> the names of its categories."""
        return self._forms.names

    def use_classes(self, names: Mapping[str, Sequence[str]]) -> None:
        """Number the categories as a run does."""
        self._forms.use(names)


class _Sources(Part):
    """The sources of one stream."""

    def __init__(
        self,
        argument: str,
        files: str | Path | Mapping[str, str | Path],
        columns: Mapping[str, str | Sequence[str]] | None,
        forms: ColumnForms,
        memory_map: bool,
        train: _Sources | None,
    ) -> None:
        files = files if isinstance(files, Mapping) else expanded(files)
        ending = ".npy" if isinstance(files, Mapping) else files.suffix.lower()
        for key, value in {"columns": columns, "fill": forms.fill}.items():
            if value and ending != ".csv":
                raise ArgumentError(key, f"only CSV files have it, and {argument} is not a CSV file")
        if memory_map and not isinstance(files, Mapping):
            what = f"only .npy files can be mapped; save each source of {argument} ({files}) as one"
            raise ArgumentError("memory_map", what)
        self._sources: dict[str, Array | _Mapped]
        if isinstance(files, Mapping):
            self._sources = {source: _read_npy(argument, source, path, memory_map) for source, path in files.items()}
        elif ending == ".csv":
            self._sources = dict(_read_csv(argument, files, columns, forms))
        elif ending == ".npz":
            self._sources = dict(_read_npz(argument, files))
        else:
            raise ArgumentError(argument, f"{files} is neither a .npz nor a .csv file, nor {{source: file.npy}}")
        self._forms = forms
        self._where = str(files)
        self._texts: dict[str, list[str]] = {}  # source -> the categories of this stream, whose indices the source has
        named = columns if columns is not None else {source: source for source in self._sources}
        own = {column: source for source, column in named.items() if isinstance(column, str)}
        if ending != ".csv":
            forms.check([], list(own))
        for column in forms.categories:
            self._number(own[column])
        self._dtypes: dict[str, np.dtype[Any]] = {} if train is None else train._dtypes  # in all streams
        self._check(argument)

    def _number(self, source: str) -> None:
        """Replace the categories of a source by their indices in this stream; those of train are learnt."""
        values = self._sources[source]
        if isinstance(values, _Mapped) or values.dtype.kind not in "Uiu" or values.ndim != 1:
            kind = "mapped into memory" if isinstance(values, _Mapped) else f"{values.dtype} of shape {values.shape}"
            raise ArgumentError("categories", f"source {source!r} is {kind}; categories are texts or whole numbers")
        found, self._sources[source] = np.unique(values, return_inverse=True)
        self._texts[source] = [str(each) for each in found.tolist()]
        self._forms.learn(source, self._texts[source])

    def __len__(self) -> int:
        return next((values.shape[0] for values in self._sources.values()), 0)

    def read(self, rows: Rows, ctx: StreamContext) -> dict[str, Array]:
        """Return the batch of these rows."""
        batch = {
            source: values[rows].astype(self._dtypes[source], copy=False) for source, values in self._sources.items()
        }
        for source, names in self._texts.items():
            batch[source] = self._forms.numbers(
                source, names, batch[source], f"stream {ctx.stream_name!r}: {self._where}", rows
            )
        return batch

    def _check(self, argument: str) -> None:
        for source, values in self._sources.items():
            if values.ndim == 0 or values.dtype.kind in "OV":
                what = f"{values.dtype} of shape {values.shape}"
                raise ArgumentError(argument, f"source {source!r} is {what}, not an array with one entry per example")
        lengths = {source: values.shape[0] for source, values in self._sources.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{source} {length}" for source, length in lengths.items())
            raise ArgumentError(argument, f"its sources have different numbers of examples: {counts}")
        known = self._dtypes or dict.fromkeys(self._sources)
        if self._sources.keys() != known.keys():
            raise ArgumentError(
                argument, f"its sources are {listed(list(self._sources))}; those of train are {listed(list(known))}"
            )
        for source, values in self._sources.items():
            own = values.dtype.newbyteorder("=")
            dtype = self._dtypes.setdefault(source, own)
            is_text = own.kind == dtype.kind and own.kind in "US"
            whole, wider = sorted((own, dtype), key=lambda each: (each.kind == "f", each.itemsize))
            if own != dtype and not is_text and (whole not in (np.int32, np.int64) or wider.kind != "f"):
                raise ArgumentError(argument, f"source {source!r} is {values.dtype}; in train it is {dtype}")
            self._dtypes[source] = wider


class _Mapped:
    """A memory-mapped array, of which only the requested rows are read; it is mapped again after unpickling."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = identity(path)
        self._values: Array | None = np.load(path, mmap_mode="r", allow_pickle=False)
        self.shape = self._values.shape
        self.ndim = self._values.ndim
        self.dtype = self._values.dtype

    def __getitem__(self, rows: Rows) -> Array:
        check_unchanged(self._path, self._identity, str(self._path), "it was mapped")
        if self._values is None:
            self._values = np.load(self._path, mmap_mode="r", allow_pickle=False)
        return np.asarray(self._values[rows])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None, "_path": self._path.absolute()}


@contextmanager
def _reading(argument: str, path: Path) -> Iterator[None]:
    """Turn an error while a file is read into an ArgumentError for the argument that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArgumentError(argument, f"there is no file {path} (the current directory is {Path.cwd()})") from error
    except ArgumentError:
        raise
    except _UNREADABLE as error:
        raise ArgumentError(argument, f"{path} cannot be read: {reason_of(error)}") from error


def _read_npy(argument: str, source: str, file: str | Path, memory_map: bool) -> Array | _Mapped:
    path = expanded(file)
    if path.suffix.lower() != ".npy":
        raise ArgumentError(argument, f"source {source!r}: {file} is not a .npy file")
    with _reading(argument, path):
        return _Mapped(path) if memory_map else np.load(path, allow_pickle=False)


def _read_npz(argument: str, path: Path) -> dict[str, Array]:
    with _reading(argument, path), path.open("rb") as file:  # NumPy does not close files that it cannot read
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise ArgumentError(argument, f"{path} has one array without a name; it is a .npy file")
        with found:
            sources = {source: found[source] for source in found.files}
    for source, values in sources.items():
        if not isinstance(values, np.ndarray):
            raise ArgumentError(
                argument, f"{path}: its member {source!r} is not an array; write the file with numpy.savez"
            )
    return sources


def _check_columns(columns: Mapping[str, str | Sequence[str]] | None) -> None:
    for source, named in (columns or {}).items():
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ArgumentError("columns", f"source {source!r}: {named!r} is neither a column nor a list of columns")


def _read_csv(
    argument: str, path: Path, columns: Mapping[str, str | Sequence[str]] | None, forms: ColumnForms
) -> Iterator[tuple[str, Array]]:
    """Yield the sources of a CSV file; the columns have the types of the file that was read first, that of train."""
    with needing("Table", "pyarrow", "data"):
        import pyarrow as pa
        from pyarrow import csv

    # The columns
    read_options = csv.ReadOptions(use_threads=False, block_size=_BLOCK)  # in one thread, errors have the row
    parse_options = csv.ParseOptions(newlines_in_values=True)
    with _reading(argument, path), csv.open_csv(path, read_options, parse_options) as file:
        names = file.schema.names
    header = [name.strip() for name in names]
    raw = dict(zip(header, names, strict=True))
    if columns is None:
        columns = {name: name for name in header}
    needed = list(dict.fromkeys(chain.from_iterable([v] if isinstance(v, str) else v for v in columns.values())))
    for name in needed:
        if name not in header:
            raise ArgumentError("columns", f"{path} has no column {name!r}{meant_of(name, header)}")
        if not name or header.count(name) > 1:
            raise ArgumentError(argument, f"{path}: {name!r} is the name of several columns, or no name; rename them")
    own = [named for named in columns.values() if isinstance(named, str)]
    forms.check(needed, own)

    def read(kinds: Mapping[str, Any]) -> Any:
        convert_options = csv.ConvertOptions(
            column_types={raw[name]: kind for name, kind in kinds.items() if name in raw},
            include_columns=[raw[name] for name in needed],
            null_values=[""],
            strings_can_be_null=True,
        )
        return csv.read_csv(path, read_options, parse_options, convert_options).rename_columns(needed)

    # Their types
    forms.types |= {name: pa.float64() for name in needed if name not in own}
    forms.types |= dict.fromkeys(forms.categories, pa.string())
    kinds = {name: kind for name, kind in forms.types.items() if kind != pa.int64()}  # a later file may have fractions
    with _reading(argument, path):
        table = read(kinds)
        for name in needed:
            if name not in kinds and table.column(name).type not in (pa.int64(), pa.float64()):
                is_empty = pa.types.is_null(table.column(name).type)
                kinds[name] = forms.types.get(name, pa.float64()) if is_empty else pa.float64()
                try:
                    table = read(kinds)  # raises an error, unless all cells are empty
                except pa.ArrowInvalid as error:
                    advice = "list the column in `categories`, or leave it out by `columns`"
                    raise ArgumentError(argument, f"{path}: column {name!r}: {error}; {advice}") from error

    arrays = {name: _filled(argument, path, name, table.column(name), forms) for name in needed}
    for source, named in columns.items():
        if isinstance(named, str):
            yield source, arrays[named]
        else:
            yield source, np.stack([arrays[name].astype(np.float32) for name in named], axis=1)


def _filled(argument: str, path: Path, name: str, column: Any, forms: ColumnForms) -> Array:
    """Return a column of a CSV file without gaps: texts if it has categories, else numbers."""
    from emrun.datasets._arrow import formed

    column = formed(forms, name, column)
    if column.null_count:
        advice = f"fill it by `fill: {{{name}: VALUE}}`, or leave the column out by `columns`"
        row = column.is_null().index(True).as_py() + 2  # the header is row 1
        raise ArgumentError(argument, f"{path}: column {name!r}: Row #{row} is empty; {advice}")
    forms.types[name] = column.type
    values: Array = column.to_numpy()
    if name in forms.categories:
        return values.astype(str)
    try:
        with np.errstate(over="raise"):
            return values if values.dtype == np.int64 else values.astype(np.float32)
    except FloatingPointError as error:
        largest = max(values[np.isfinite(values)], key=abs)
        raise ArgumentError(argument, f"{path}: column {name!r} has {largest}, which float32 cannot hold") from error
