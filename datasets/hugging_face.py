"""Local data that Hugging Face's library `datasets` reads."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_names, check_one_of, expanded
from emrun.base.errors import ArgumentError, MissingExtra, StreamError, needing, reason_of
from emrun.base.sources import NEW
from emrun.base.types import Batch, Json, Named, Strings
from emrun.base.wording import listed
from emrun.datasets._arrow import agree, alike, has_nulls, sources_of, types_as_text, types_of, unreadable_columns
from emrun.datasets._division import Readable, SplitForm, Texts
from emrun.datasets._paths import Files, check_unchanged, files_of, identity
from emrun.datasets._prepared import Prepared
from emrun.datasets._splits import Part
from emrun.stream_context import Rows, StreamContext

_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_SPLITS = {"train": ("train",), "valid": ("valid", "validation"), "test": ("test",)}


class HuggingFace(Prepared):
    """Rows of local files, or of a folder that `save_to_disk` wrote, read by Hugging Face's library `datasets`.

        dataset:
          class: HuggingFace
          train: data/train.jsonl
          valid: data/valid.jsonl
          columns: [features, label]
          cache_dir: data/cache
          batch_size: 32

    Streams: `train`, shuffled in every training pass, and `valid` and `test` if they are given. Each column is a
    source. Numbers become an array of shape (B,) with the dtype of the column. Lists of numbers become an array of
    shape (B, k) if all lists of the batch have k entries, otherwise a list of arrays. Strings and bytes become lists.
    The classes of a `ClassLabel` have the numbers of `train` in all streams.

    The network is never used. Save a dataset of the hub to disk first:
    `datasets.load_dataset(...).save_to_disk("data/saved")`.

    Needs datasets (`pip install 'emrun[data]'`).

    Args:
        train: a path, a pattern such as `data/*.csv`, or a list of these, of files that end in csv, json, jsonl,
            parquet or arrow. Or a folder that `save_to_disk` wrote; if it has several splits, those named `train`,
            `valid` or `validation`, and `test` become the streams, unless `valid` or `test` is given.
        valid: the files or the folder for the stream `valid`, to evaluate on during the training.
        test: the files or the folder for the stream `test`, to evaluate on at the end.
        columns: the columns to read; by default all.
        cache_dir: the folder for the library's copies of the files; by default the library's own cache.
        batch_size: the number of examples in a batch.
        split: divides the rows of `train`, see `Table`; any column of the files may be named.
        balance: the column of the classes of which training passes draw the same number of rows, see `Table`.
        preparation: what the run keeps of the division, which emrun supplies.

    Raises:
        ArgumentError: a file or folder is missing or cannot be read, a column is missing, or a column has a type that
            cannot be a source, such as a date, or another type or other classes than in train.
        StreamError: a column has a null, or a file has changed since the dataset was built.
    """

    train_only = ("train", "batch_size", "balance")

    def __init__(
        self,
        train: Files,
        valid: Files | None = None,
        test: Files | None = None,
        columns: list[str] | None = None,
        cache_dir: str | None = None,
        batch_size: int = 32,
        split: SplitForm | None = None,
        balance: str | None = None,
        preparation: Json | None = None,
    ) -> None:
        if columns is not None:
            check_names("columns", columns)
        _library()
        self._columns = columns
        self._cache_dir = cache_dir
        self._kinds: Named = {}
        self._classes: dict[str, list[str]] = {}
        super().__init__({"train": train, "valid": valid, "test": test}, batch_size, split, preparation, balance)

    def _files_at(self, path: Path) -> str:
        return str(path)

    def _read(self, name: str, files: Any) -> dict[str, _Rows]:
        library = _library()
        with _offline_and_quiet(library):
            loaded = _loaded(library, name, files, self._cache_dir)
        if name == NEW:
            wanted = [column for column in self._kinds if column in loaded[NEW].column_names]
            return {NEW: _Rows(NEW, loaded[NEW], wanted, self._kinds)}
        named = self._split.named if self._split is not None and name == "train" else ()
        if more := [each for each in loaded if each in named and each != "train"]:
            raise ArgumentError("split", f"{files} has a split {listed(more)} of its own; keep one of the two")
        own = [stream for stream in loaded if stream == name or stream not in self._files]
        return {stream: _Rows(stream, loaded[stream], self._columns, self._kinds) for stream in own}

    def _complete(self, name: str, part: Any) -> Any:
        if name == "train" and not self._kept:
            self._classes = part.classes_names()
        part.number_as(name, self._classes)
        return part

    def _learnt(self) -> Json:
        return {"classes": self._classes, "types": types_as_text(self._kinds)}

    def _use(self, learnt: Json) -> None:
        self._classes = learnt["classes"]
        self._kinds |= types_of(learnt["types"])

    def classes_names(self) -> Mapping[str, Strings]:
        """Return column -> the names of its classes, for columns that the library calls `ClassLabel`."""
        return self._classes


class _Rows(Readable, Part):
    """The rows of one split; `kinds` has the types of the columns of all splits."""

    def __init__(self, argument: str, rows: Any, columns: list[str] | None, kinds: Named) -> None:
        for name in columns or ():
            check_one_of("columns", name, rows.column_names, f"{argument!r} has no column {name!r}")
        chosen = rows.select_columns(columns) if columns else rows
        if bad := unreadable_columns(chosen.features.arrow_schema):
            raise ArgumentError("columns", f"{argument!r} has columns that cannot be sources: {bad}; list others")
        self._all = rows
        self._rows = chosen.with_format("arrow")
        self.count = len(rows)
        files = [Path(file["filename"]) for file in rows.cache_files]
        self._identities = {path: identity(path) for path in files}
        self.place = ", ".join(dict.fromkeys(str(path.parent if path.suffix == ".arrow" else path) for path in files))
        self._kinds = kinds
        agree(argument, self.place, chosen.features.arrow_schema, kinds)
        self._numbers: Named = {}  # column -> the number in train of each number here

    def classes_names(self) -> dict[str, list[str]]:
        """Return column -> the names of its classes."""
        return {name: list(each.names) for name, each in self._rows.features.items() if hasattr(each, "names")}

    def texts(self, argument: str, name: str) -> Texts:
        """Return a column as texts."""
        check_one_of(argument, name, self._all.column_names, f"there is no column {name!r}")
        values = self._all.with_format(None)[name]
        return [None if each is None else str(each) for each in values]

    def number_as(self, argument: str, theirs: Mapping[str, list[str]]) -> None:
        """Give the classes the numbers that they have in train.

        Raises:
            ArgumentError: a class is not in train.
        """
        for column, own in self.classes_names().items():
            names = theirs.get(column, own)
            if unknown := [name for name in own if name not in names]:
                more = f"{self.place}: column {column!r} has classes that train does not have: {listed(unknown)}"
                raise ArgumentError(argument, f"{more} (it has {listed(names)})")
            if own != names:
                self._numbers[column] = np.array([*map(names.index, own), -1])  # -1 is a class that is not known

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows."""
        for path, before in self._identities.items():  # a memory-mapped file shows a change without any error
            check_unchanged(path, before, f"stream {ctx.stream_name!r}: {str(path)!r}")
        rows = self.numbers(rows)
        table = self._rows[rows.tolist()]
        for name in table.column_names:
            if has_nulls(table.column(name)):
                row = next((row for row in rows.tolist() if has_nulls(self._rows[[row]].column(name))), None)
                raise StreamError(
                    f"stream {ctx.stream_name!r}: column {name!r} has a null in row {row} (the first row is 0); fill "
                    "it, or leave the column out of 'columns'"
                )
        return sources_of(alike(table, self._kinds)) | {
            name: new[table[name].to_numpy()] for name, new in self._numbers.items()
        }


def _library() -> Any:
    """Import the library, and not a folder of the same name in the current directory."""
    with needing("HuggingFace", "datasets", "data"):
        found = importlib.import_module("datasets")
    if not hasattr(found, "load_from_disk"):
        raise MissingExtra("HuggingFace", "datasets", "data")
    return found


@contextmanager
def _offline_and_quiet(library: Any) -> Iterator[None]:
    """Prevent the library from using the network, and from drawing progress bars, in a `with` block."""
    hub = importlib.import_module("huggingface_hub.constants")
    with ExitStack() as stack:
        for owner, name, value in (
            (hub, "HF_HUB_OFFLINE", True),
            (library.config, "HF_HUB_OFFLINE", True),
            (library.config, "HF_DATASETS_OFFLINE", True),
            (library.config, "HF_UPDATE_DOWNLOAD_COUNTS", False),
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        if library.is_progress_bar_enabled():
            stack.callback(library.enable_progress_bars)
            library.disable_progress_bars()
        yield


def _loaded(library: Any, argument: str, value: Any, cache_dir: str | None) -> Named:
    """Return stream -> rows for the value of an argument."""
    if isinstance(value, str | Path) and expanded(value).is_dir():
        return _saved(library, argument, expanded(value))
    files = files_of(argument, value)
    formats = {_FORMATS.get(path.suffix.lower(), path.name) for path in files}
    if not formats <= set(_FORMATS.values()) or len(formats) > 1:
        allowed = listed([*_FORMATS])
        raise ArgumentError(argument, f"{listed(sorted(formats))}: all files must end in the same of {allowed}")
    names = [glob.escape(str(path.resolve())) for path in files]
    if odd := next((name for name in names if "::" in name), None):
        raise ArgumentError(argument, f"the library would read {odd!r} as an address; rename the file")
    try:
        found = library.load_dataset(
            formats.pop(), data_files={"train": names}, split="train", cache_dir=cache_dir and str(expanded(cache_dir))
        )
    except Exception as error:  # the library's own errors, and those of the libraries that it uses
        reason = str(error.__cause__ or error).strip() or "is the file empty?"
        raise ArgumentError(argument, f"{listed([str(path) for path in files])} cannot be read: {reason}") from error
    return {argument: found}


def _saved(library: Any, argument: str, folder: Path) -> Named:
    try:
        found = library.load_from_disk(str(folder.resolve()))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, IndexError):  # the library has no other words for a dataset without rows
            raise ArgumentError(argument, f"{str(folder)!r}: contains no examples") from error
        raise ArgumentError(
            argument, f"{str(folder)!r} is not a folder that save_to_disk wrote: {reason_of(error)}"
        ) from error
    if not isinstance(found, Mapping):
        return {argument: found}
    streams = {stream: next((name for name in names if name in found), None) for stream, names in _SPLITS.items()}
    if argument != "train":
        streams = {argument: streams.get(argument, next(iter(found), None) if len(found) == 1 else None)}
    if streams.get(argument) is None:
        raise ArgumentError(argument, f"{str(folder)!r} has no split {argument!r} (it has {listed([*found])})")
    return {stream: found[name] for stream, name in streams.items() if name is not None}
