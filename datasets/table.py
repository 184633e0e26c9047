"""Tables of examples in NumPy or CSV files, loaded into memory or memory-mapped."""

from __future__ import annotations

import copy
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_flag, expanded
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.sources import ID
from emrun.base.types import Json
from emrun.base.wording import listed, meant_of
from emrun.datasets._categories import ColumnForms
from emrun.datasets._division import Readable, SplitForm
from emrun.datasets._paths import check_unchanged, identity
from emrun.datasets._prepared import Prepared
from emrun.datasets._splits import Part
from emrun.datasets._statistics import FillForm, Normalize, scale_of, scaled
from emrun.datasets._windows import FUTURE, WindowForm, Windows, check_window
from emrun.stream_context import Array, Rows, StreamContext

_BLOCK = 2**24  # bytes of a CSV file that are read at once; a row must not be longer
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class Table(Prepared):
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
            not a whole number, as `.nan`. `{by: median}` and `{by: most_frequent}` take the value from the train rows;
            they fill `nan`, too.
        normalize: source -> `standard` (mean 0, deviation 1), `minmax` (0 to 1), `robust` (median 0, quartiles 1 apart)
            or `log`, column by column, after `fill`, with what the train rows tell; `nan` is ignored.
        categories: columns of CSV files, or sources of other files, whose values become numbers. Each is a source of
            its own. A run keeps their names in `classes.json`: `resume`, `eval` and `predict` use the same numbers,
            whatever the train rows are then.
        id: a column of texts or numbers that name the rows, or such a source of other files. Each batch has it as the
            source `id`, a list of texts, for hooks and predictions.
        split: divides the rows of `train`. `valid` and `test` are shares of the rows, drawn by `seed` (0 by default),
            which is not the seed of the run. At most one of these says how: `by: COLUMN` keeps the shares of its
            classes; `group: COLUMN` keeps rows with the same value together, and the shares are those of the groups;
            `time: COLUMN` takes the last rows; `hash: COLUMN` draws by the value alone, so that a row keeps its part
            when others are added; `column: {name: COLUMN, valid: dev}` says which value marks the rows of a part, by
            default its name; `folds: 5` with `fold: 0` makes the fold 0 of 5 the part `valid`. Rows and classes are
            those that scikit-learn draws. A column that only divides the rows or names them is no source, unless
            `columns` lists it.
        window: only for CSV files: examples are windows of `past` and `future` rows that follow each other by the
            column `order`, within each `group`: `{past: 48, future: 24, order: time, group: house, future_of: [load]}`.
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

    def __init__(
        self,
        train: str | Path | Mapping[str, str | Path],
        valid: str | Path | Mapping[str, str | Path] | None = None,
        test: str | Path | Mapping[str, str | Path] | None = None,
        batch_size: int = 32,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        memory_map: bool = False,
        fill: Mapping[str, str | float | FillForm] | None = None,
        categories: Sequence[str] | None = None,
        id: str | None = None,
        split: SplitForm | None = None,
        normalize: Mapping[str, Normalize] | None = None,
        window: WindowForm | None = None,
        balance: str | None = None,
        preparation: Json | None = None,
    ) -> None:
        check_flag("memory_map", memory_map)
        _check_columns(columns)
        if id is not None and ID in (columns or ()):
            raise ArgumentError("id", "`columns` has a source 'id' too; rename it")
        if window is not None:
            check_window(window)
            if FUTURE in (columns or ()):
                raise ArgumentError("columns", "`window` adds the source 'future'; choose another name")
            columns = columns and {**columns, FUTURE: window["future_of"]}
            if balance is not None:
                raise ArgumentError("balance", "windows have no classes; remove `balance`, or `window`")
            if columns is None:
                raise ArgumentError(
                    "window", "set `columns` to the sources of the past, such as {x: [load, temperature]}"
                )
        self._window = window
        self._of_windows: dict[_Rows, _Sources] = {}  # all rows of the file that was read last
        self._columns = columns
        self._memory_map = memory_map
        self._id = id
        self._forms = ColumnForms(fill, categories, normalize, window["future_of"] if window is not None else ())
        self._dtypes: dict[str, np.dtype[Any]] = {}  # source -> its dtype in all streams
        super().__init__({"train": train, "valid": valid, "test": test}, batch_size, split, preparation, balance)

    def _read(self, name: str, files: str | Path | Mapping[str, str | Path]) -> dict[str, _Rows]:
        helpers = [] if self._split is None else self._split.helpers
        return {
            name: _Rows(name, files, self._columns, self._forms, self._memory_map, self._id, helpers, bool(self._kept))
        }

    def _complete(self, name: str, part: Any) -> Part:
        rows: _Rows = part
        learns = name == "train" and not self._kept
        sources = _Sources(name, rows, self._forms, self._dtypes) if self._window is None or learns else None
        if self._window is None and sources is not None:
            return sources
        form: Any = self._window
        if rows.whole not in self._of_windows:
            whole = sources if rows.whole is rows else None
            self._of_windows = {rows.whole: whole or _Sources(name, rows.whole, self._forms, self._dtypes)}
        windows = Windows(form, rows.whole, rows.chosen, self._of_windows[rows.whole], f"{rows.place}: {name}")
        if not self._kept:
            windows.check()
        return windows

    def _of_pass(self, part: Part, ctx: StreamContext) -> Part:
        if isinstance(part, Windows):
            return part.predicted() if ctx.in_order else part.check()
        return part

    def _learnt(self) -> Json:
        if self._split is None and not self._forms.learns:
            return {}
        dtypes = {source: dtype.str for source, dtype in self._dtypes.items()}
        return {"dtypes": dtypes, **self._forms.learnt}

    def _use(self, learnt: Json) -> None:
        self._dtypes |= {source: np.dtype(text) for source, text in learnt["dtypes"].items()}
        self._forms.restore(learnt)

    def scale_of(self, source: str) -> Json | None:
        """Return how a source is scaled, for `units` of a model; None if it is not."""
        return _scale(source, self._columns or {}, self._forms)

    def classes_names(self) -> Mapping[str, Sequence[str]]:
        """Return source of `categories` -> the names of its categories."""
        return self._forms.names

    def use_classes(self, names: Mapping[str, Sequence[str]]) -> None:
        """Number the categories as a run does."""
        self._forms.use(names)


class _Rows(Readable):
    """The rows of a file, as they are there."""

    def __init__(
        self,
        argument: str,
        files: str | Path | Mapping[str, str | Path],
        columns: Mapping[str, str | Sequence[str]] | None,
        forms: ColumnForms,
        memory_map: bool,
        name: str | None,
        helpers: Sequence[str],
        may_lack: bool,
    ) -> None:
        files = files if isinstance(files, Mapping) else expanded(files)
        ending = ".npy" if isinstance(files, Mapping) else files.suffix.lower()
        for key, value in {"columns": columns, "fill": forms.fill or forms.fill_by}.items():
            if value and ending != ".csv":
                raise ArgumentError(key, f"only CSV files have it, and {argument} is not a CSV file")
        if memory_map and not isinstance(files, Mapping):
            what = f"only .npy files can be mapped; save each source of {argument} ({files}) as one"
            raise ArgumentError("memory_map", what)
        self.place = str(files)
        self._csv: _Csv | None = None
        self.chosen: Rows | None = None
        """The numbers of the rows in the file; None for all."""
        self.whole = self
        """All rows of the file."""
        self._names: list[str] | None = None
        self.columns: dict[str, Any]
        """Column of a CSV file -> a column of Arrow, or source of other files -> its array."""
        if isinstance(files, Mapping):
            self.columns = {source: _read_npy(argument, source, path, memory_map) for source, path in files.items()}
        elif ending == ".csv":
            self._csv = _Csv(argument, files)
        elif ending == ".npz":
            self.columns = _read_npz(argument, files)
        else:
            raise ArgumentError(argument, f"{files} is neither a .npz nor a .csv file, nor {{source: file.npy}}")
        if name is not None:
            self._names = [each or "" for each in self.texts("id", name)]
        aside = [*helpers, *([] if name is None else [name])]
        there = list(self.columns) if self._csv is None else self._csv.header
        self.layout = columns or {each: each for each in there if each not in aside}
        """Source -> a column, or several."""
        own = [named for named in self.layout.values() if isinstance(named, str)]
        forms.check([] if self._csv is None else _flat(self.layout), own, self.layout)
        self.may_lack = may_lack and argument != "train"
        """Whether sources may be missing, as the labels of a prediction are."""
        if self.may_lack:
            self.layout = {
                source: named
                for source, named in self.layout.items()
                if not {*there}.isdisjoint(_flat({source: named}))
            }
        if self._csv is None:
            self._check_lengths(argument)
        else:
            self.columns = self._csv.typed(_flat(self.layout), forms, own)
        self._count = next(map(len, self.columns.values()), 0)

    def _check_lengths(self, argument: str) -> None:
        for source, values in self.columns.items():
            if values.ndim == 0 or values.dtype.kind in "OV":
                what = f"{values.dtype} of shape {values.shape}"
                raise ArgumentError(argument, f"source {source!r} is {what}, not an array with one entry per example")
        lengths = {source: values.shape[0] for source, values in self.columns.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{source} {length}" for source, length in lengths.items())
            raise ArgumentError(argument, f"its sources have different numbers of examples: {counts}")

    def __len__(self) -> int:
        return self._count if self.chosen is None else len(self.chosen)

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows."""
        self.chosen = rows
        self._names = None if self._names is None else [self._names[row] for row in rows.tolist()]
        self.columns = {
            name: values[rows] if isinstance(values, np.ndarray) else values.take(rows)
            for name, values in self.columns.items()
        }

    def drop(self) -> None:
        """Forget the columns, of which sources were made."""
        self.columns = {}

    def names(self) -> list[str] | None:
        """Return the ids of the rows; None without the argument `id`."""
        return self._names

    def texts(self, argument: str, name: str) -> Sequence[str | None]:
        """Return a column, or an array with one text or number for each row, as texts."""
        if self._csv is not None:
            return self._csv.texts(argument, name)
        if name not in self.columns:
            raise ArgumentError(argument, f"{self.place} has no source {name!r}{meant_of(name, self.columns)}")
        values = self.columns[name][:]
        if values.ndim != 1 or values.dtype.kind not in "UiufM":
            what = f"{values.dtype} of shape {values.shape}"
            raise ArgumentError(argument, f"source {name!r} is {what}, not one text or number for each row")
        texts: list[str] = values.astype(str).tolist()
        return texts

    def where(self, row: int) -> str:
        """Return the file and the number of a row; in a CSV file, the header is row 1."""
        number = self.numbers(np.array([row]))[0]
        return f"{self.place}, row {number}" if self._csv is None else f"{self.place}, Row #{number + 2}"

    def numbers(self, rows: Rows) -> Rows:
        """Return the numbers that rows have in the file."""
        return rows if self.chosen is None else self.chosen[rows]

    def arrays(self, forms: ColumnForms) -> dict[str, Array | _Mapped]:
        """Return the sources, without gaps."""
        if self._csv is None:
            arrays = {source: self.columns[source] for source in self.layout}
            return {source: self._scaled(source, [source], values, forms) for source, values in arrays.items()}
        arrays = {name: self._filled(name, forms) for name in self.columns}
        return {
            source: self._scaled(source, [named], arrays[named], forms)
            if isinstance(named, str)
            else self._scaled(source, named, np.stack([arrays[name].astype(float) for name in named], axis=1), forms)
            for source, named in self.layout.items()
        }

    def _scaled(self, source: str, names: Sequence[str], values: Any, forms: ColumnForms) -> Array | _Mapped:
        """Return a source as `normalize` says; without this, numbers of CSV files are float32."""
        by = forms.normalize.get(source)
        if by is not None:
            if values.dtype.kind not in "iuf" or values.ndim not in (1, 2):
                what = f"{values.dtype} of shape {values.shape}"
                raise ArgumentError(f"normalize.{source}", f"it is {what}, not one number or several for each row")
            if source not in forms.scales:
                forms.scales[source] = scale_of(by, _columns(names, values), self.place)
        scale = _scale(source, self.layout, forms)
        if scale is not None:
            refuse = partial(self._refusal, source)
            if isinstance(values, _Mapped):
                values.scale(partial(scaled, scale=scale, refuse=refuse))
                return values
            values = scaled(values, scale, refuse)
        is_wide = self._csv is not None and values.dtype == np.float64
        return values.astype(np.float32) if is_wide else values  # type: ignore[no-any-return]

    def _refusal(self, source: str, row: int, what: str) -> ArgumentError:
        return ArgumentError(f"normalize.{source}", f"{self.where(row)}: {what}")

    def _filled(self, name: str, forms: ColumnForms) -> Array:
        """Return a column of a CSV file without gaps: texts if it has categories, else numbers."""
        from emrun.datasets._arrow import formed, learn_fill

        argument = self._csv.argument if self._csv is not None else ""
        if name in forms.future and not self.may_lack:
            self._check_target(name)
        learn_fill(forms, name, self.columns[name], self.place)
        column = formed(forms, name, self.columns[name])
        if column.null_count:
            advice = f"fill it by `fill: {{{name}: VALUE}}`, or leave the column out by `columns`"
            row = self.numbers(np.array([column.is_null().index(True).as_py()]))[0] + 2  # the header is row 1
            raise ArgumentError(argument, f"{self.place}: column {name!r}: Row #{row} is empty; {advice}")
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
            raise ArgumentError(argument, what) from error

    def _check_target(self, name: str) -> None:
        """Check that a column of `window.future_of` has no gaps, which `fill` would fill."""
        values = self.columns[name].to_numpy()
        gaps = np.isnan(values.astype(np.float64))
        if gaps.any():
            what = f"{self.where(int(np.argmax(gaps)))}: column {name!r} is a target and has a gap"
            raise ArgumentError("window.future_of", f"{what}; write the value, or begin the file after the gap")


class _Sources(Part):
    """The sources of one stream.

    Args:
        argument: the argument with the files.
        rows: the rows.
        forms: how gaps and categories are read.
        dtypes: source -> its dtype in all streams so far, which is changed.
    """

    def __init__(self, argument: str, rows: _Rows, forms: ColumnForms, dtypes: dict[str, np.dtype[Any]]) -> None:
        self._rows = rows
        self._count = len(rows)
        self._forms = forms
        self._dtypes = dtypes
        self._sources = rows.arrays(forms)
        rows.drop()
        self._texts: dict[str, list[str]] = {}  # source -> the categories of this stream, whose indices the source has
        own = {column: source for source, column in rows.layout.items() if isinstance(column, str)}
        for column in forms.categories:
            if column in own:
                self._number(own[column])
        self._check(argument, rows)

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
        return self._count

    def read(self, rows: Rows, ctx: StreamContext) -> dict[str, Any]:
        """Return the batch of these rows."""
        batch: dict[str, Any] = self.arrays(rows, ctx)
        ids = self.ids(rows)
        return batch if ids is None else {**batch, ID: ids}

    def is_category(self, source: str) -> bool:
        """Return whether a source has the numbers of categories."""
        return source in self._texts

    def ids(self, rows: Rows) -> list[str] | None:
        """Return the names of rows; None if they have none."""
        names = self._rows.names()
        return None if names is None else [names[row] for row in rows.tolist()]

    def arrays(self, rows: Rows, ctx: StreamContext) -> dict[str, Array]:
        """Return the sources of these rows."""
        batch = {
            source: values[rows].astype(self._dtypes[source], copy=False) for source, values in self._sources.items()
        }
        for source, names in self._texts.items():
            batch[source] = self._forms.numbers(
                source,
                names,
                batch[source],
                f"stream {ctx.stream_name!r}: {self._rows.place}",
                self._rows.numbers(rows),
            )
        return batch

    def _check(self, argument: str, rows: _Rows) -> None:
        known = self._dtypes or dict.fromkeys(self._sources)
        if self._sources.keys() != known.keys() and not (rows.may_lack and self._sources.keys() <= known.keys()):
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
        self._chosen: Rows | None = None
        self._change: Callable[[Array], Array] | None = None
        self._values: Array | None = np.load(path, mmap_mode="r", allow_pickle=False)
        self.shape = self._values.shape
        self.ndim = self._values.ndim
        self.dtype = self._values.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def take(self, rows: Rows) -> _Mapped:
        """Return these rows of the array."""
        taken = copy.copy(self)
        taken.restrict(rows)
        return taken

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows."""
        self._chosen = rows
        self.shape = (len(rows), *self.shape[1:])

    def scale(self, change: Callable[[Array], Array]) -> None:
        """Scale what is read from now on."""
        self._change = change
        self.dtype = change(np.ones((1, *self.shape[1:]), self.dtype)).dtype

    def __getitem__(self, rows: Rows) -> Array:
        check_unchanged(self._path, self._identity, str(self._path), "it was mapped")
        if self._values is None:
            self._values = np.load(self._path, mmap_mode="r", allow_pickle=False)
        found = np.asarray(self._values[rows if self._chosen is None else self._chosen[rows]])
        return found if self._change is None else self._change(found)

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


def _scale(source: str, layout: Mapping[str, str | Sequence[str]], forms: ColumnForms) -> Json | None:
    """Return how a source is scaled; the future of windows is scaled as the source that has its columns."""
    if source == FUTURE and source not in forms.scales:
        for other, scale in forms.scales.items():
            names = _flat({other: layout.get(other, ())})
            if forms.future and set(forms.future) <= set(names):
                places = [names.index(column) for column in forms.future]
                own = {key: [scale[key][place] for place in places if scale[key]] for key in ("shift", "scale")}
                return {"by": scale["by"], **own}
    return forms.scales.get(source)


def _columns(names: Sequence[str], values: Any) -> Iterator[tuple[str, Array]]:
    """Yield the name and the numbers of each column of a source, one after the other."""
    count = 1 if values.ndim == 1 else values.shape[1]
    rows = np.arange(values.shape[0])
    for index in range(count):
        name = names[index] if len(names) == count else f"{names[0]}[{index}]"
        whole = values[rows] if isinstance(values, _Mapped) else values
        yield name, (whole if values.ndim == 1 else whole[:, index]).astype(np.float64)


def _flat(layout: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the columns of all sources."""
    return list(
        dict.fromkeys(chain.from_iterable([each] if isinstance(each, str) else each for each in layout.values()))
    )


class _Csv:
    """A CSV file.

    Args:
        argument: the argument with the file.
        path: the file.
    """

    def __init__(self, argument: str, path: Path) -> None:
        with needing("Table", "pyarrow", "data"):
            from pyarrow import csv

        self.argument = argument
        self._path = path
        options = self._options()
        with _reading(argument, path), csv.open_csv(path, *options) as file:
            names = file.schema.names
        self.header = [name.strip() for name in names]
        self._raw = dict(zip(self.header, names, strict=True))

    @staticmethod
    def _options() -> tuple[Any, Any]:
        from pyarrow import csv

        read_options = csv.ReadOptions(use_threads=False, block_size=_BLOCK)  # in one thread, errors have the row
        return read_options, csv.ParseOptions(newlines_in_values=True)

    def _read(self, names: Sequence[str], kinds: Mapping[str, Any]) -> Any:
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
        if name not in self.header:
            raise ArgumentError(argument, f"{self._path} has no column {name!r}{meant_of(name, self.header)}")
        if not name or self.header.count(name) > 1:
            what = f"{self._path}: {name!r} is the name of several columns, or no name; rename them"
            raise ArgumentError(self.argument, what)

    def texts(self, argument: str, name: str) -> list[str | None]:
        """Return a column as texts, with None for empty cells."""
        import pyarrow as pa

        self._check(argument, name)
        with _reading(self.argument, self._path):
            texts: list[str | None] = self._read([name], {name: pa.string()}).column(name).to_pylist()
        return texts

    def typed(self, needed: Sequence[str], forms: ColumnForms, own: Sequence[str]) -> dict[str, Any]:
        """Return columns; they have the types of the file that was read first, that of train.

        Args:
            needed: the columns.
            forms: their types so far.
            own: those that are a source of their own.
        """
        import pyarrow as pa

        for name in needed:
            self._check("columns", name)
        forms.types |= {name: pa.float64() for name in needed if name not in own}
        forms.types |= dict.fromkeys(forms.categories, pa.string())
        kinds = {
            name: kind for name, kind in forms.types.items() if kind != pa.int64()
        }  # a later file may have fractions
        with _reading(self.argument, self._path):
            table = self._read(needed, kinds)
            for name in needed:
                if name not in kinds and table.column(name).type not in (pa.int64(), pa.float64()):
                    is_empty = pa.types.is_null(table.column(name).type)
                    kinds[name] = forms.types.get(name, pa.float64()) if is_empty else pa.float64()
                    try:
                        table = self._read(needed, kinds)  # raises an error, unless all cells are empty
                    except pa.ArrowInvalid as error:
                        advice = "list the column in `categories`, or leave it out by `columns`"
                        message = f"{self._path}: column {name!r}: {error}; {advice}"
                        raise ArgumentError(self.argument, message) from error
        return dict(zip(needed, table.columns, strict=True))
