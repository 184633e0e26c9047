"""Tables of examples in NumPy, CSV or Parquet files, loaded into memory or memory-mapped."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from emrun.base.arguments import check_flag, check_one_of, expanded
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.separators import wrong_separator
from emrun.base.sources import ID, NEW
from emrun.base.types import Counts, Json, Named, Strings, Values
from emrun.base.wording import listed
from emrun.datasets._categories import ColumnForms, Columns
from emrun.datasets._division import Readable, SplitForm, Texts
from emrun.datasets._paths import check_unchanged, identity
from emrun.datasets._prepared import PreparedColumns
from emrun.datasets._splits import Part
from emrun.datasets._statistics import FillForm, Normalize, scale_of, scaled
from emrun.datasets._windows import FUTURE, WindowForm, Windows, check_window
from emrun.stream_context import Array, Rows, StreamContext

Layout = Mapping[str, str | Sequence[str]]
"""Source -> a column, or several."""
TableFiles = str | Path | Mapping[str, str | Path]
"""The files of a stream: one, or source -> file."""
_BLOCK = 2**24  # bytes of a CSV file that are read at once; a row must not be longer
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class Table(PreparedColumns):
    """Examples from a `.npz`, `.csv` or `.parquet` file, or one `.npy` file per source.

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
    empty cell, unless `fill` has a value for its column. A Parquet file is read in the same way, into memory.

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
        columns: only for CSV and Parquet files: source -> a column, or a list of columns, which become one float32
            source of shape (B, number of columns), or int64 if all are `categories`: then each column has numbers of
            its own. If it is null, every column is a source.
        fill: only for CSV and Parquet files: column -> the value that replaces empty cells. The column is float32 if
            the value is not a whole number, as `.nan`. `{by: median}` and `{by: most_frequent}` take the value from the
            train rows; they fill `nan`, too.
        normalize: source -> `standard` (mean 0, deviation 1), `minmax` (0 to 1), `robust` (median 0, quartiles 1 apart)
            or `log`, column by column, after `fill`, with what the train rows tell; `nan` is ignored.
        categories: columns of CSV and Parquet files, or sources of other files, whose values become numbers. Each is a
            source of its own, or in one that has only categories. A list among them stands for its entries. A run
            keeps their names in `classes.json`: `resume`, `eval` and `predict` use the same numbers, whatever the train
            rows are then.
        id: a column of texts or numbers that name the rows, or such a source of other files. Each batch has it as the
            source `id`, a list of texts, for hooks and predictions.
        split: divides the rows of `train`. `valid` and `test` are shares of the rows, drawn by `seed` (0 by default),
            which is not the seed of the run. At most one key says how. `by: COLUMN` keeps the shares of its
            classes. `group: COLUMN` keeps rows with the same value together, and the shares are those of the groups.
            `time: COLUMN` takes the last rows. `hash: COLUMN` draws by the value alone, so that a row keeps its part
            when others are added. `column: {name: COLUMN, valid: dev}` says which value marks the rows of a part, by
            default its name. `folds: 5` with `fold: 0` makes the fold 0 of 5 the part `valid`. Rows and classes are
            those that scikit-learn draws. A column that only divides the rows or names them is no source, unless
            `columns` lists it.
        window: only for CSV and Parquet files: examples are windows of `past` and `future` rows that follow each other
            by the column `order`, within each `group`, such as
            `{past: 48, future: 24, order: time, group: house, future_of: [load]}`.
            Sources are (B, past, C), categories (B, past); `future` is (B, future, columns of `future_of`), scaled as
            a source with these columns. Windows begin every `stride` rows. A window lies in one part; with
            `past_across`, its past may lie in another one. Its `id` is that of the last row of the past. A prediction
            needs only the past.
        balance: the column of the classes of which training passes draw the same number of rows: those of small classes
            come several times in a pass, and some of large classes do not. A pass has as many rows as without.
        preparation: what the run keeps of the data, which emrun supplies.
        memory_map: read from `.npy` files only the examples of each batch, for tables that are larger than the memory.
            Such a file must not change during the training.

    Raises:
        ArgumentError: a file cannot be read, its sources differ in length or from those of `train`, or a cell of a
            source is empty or not a number; the message has file, column and row.
        StreamError: a memory-mapped file has changed.
    """

    train_only = ("train", "batch_size", "balance")

    def __init__(
        self,
        train: TableFiles,
        valid: TableFiles | None = None,
        test: TableFiles | None = None,
        batch_size: int = 32,
        columns: Layout | None = None,
        memory_map: bool = False,
        fill: Mapping[str, str | float | FillForm] | None = None,
        categories: Columns | None = None,
        id: str | None = None,
        split: SplitForm | None = None,
        normalize: Mapping[str, Normalize] | None = None,
        window: WindowForm | None = None,
        balance: str | None = None,
        preparation: Json | None = None,
    ) -> None:
        check_flag("memory_map", memory_map)
        _check_columns(columns or {})
        if id is not None and ID in (columns or ()):
            raise ArgumentError("id", "`columns` has a source 'id' too; rename it")
        if window is not None:
            check_window(window)
            window = {key: each for key, each in window.items() if each is not None}  # type: ignore[assignment]
            if FUTURE in (columns or ()):
                raise ArgumentError("columns", "`window` adds the source 'future'; choose another name")
            if balance is not None:
                raise ArgumentError("balance", "windows have no classes; remove `balance`, or `window`")
            if not columns:
                what = "set `columns` to the sources of the past, such as {x: [load, temperature]}"
                raise ArgumentError("window", what)
            columns = {**columns, FUTURE: window["future_of"]}
        self._window = window
        self._of_windows: dict[_Rows, _Sources] = {}  # all rows of the file that was read last
        self._columns = columns
        self._memory_map = memory_map
        self._id = id
        self._needed: Strings = ()
        self._dtypes: dict[str, np.dtype[Any]] = {}  # source -> its dtype in all streams
        self._shapes: Mapping[str, tuple[int, ...]] = {}  # of an example
        forms = ColumnForms(fill, categories, normalize, window["future_of"] if window is not None else ())
        files = {"train": train, "valid": valid, "test": test}
        super().__init__(forms, files, batch_size, split, preparation, balance)

    def _files_at(self, path: Path) -> TableFiles:
        return {each.stem: each for each in sorted(path.glob("*.npy"))} if path.is_dir() else path

    def _read(self, name: str, files: TableFiles) -> dict[str, _Rows]:
        found = files if isinstance(files, Mapping) else expanded(files)
        ending = ".npy" if isinstance(found, Mapping) else found.suffix.lower()
        is_new = name == NEW
        columns = self._columns
        if is_new and not columns:
            columns = {source: source for source in self._dtypes}  # there may be others
        for key, value in {"columns": self._columns, "fill": self._forms.fill or self._forms.fill_by}.items():
            if value and ending not in _OF_COLUMNS:
                raise ArgumentError(key, f"only CSV and Parquet files have it, and {name} is neither")
        if self._memory_map and ending != ".npy":
            what = f"only .npy files can be mapped; save each source of {name} ({found}) as one"
            raise ArgumentError("memory_map", what)
        rows: _Rows
        if isinstance(found, Path) and ending in _OF_COLUMNS:
            rows = _OF_COLUMNS[ending](name, found)
        elif isinstance(found, Mapping) or ending == ".npz":
            rows = _Arrays(name, found, self._memory_map)
        else:
            raise ArgumentError(name, f"{found} is neither a .npz, .csv or .parquet file, nor {{source: file.npy}}")
        may_lack = is_new or (bool(self._kept) and name != "train")
        rows.lay_out(self._forms, columns, self._id, self._helpers, may_lack=may_lack)
        if is_new and columns and isinstance(rows, _Csv):
            rows.check_has([name for source in self._needed for name in _listed(columns.get(source, ()))])
        return {name: rows}

    def need(self, sources: Strings) -> None:
        """Refuse new data that lack a column of one of these sources, which a model reads."""
        self._needed = sources

    def _complete(self, name: str, part: Any) -> Part:
        is_new = name == "train" and not self._kept
        sources = _Sources(name, part, self._dtypes) if self._window is None or is_new else None
        if is_new and sources is not None:
            self._shapes = sources.shapes()
        if self._window is None:
            return cast("Part", sources)
        whole = part.whole
        if whole not in self._of_windows:
            own = sources if whole is part else None
            self._of_windows = {whole: own or _Sources(name, whole, self._dtypes)}
        windows = Windows(self._window, whole, part.chosen, self._of_windows[whole], f"{part.place}: {name}")
        return windows if self._kept else windows.check()

    def _of_pass(self, part: Part, ctx: StreamContext) -> Part:
        if isinstance(part, Windows):
            return (part.predicted() if ctx.in_order else part).check()
        return part

    def _learnt(self) -> Json:
        return {"dtypes": {source: dtype.str for source, dtype in self._dtypes.items()}, **self._forms.learnt}

    def _use(self, learnt: Json) -> None:
        self._dtypes |= {source: np.dtype(text) for source, text in learnt["dtypes"].items()}
        self._forms.restore(learnt)

    def _column_of(self, source: str) -> object:
        return (self._columns or {}).get(source, source)

    @property
    def data_numbers(self) -> Counts:
        """The widths of sources, and the rows of an embedding of a source of several categories."""
        found = {f"width.{source}": shape[-1] if shape else 1 for source, shape in self._shapes.items()}
        for source, named in (self._columns or {}).items():
            names = [self._forms.names[name] for name in named if name in self._forms.names]
            if not isinstance(named, str) and len(names) == len(named):
                found[f"embeddings.{source}"] = sum(len(each) + 1 for each in names)
        return found

    def scale_of(self, source: str) -> Json | None:
        """Return how a source is scaled, for `units` of a model; None if it is not."""
        return _scale(source, self._columns or {}, self._forms)


class _Rows(Readable):
    """The rows of a file, as they are there.

    Args:
        argument: the argument with the files.
        place: the files.
    """

    columns: Named
    """Column of a CSV file -> a column of Arrow, or source of other files -> its array."""
    header: Strings
    """The names of all columns or arrays."""

    def __init__(self, argument: str, place: object) -> None:
        self.argument = argument
        self.place = str(place)
        self.whole = self
        """All rows of the file."""

    def lay_out(
        self, forms: ColumnForms, columns: Layout | None, name: str | None, helpers: Strings, *, may_lack: bool
    ) -> None:
        """Choose what the sources are made of.

        Args:
            forms: how gaps and categories are read.
            columns: source -> a column, or several; None for one source of each column.
            name: the column with the names of the rows, or None.
            helpers: the columns that only divide the rows.
            may_lack: whether sources may be missing, as the labels of a prediction are.
        """
        self.forms = forms
        self.may_lack = may_lack
        if name is not None:
            self.ids = [each or "" for each in self.texts("id", name)]
        self.layout = columns or {each: each for each in self.header if each not in (*helpers, name)}
        """Source -> a column, or several."""
        if not may_lack:
            self.check_columns()
        own: list[str] = []  # what may be of categories: a source, or the columns of a source of several
        for named in self.layout.values():
            own += [named] if isinstance(named, str) else self._together(named)
        forms.check(self.to_fill(), own, self.layout)
        if self.may_lack:
            there = self.header
            wanted = [name for named in self.layout.values() for name in _listed(named)]
            if {*there}.isdisjoint(wanted):
                raise ArgumentError(self.argument, f"{self.place} has none of the columns {listed(wanted)}")
            layout = self.layout.items()
            self.layout = {key: each for key, each in layout if not each or not {*there}.isdisjoint(_listed(each))}
        self.load(own)
        self.count = next(map(len, self.columns.values()), 0)

    def _together(self, named: Strings) -> Strings:
        """Return the columns of a source if all of them are categories."""
        if not {*named} <= {*self.forms.categories}:
            return ()
        for name in named:
            if name in self.layout:
                what = f"{name!r} is a source and a column of categories in a source of several; rename the source"
                raise ArgumentError("columns", what)
        return named

    def check_columns(self) -> None:
        """Check that the file has the columns of the layout."""

    def to_fill(self) -> Strings:
        """Return the columns that `fill` may name."""
        return ()

    def gaps(self, name: str) -> int:
        """Return how many gaps of a column `fill` fills; 0 if there is no such column."""
        from emrun.datasets._arrow import gaps_of

        return gaps_of(self.forms, name, self.columns[name]) if name in self.columns else 0

    def load(self, own: Strings) -> None:
        """Read the columns of the layout; `own` are those that are a source of their own."""
        raise NotImplementedError

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows."""
        super().restrict(rows)
        self.columns = {
            name: values[rows] if isinstance(values, np.ndarray) else values.take(rows)
            for name, values in self.columns.items()
        }

    def drop(self) -> None:
        """Forget the columns, of which sources were made."""
        self.columns = {}

    def arrays(self) -> dict[str, Array | _Mapped]:
        """Return the sources, without gaps."""
        raise NotImplementedError

    def scaled(self, source: str, names: Strings, values: Any) -> Any:
        """Return a source as `normalize` says."""
        by = self.forms.normalize.get(source)
        if by is not None:
            if values.dtype.kind not in "iuf" or values.ndim not in (1, 2):
                what = f"it is {_kind_of(values)}, not one number or several for each row"
                raise ArgumentError(f"normalize.{source}", what)
            if source not in self.forms.scales:
                self.forms.scales[source] = scale_of(by, _columns(names, values), self.place)
        scale = _scale(source, self.layout, self.forms)
        if scale is None:
            return values
        change = partial(scaled, scale=scale, refuse=partial(self._refusal, source))
        return values.scaled(change) if isinstance(values, _Mapped) else change(values)

    def _refusal(self, source: str, row: int, what: str) -> ArgumentError:
        return ArgumentError(f"normalize.{source}", f"{self.where(row)}: {what}")


class _Arrays(_Rows):
    """The rows of a `.npz` file, or of one `.npy` file per source."""

    def __init__(self, argument: str, files: Path | Mapping[str, str | Path], memory_map: bool) -> None:
        super().__init__(argument, files)
        if isinstance(files, Mapping):
            self.columns = {source: _read_npy(argument, source, path, memory_map) for source, path in files.items()}
        else:
            self.columns = _read_npz(argument, files)
        self.header = list(self.columns)

    def load(self, own: Strings) -> None:
        """Check the arrays."""
        for source, values in self.columns.items():
            if values.ndim == 0 or values.dtype.kind in "OV":
                what = f"source {source!r} is {_kind_of(values)}, not an array with one entry per example"
                raise ArgumentError(self.argument, what)
        lengths = {source: len(values) for source, values in self.columns.items()}
        if len({*lengths.values()}) > 1:
            counts = ", ".join(f"{source} {length}" for source, length in lengths.items())
            raise ArgumentError(self.argument, f"its sources have different numbers of examples: {counts}")

    def texts(self, argument: str, name: str) -> Texts:
        """Return an array with one text or number for each row as texts."""
        check_one_of(argument, name, self.columns, f"{self.place} has no source {name!r}")
        values = self.columns[name][:]
        if values.ndim != 1 or values.dtype.kind not in "UiufM":
            what = f"source {name!r} is {_kind_of(values)}, not one text or number for each row"
            raise ArgumentError(argument, what)
        texts: list[str] = values.astype(str).tolist()
        return texts

    def arrays(self) -> dict[str, Array | _Mapped]:
        """Return the sources."""
        return {source: self.scaled(source, [source], self.columns[source]) for source in self.layout}


class _Sources(Part):
    """The sources of one stream.

    Args:
        argument: the argument with the files.
        rows: the rows.
        dtypes: source -> its dtype in all streams so far, which is changed.
    """

    def __init__(self, argument: str, rows: _Rows, dtypes: dict[str, np.dtype[Any]]) -> None:
        self._rows = rows
        self._count = len(rows)
        self._forms = rows.forms
        self._dtypes = dtypes
        self._sources = rows.arrays()
        rows.drop()
        # source -> name and categories of each of its columns in this stream, whose indices the source has
        self._texts: dict[str, list[tuple[str, list[str]]]] = {}
        for source, named in rows.layout.items():
            if any(name in self._forms.categories for name in _listed(named)):
                self._number(source, [source] if isinstance(named, str) else named)
        self._check(argument)

    def _number(self, source: str, names: Strings) -> None:
        """Replace the categories of a source by their indices in this stream; those of train are learnt."""
        values = self._sources[source]
        if isinstance(values, _Mapped) or values.dtype.kind not in "Uiu" or values.ndim != 1 + (names != [source]):
            kind = "mapped into memory" if isinstance(values, _Mapped) else _kind_of(values)
            raise ArgumentError("categories", f"source {source!r} is {kind}; categories are texts or whole numbers")
        columns = values.reshape(len(values), len(names))
        indices = np.empty(columns.shape, np.int64)
        self._texts[source] = []
        for place, name in enumerate(names):
            found, indices[:, place] = np.unique(columns[:, place], return_inverse=True)
            texts = [str(each) for each in found.tolist()]
            self._texts[source].append((name, texts))
            self._forms.learn(name, texts)
        self._sources[source] = indices.reshape(values.shape)

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Rows, ctx: StreamContext) -> Named:
        """Return the batch of these rows."""
        batch: Named = self.arrays(rows, ctx)
        ids = self.ids(rows)
        return batch if ids is None else {**batch, ID: ids}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return source -> the shape of an example."""
        return {source: values.shape[1:] for source, values in self._sources.items()}

    def is_category(self, source: str) -> bool:
        """Return whether a source has the numbers of categories."""
        return source in self._texts

    def ids(self, rows: Rows) -> list[str] | None:
        """Return the names of rows; None if they have none."""
        names = self._rows.ids
        return None if names is None else [names[row] for row in rows.tolist()]

    def arrays(self, rows: Rows, ctx: StreamContext) -> dict[str, Array]:
        """Return the sources of these rows."""
        batch = {
            source: values[rows].astype(self._dtypes[source], copy=False) for source, values in self._sources.items()
        }
        where = f"stream {ctx.stream_name!r}: {self._rows.place}"
        numbers = self._rows.numbers(rows)
        for source, columns in self._texts.items():
            indices = batch[source].reshape(len(rows), len(columns))
            first = 0  # number of a column, which has numbers of its own
            for place, (name, texts) in enumerate(columns):
                indices[:, place] = self._forms.numbers(name, texts, indices[:, place], where, numbers, first)
                first += len(self._forms.names[name]) + 1
        return batch

    def _check(self, argument: str) -> None:
        known = self._dtypes or dict.fromkeys(self._sources)
        if self._sources.keys() != known.keys() and not (self._rows.may_lack and self._sources.keys() <= known.keys()):
            what = f"its sources are {listed(list(self._sources))}; those of train are {listed(list(known))}"
            raise ArgumentError(argument, what)
        for source, values in self._sources.items():
            own = values.dtype.newbyteorder("=")
            dtype = self._dtypes.setdefault(source, own)
            is_text = own.kind == dtype.kind and own.kind in "US"
            whole, wider = sorted((own, dtype), key=lambda each: (each.kind == "f", each.itemsize))
            if own != dtype and not is_text and (whole not in (np.int32, np.int64) or wider.kind != "f"):
                raise ArgumentError(argument, f"source {source!r} is {values.dtype}; in train it is {dtype}")
            self._dtypes[source] = wider


class _Mapped(Readable):
    """A memory-mapped array, of which only the requested rows are read; it is mapped again after unpickling."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = identity(path)
        self._change: Callable[[Array], Array] | None = None
        self._values: Array | None = np.load(path, mmap_mode="r", allow_pickle=False)
        self.shape = self._values.shape
        self.ndim = self._values.ndim
        self.dtype = self._values.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows."""
        super().restrict(rows)
        self.shape = (len(rows), *self.shape[1:])

    def scaled(self, change: Callable[[Array], Array]) -> _Mapped:
        """Scale what is read from now on, and return the array."""
        self._change = change
        self.dtype = change(np.ones((1, *self.shape[1:]), self.dtype)).dtype
        return self

    def __getitem__(self, rows: Rows) -> Array:
        check_unchanged(self._path, self._identity, str(self._path), "it was mapped")
        if self._values is None:
            self._values = np.load(self._path, mmap_mode="r", allow_pickle=False)
        found = np.asarray(self._values[self.numbers(rows)])
        return found if self._change is None else self._change(found)

    def __getstate__(self) -> Named:
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
            what = f"its member {source!r} is not an array; write the file with numpy.savez"
            raise ArgumentError(argument, f"{path}: {what}")
    return sources


def _kind_of(values: Any) -> str:
    return f"{values.dtype} of shape {values.shape}"


def _check_columns(columns: Layout) -> None:
    for source, named in columns.items():
        names = _listed(named)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ArgumentError("columns", f"source {source!r}: {named!r} is neither a column nor a list of columns")


def _scale(source: str, layout: Layout, forms: ColumnForms) -> Json | None:
    """Return how a source is scaled; the future of windows is scaled as the source that has its columns."""
    if source == FUTURE and source not in forms.scales:
        for other, scale in forms.scales.items():
            names = list(dict.fromkeys(_listed(layout.get(other, ()))))
            if forms.future and set(forms.future) <= set(names):
                places = [names.index(column) for column in forms.future]
                own = {key: [scale[key][place] for place in places if scale[key]] for key in ("shift", "scale")}
                return {"by": scale["by"], **own}
    return forms.scales.get(source)


def _columns(names: Strings, values: Any) -> Iterator[tuple[str, Array]]:
    """Yield the name and the numbers of each column of a source, one after the other."""
    count = 1 if values.ndim == 1 else values.shape[1]
    for index in range(count):
        name = names[index] if len(names) == count else f"{names[0]}[{index}]"
        whole = values[:]  # of a mapped array, one column at a time
        yield name, whole.reshape(len(whole), -1)[:, index].astype(np.float64)


def _listed(named: str | Strings) -> Strings:
    """Return the columns of a source."""
    return [named] if isinstance(named, str) else named


class _Csv(_Rows):
    """The rows of a CSV file."""

    def __init__(self, argument: str, path: Path) -> None:
        super().__init__(argument, path)
        self._path = path
        with needing("Table", "pyarrow", "data"), _reading(argument, path):
            names = self._names()
        self.header = [name.strip() for name in names]
        self._raw = dict(zip(self.header, names, strict=True))

    def _names(self) -> Strings:
        """Return the names of the columns, as the file has them."""
        from pyarrow import csv

        if what := wrong_separator(self._path):
            raise ArgumentError(self.argument, f"{self._path}: {what}")
        with csv.open_csv(self._path, *self._options()) as file:
            names: Strings = file.schema.names
        return names

    @staticmethod
    def _options() -> tuple[Any, Any]:
        from pyarrow import csv

        read_options = csv.ReadOptions(use_threads=False, block_size=_BLOCK)  # in one thread, errors have the row
        return read_options, csv.ParseOptions(newlines_in_values=True)

    def _read(self, names: Strings, kinds: Values) -> Any:
        from pyarrow import csv

        raw = self._raw
        convert_options = csv.ConvertOptions(
            column_types={raw[name]: kind for name, kind in kinds.items() if name in raw},
            include_columns=[raw[name] for name in names],
            null_values=[""],
            strings_can_be_null=True,
        )
        return csv.read_csv(self._path, *self._options(), convert_options).rename_columns(names)

    def _check(self, argument: str, name: str) -> None:
        check_one_of(argument, name, self.header, f"{self.place} has no column {name!r}")
        if not name or self.header.count(name) > 1:
            what = f"{self.place}: {name!r} is the name of several columns, or no name; rename them"
            raise ArgumentError(self.argument, what)

    def texts(self, argument: str, name: str) -> Texts:
        """Return a column as texts, with None for empty cells."""
        import pyarrow as pa

        self._check(argument, name)
        with _reading(self.argument, self._path):
            texts: Texts = self._read([name], {name: pa.string()}).column(name).to_pylist()
        return texts

    def where(self, row: int) -> str:
        """Return the file and the number of a row; the header is row 1."""
        return f"{self.place}, Row #{self.numbers(row) + 2}"

    def check_columns(self) -> None:
        """Check that the file has the columns of the layout, each once."""
        self.check_has(self.to_fill())

    def check_has(self, names: Strings) -> None:
        """Check that the file has these columns, each once."""
        for name in names:
            self._check("columns", name)

    def to_fill(self) -> Strings:
        """Return the columns of the layout."""
        return list(dict.fromkeys(chain.from_iterable(map(_listed, self.layout.values()))))

    def load(self, own: Strings) -> None:
        """Read the columns; they have the types of the file that was read first, that of train."""
        import pyarrow as pa

        needed = self.to_fill()
        types = self.forms.types
        self.check_columns()
        types |= {name: pa.float64() for name in needed if name not in own}
        types |= dict.fromkeys(self.forms.categories, pa.string())
        kinds = {name: kind for name, kind in types.items() if kind != pa.int64()}  # a later file may have fractions
        with _reading(self.argument, self._path):
            table = self._read(needed, kinds)
            for name in needed:
                if name not in kinds and table.column(name).type not in (pa.int64(), pa.float64()):
                    is_empty = pa.types.is_null(table.column(name).type)
                    kinds[name] = types.get(name, pa.float64()) if is_empty else pa.float64()
                    try:
                        table = self._read(needed, kinds)  # raises an error, unless all cells are empty
                    except pa.ArrowInvalid as error:
                        advice = "list the column in `categories`, or leave it out by `columns`"
                        message = f"{self.place}: column {name!r}: {error}; {advice}"
                        raise ArgumentError(self.argument, message) from error
        self.columns = dict(zip(needed, table.columns, strict=True))
        if self.may_lack:  # a target may be empty, too
            filled = {*self.forms.fill, *self.forms.fill_by}
            there = {name for name, cells in self.columns.items() if name in filled or cells.null_count < len(cells)}
            layout = self.layout.items()
            self.layout = {key: each for key, each in layout if not each or not there.isdisjoint(_listed(each))}
            self.columns = {name: self.columns[name] for name in self.to_fill()}

    def arrays(self) -> dict[str, Array | _Mapped]:
        """Return the sources, without gaps; numbers that are not whole are float32."""
        filled = {name: self._filled(name) for name in self.columns}
        found: dict[str, Array | _Mapped] = {}
        for source, named in self.layout.items():
            names = _listed(named)
            if isinstance(named, str):
                values = filled[named]
            elif not named:
                values = np.empty((len(self), 0))
            elif named[0] in self.forms.categories:
                values = np.stack([filled[name] for name in names], axis=1)
            else:
                values = np.stack([filled[name].astype(float) for name in names], axis=1)
            values = self.scaled(source, names, values)
            found[source] = values.astype(np.float32) if values.dtype == np.float64 else values
        return found

    def _filled(self, name: str) -> Array:
        """Return a column without gaps: texts if it has categories, else numbers."""
        from emrun.datasets._arrow import formed, learn_fill

        forms = self.forms
        raw = self.columns[name]
        if name in forms.future and not self.may_lack:
            gaps = np.isnan(raw.to_numpy().astype(np.float64))
            if gaps.any():
                what = " is a target and has a gap; write the value, or begin the file after the gap"
                raise self.refusal("window.future_of", int(np.argmax(gaps)), name, what)
        learn_fill(forms, name, raw, self.place)
        column = formed(forms, name, raw)
        if column.null_count:
            advice = forms.way_to_fill(name, is_new=self.may_lack)
            row = self.numbers(column.is_null().index(True).as_py()) + 2  # the header is row 1
            raise ArgumentError(self.argument, f"{self.place}: column {name!r}: Row #{row} is empty; {advice}")
        forms.types[name] = column.type
        values: Array = column.to_numpy()
        if name in forms.categories:
            return values.astype(str)
        try:
            with np.errstate(over="raise"):
                values.astype(np.float32)
            return values
        except FloatingPointError as error:
            largest = max(values[np.isfinite(values)], key=abs)
            what = f"{self.place}: column {name!r} has {largest}, which float32 cannot hold"
            raise ArgumentError(self.argument, what) from error


class _OfParquet(_Csv):
    """The rows of a Parquet file, read as those of a CSV file."""

    def _names(self) -> Strings:
        from pyarrow import parquet

        names: Strings = parquet.read_schema(self._path).names
        return names

    def _read(self, names: Strings, kinds: Values) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        table = parquet.read_table(self._path, columns=[self._raw[name] for name in names], use_threads=False)
        columns = []
        for name, column in zip(names, table.select([self._raw[name] for name in names]).columns, strict=True):
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            kind = pa.int64() if pa.types.is_integer(kind) else kind
            kind = pa.float64() if pa.types.is_floating(kind) else kind
            columns.append(column.cast(kinds.get(name, kind)))
        return pa.table(columns, names)

    def where(self, row: int) -> str:
        """Return the file and the number of a row."""
        return f"{self.place}, row {self.numbers(row) + 1}"


_OF_COLUMNS = {".csv": _Csv, ".parquet": _OfParquet}
