"""What is in a folder of pictures or a file of rows for which there is no config yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.errors import ArgumentError, UsageError, needing, reason_of
from emrun.base.separators import wrong_separator
from emrun.base.types import Counts, Named, Strings
from emrun.base.wording import counted, did_you_mean, few, listed
from emrun.config.import_finder import locate

PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
"""The endings of the names of pictures."""
LINES = (".jsonl", ".ndjson", ".json")
"""The endings of the names of files of JSON."""
_ROWS = (".csv", ".parquet", *LINES)
_MESSAGES = ("messages", "conversations", "conversation")
_PARTS = {"train": ("train",), "valid": ("valid", "val", "validation"), "test": ("test",)}
_IMAGES = ("images", "image", "imgs", "img", "pictures")
_MASKS = ("masks", "mask", "annotations", "segmentations")
_MOST_OPENED = 500  # pictures whose sizes are read
_TARGETS = ("target", "label", "class", "y")
_MOST_CLASSES = 20  # of whole numbers, which otherwise are a target to regress
_MOST_CATEGORIES = 100  # of texts, which otherwise are free texts
_NAMES_ROWS = re.compile(r"(?i)(.*[^a-z])?(id|index|key|nr|no|number)")


@dataclass
class Pictures:
    """Pictures of classes, or with masks.

    Args:
        root: the folder.
        parts: `train`, and perhaps `valid` and `test` -> its folder; only `train` if the pictures are not divided.
        classes: class -> number of train pictures; nothing with masks.
        masks: the folder of the masks; None with classes.
    """

    root: Path
    parts: dict[str, Path]
    classes: Counts = field(default_factory=dict)
    masks: Path | None = None
    values: set[int] = field(default_factory=set)
    """The values of the pixels of masks, of those that were opened."""
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Height and width -> number of pictures, of those that were opened."""
    is_grey: bool = False


@dataclass
class Column:
    """A column of a file of rows.

    Args:
        name: the name.
        kind: `whole`, `number`, `text`, `flag`, `date`, `empty` or `other`.
        gaps: the number of cells without a value.
        first_gap: the row of the first of them in the file, or None.
        counts: value as text -> number of rows, the most frequent first.
        is_counter: whether the values are whole numbers, each one more than that of the row before.
    """

    name: str
    kind: str
    gaps: int
    first_gap: int | None
    counts: Counts
    is_counter: bool

    def names_rows(self, rows: int) -> bool:
        """Return whether the values are ids: different in each row, and texts or whole numbers that are called so."""
        is_named = self.is_counter or _NAMES_ROWS.fullmatch(self.name) is not None
        is_id = self.kind == "text" or (self.kind == "whole" and is_named)
        return is_id and not self.gaps and len(self.counts) == rows and rows > 1


@dataclass
class Rows:
    """A file of rows."""

    path: Path
    count: int
    columns: list[Column]
    table: Any = None


@dataclass
class Talks:
    """A file of chats.

    Args:
        path: the file.
        column: the column of the messages.
        chats: the messages of each chat.
    """

    path: Path
    column: str
    chats: Sequence[Sequence[Named]]


def look(path: Path) -> Pictures | Rows | Talks:
    """Look at a path.

    Raises:
        UsageError: there is nothing to learn from; the message says what there is.
        MissingExtra: a library to read the file is not installed.
    """
    if path.is_dir():
        return _look_at_pictures(path)
    if not path.is_file():
        raise UsageError(f"there is no file or folder {path}")
    if path.suffix.lower() not in _ROWS:
        raise UsageError(f"{path} is not a .csv, .jsonl or .parquet file, nor a folder of pictures")
    if path.suffix.lower() not in LINES:
        return _look_at_rows(path)
    try:
        return _look_at_lines(path)
    except ArgumentError as error:
        raise UsageError(error.message) from error


# Pictures


def _look_at_pictures(root: Path) -> Pictures:
    folders = _folders(root)
    images = next((folders[name] for name in _IMAGES if name in folders), None)
    masks = next((folders[name] for name in _MASKS if name in folders), None)
    if images is not None and masks is not None:
        seen = Pictures(root, {"train": images}, masks=masks)
        seen.is_grey = _are_grey(seen, _pictures_in(images))
        for file in _pictures_in(masks)[:_MOST_OPENED]:
            seen.values |= _values_of(file)
        return seen
    parts = {part: folders[name] for part, names in _PARTS.items() for name in names if name in folders}
    parts = parts if "train" in parts else {"train": root}
    found = {part: _classes_in(folder) for part, folder in parts.items()}
    seen = Pictures(root, parts, {name: len(files) for name, files in found["train"].items()})
    seen.is_grey = _are_grey(seen, [file for files in found["train"].values() for file in files])
    return seen


def _classes_in(folder: Path) -> dict[str, list[Path]]:
    """Return class -> its pictures.

    Raises:
        UsageError: there are not two classes with pictures.
    """
    found = {name: _pictures_in(each) for name, each in _folders(folder).items()}
    if not any(found.values()):
        names = sorted(path.name for path in folder.iterdir())
        way = "put those of each class into a folder; for rows, name their file"
        raise UsageError(f"{folder} has no folders of pictures (it has {few(names) or 'nothing'}); {way}")
    few_of = min(found, key=lambda name: len(found[name]))
    if len(found) == 1:
        what = f"{folder} has one class, {few_of}, so that there is nothing to tell apart"
        raise UsageError(f"{what}; put the pictures of each class into a folder of their own")
    if len(found[few_of]) < 2:
        what = f"{folder / few_of} has {counted(len(found[few_of]), 'picture')}"
        raise UsageError(f"{what}; a class needs one to train on and one to evaluate on")
    return found


def _are_grey(seen: Pictures, files: list[Path]) -> bool:
    """Read the headers of some pictures, evenly spread, count their sizes, and return whether all are grey.

    Raises:
        UsageError: one cannot be read.
    """
    with needing("a look at pictures", "Pillow", "data"):
        from PIL import Image
    modes = set()
    for file in files[:: -(-len(files) // _MOST_OPENED)]:
        try:
            with Image.open(file) as image:
                seen.sizes[image.height, image.width] += 1
                modes.add(image.mode)
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {reason_of(error)}") from error
    return modes <= {"L", "1"}


def _values_of(file: Path) -> set[int]:
    """Return the values of the pixels of a mask.

    Raises:
        UsageError: the values are no classes.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            values = np.unique(np.asarray(image))
            is_mask = image.mode in ("L", "P", "1")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from error
    if not is_mask or (255 in values and len(values) == 2 and 0 in values):
        what = "is a picture in colours" if not is_mask else "has the values 0 and 255"
        raise UsageError(f"{file} {what}; write masks whose pixels are the numbers of classes, 0, 1, ...")
    return set(values.astype(int).tolist())


def _folders(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _pictures_in(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


# Rows


def _look_at_lines(path: Path) -> Rows | Talks:
    rows = locate("emrun.datasets._records.Records")("--data", [path])
    column = next((name for name in _MESSAGES if name in rows.names), None)
    if column is None:
        return _look_at_rows(path, rows)
    return Talks(path, column, locate("emrun.datasets.chats.chats_in")(rows, column))


def _look_at_rows(path: Path, lines: Any = None) -> Rows:
    with needing("a look at rows", "pyarrow", "data"):
        import pyarrow as pa
    try:
        if lines is None:
            table = _read(path)
        else:
            table = pa.table({name: _array(lines, name) for name in lines.names})
    except UsageError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason_of(error)}") from error
    _check_encoding(path, table)
    names = [name.strip() for name in table.column_names]
    if twice := next((name for name in names if not name or names.count(name) > 1), None):
        raise UsageError(f"{path}: {twice!r} is the name of several columns; rename them")
    if not table.num_rows:
        raise UsageError(f"{path} has no rows")
    table = table.rename_columns(names)
    first = 2 if path.suffix.lower() == ".csv" else 1
    columns = [_column(name, table.column(name), first) for name in names]
    return Rows(path, table.num_rows, columns, table)


def _array(lines: Any, name: str) -> Any:
    """Return a column of a file of JSON.

    Raises:
        ArgumentError: the values have different kinds; the message has the line of the first one that differs.
    """
    import pyarrow as pa

    values = lines.column("--data", name)
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        kinds = [type(value).__name__ for value in values]
        known = [kind for kind in kinds if kind != "NoneType"]
        other = next((kind for kind in known if kind != known[0]), known[0])
        what = f" is a {other}, but a {known[0]} before; write one kind of values"
        raise lines.refusal("--data", kinds.index(other), name, what) from error


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path)
    if what := wrong_separator(path):
        raise UsageError(f"{path}: {what}")
    from pyarrow import csv

    return csv.read_csv(
        path,
        csv.ReadOptions(use_threads=False, block_size=2**24),  # in one thread, errors have the row
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(null_values=[""], strings_can_be_null=True),
    )


def _check_encoding(path: Path, table: Any) -> None:
    """Check that the texts of a CSV file are UTF-8; pyarrow returns columns with others as bytes.

    Raises:
        UsageError: one is not.
    """
    from pyarrow import types

    if path.suffix.lower() != ".csv":
        return
    advice = "is not UTF-8; save the file as UTF-8"
    for place in range(table.num_columns):
        try:
            name = table.field(place).name
        except UnicodeDecodeError as error:
            shown = error.object.decode(errors="backslashreplace")
            raise UsageError(f"{path}, row 1: the name of column {place + 1}, '{shown}', {advice}") from error
        if not types.is_binary(table.field(place).type):
            continue
        for row, cell in enumerate(table.column(place).to_pylist(), start=2):
            try:
                (cell or b"").decode()
            except UnicodeDecodeError as error:
                shown = cell.decode(errors="backslashreplace")
                raise UsageError(f"{path}, row {row}: column {name!r}: '{shown:.80}' {advice}") from error


def _column(name: str, cells: Any, first: int) -> Column:
    from pyarrow import compute, types

    kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    if types.is_floating(kind):
        cells = compute.if_else(compute.is_nan(cells), None, cells)
    checks = {
        "empty": types.is_null,
        "whole": types.is_integer,
        "number": types.is_floating,
        "flag": types.is_boolean,
        "date": lambda each: types.is_date(each) or types.is_timestamp(each),
        "text": lambda each: types.is_string(each) or types.is_large_string(each),
    }
    word = next((word for word, is_so in checks.items() if is_so(kind)), "other")
    gaps = cells.null_count
    word = "empty" if gaps == len(cells) else word
    values = [] if word == "other" else map(str, cells.drop_null().to_pylist())
    is_counter = word == "whole" and not gaps and bool((np.diff(cells.to_numpy()) == 1).all())
    return Column(
        name,
        word,
        gaps,
        cells.is_null().index(True).as_py() + first if gaps else None,
        dict(Counter(values).most_common()),
        is_counter,
    )


def longest_text(rows: Rows, target: Column, least: int) -> Column | None:
    """Return the column with the longest texts, if they have so many characters at the mean."""
    means = {
        each.name: sum(len(text) * count for text, count in each.counts.items()) / rows.count
        for each in rows.columns
        if each.kind == "text" and each is not target
    }
    name = max(means, key=means.__getitem__, default="")
    return next((each for each in rows.columns if each.name == name and means[name] >= least), None)


def lengths_of(texts: Iterable[str]) -> str:
    """Return what is said of the lengths of texts, of empty ones and of those that are there twice."""
    texts = list(texts)
    sizes = sorted(map(len, texts))
    empty = sum(not text.strip() for text in texts)
    twice = len(texts) - len(set(texts))
    characters = f"characters: median {sizes[len(sizes) // 2]}, longest {sizes[-1]}"
    return f"{characters}; {empty} empty; {counted(twice, 'duplicate')}"


def target_of(rows: Rows, given: str | None) -> Column:
    """Return the column to predict: that which is given, or one that is called so, or the last one that may be it.

    Raises:
        UsageError: there is no such column, or nothing can be learnt about it.
    """
    columns = {each.name: each for each in rows.columns}
    able = [each.name for each in rows.columns if each.kind not in ("empty", "other", "date")]
    called = [name for name in able if name.lower() in _TARGETS]
    able = [name for name in able if not columns[name].names_rows(rows.count)]
    name = given or next(iter(called + able[-1:]), "")
    if name not in columns:
        near = did_you_mean(name, columns)
        there = listed([*columns])
        raise UsageError(f"{rows.path.name} has no column {name!r} to predict{near} (there is {there}); see --target")
    column = columns[name]
    what = f"column {name!r} is the target"
    if column.gaps:
        where = f"{rows.path.name}, row {column.first_gap}"
        count = counted(column.gaps, "gap")
        raise UsageError(f"{where}: {what} and has {count}, this is the first; write values, or leave the rows out")
    if column.names_rows(rows.count) or (column.kind == "date" and len(column.counts) == rows.count):
        others = listed([each for each in able if each != name])
        raise UsageError(f"{what}, but is different in each row, as a name is; choose another by --target ({others})")
    if column.kind in ("other", "date"):
        raise UsageError(f"{what}, but has neither numbers nor texts; choose another by --target")
    if len(column.counts) < 2:
        raise UsageError(f"{what}, but has the value {next(iter(column.counts))!r} only; choose another by --target")
    return column


def is_of_classes(column: Column, rows: int) -> bool:
    """Return whether a target has classes rather than numbers."""
    if column.kind == "whole":
        return len(column.counts) <= min(_MOST_CLASSES, rows // 5)
    return column.kind in ("text", "flag")


def is_category(column: Column, rows: int) -> bool:
    """Return whether a column of texts has categories rather than names or free texts."""
    return column.kind in ("text", "flag") and 1 < len(column.counts) <= max(2, min(_MOST_CATEGORIES, rows // 2))


def names_of(columns: list[Column]) -> Strings:
    """Return the names of columns."""
    return [each.name for each in columns]
