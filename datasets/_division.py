"""The rows of one file, divided into train, valid and test by the argument `split` of a dataset."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePath
from typing import Any, Self, TypedDict

import numpy as np

from emrun.base.arguments import check_count, check_keys, check_number
from emrun.base.errors import ArgumentError
from emrun.base.fields import SHA256, mapping_of, record, whole
from emrun.base.sources import changed
from emrun.base.types import Counts, Json, Strings, Values
from emrun.base.wording import counted, listed, meant_of
from emrun.stream_context import Array, Rows

Texts = Sequence[str | None]
"""A column as texts, with None for gaps."""
PARTS = ("train", "valid", "test")
SPLIT = record({"form": record({}), "rows": mapping_of(whole()), "sha256": SHA256})
"""What a run keeps of a division."""
_LOG = logging.getLogger(__name__)
_WAYS = ("by", "group", "time", "hash", "column", "files", "folds")
_COLUMN = str, "not the name of a column", ()
_FORMS: Mapping[str, tuple[Any, str, Strings]] = {
    "by": _COLUMN,
    "group": _COLUMN,
    "time": _COLUMN,
    "hash": _COLUMN,
    "column": (str | Mapping, "neither a column nor a mapping such as {name: part, valid: dev}", ("name", *PARTS)),
    "files": (Mapping, "not a mapping such as {valid: '*0.jpg'}", PARTS[1:]),
}
"""Key of `split` -> the kind of its value, what another value is not, and the keys of a mapping."""
_MOST_CLASSES = 20  # in a line of the log


class SplitForm(TypedDict, total=False):
    """The argument `split` in a config: the shares of the parts, and at most one way to divide the rows."""

    valid: float
    test: float
    by: str
    group: str
    time: str
    hash: str
    column: str | Mapping[str, str]
    files: Mapping[str, str | Strings]
    folds: int
    fold: int
    seed: int


class Readable:
    """The rows of files, which may be divided."""

    label = ""
    """The name of the classes that every part must have; empty if there are none."""
    place = ""
    """The files, for messages."""

    ids: Strings | None = None
    """The ids of the rows; None if they only have numbers."""
    count: int
    """The number of all rows of the files."""
    chosen: Rows | None = None
    """The numbers of the rows among all rows; None if they are all of them."""
    trains = False
    """Whether these are the rows to train on."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count if self.chosen is None else len(self.chosen)

    def files(self) -> Strings:
        """Return the file of each row."""
        return [self.place] * len(self)

    def texts(self, argument: str, name: str) -> Texts:
        """Return a column as texts, with None for gaps.

        Raises:
            ArgumentError: there is no such column.
        """
        raise ArgumentError(argument, f"the items of {self.place} have no column {name!r}; divide them by shares")

    def where(self, row: int) -> str:
        """Return the file and the number of a row, for messages."""
        return f"{self.place}, row {row}"

    def take(self, rows: Rows) -> Self:
        """Return these rows."""
        taken = copy.copy(self)
        taken.restrict(rows)
        return taken

    def restrict(self, rows: Rows) -> None:
        """Keep only these rows."""
        self.chosen = rows
        self.ids = None if self.ids is None else [self.ids[row] for row in rows.tolist()]

    def numbers(self, rows: Any) -> Any:
        """Return the number that a row, or each of several, has among all rows of the files."""
        return rows if self.chosen is None else self.chosen[rows]

    def train(self, *, learns: bool) -> None:
        """Become the rows to train on, and learn from them unless the run has done this."""
        self.trains = True

    def refusal(self, argument: str, row: int, column: str, what: str) -> ArgumentError:
        """Return the error for a value that does not fit."""
        return ArgumentError(argument, f"{self.where(row)}: column {column!r}{what}")


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of the rows.

    Args:
        rows: part -> the numbers of its rows, in their order.
        sha256: of the ids and the parts of all rows.
        classes: part -> name of a class -> its number of rows; nothing if classes do not matter.
    """

    rows: Mapping[str, Rows]
    sha256: str
    classes: Mapping[str, Counts]

    def __str__(self) -> str:
        """Return the number of rows of each part, and of each class."""
        return "; ".join(
            f"{name} {counted(len(rows), 'row')}{self._of_class(name)}" for name, rows in self.rows.items()
        )

    def _of_class(self, part: str) -> str:
        counts = self.classes.get(part, {})
        return f" ({_shown(counts)})" if 0 < len(counts) <= _MOST_CLASSES else ""


@dataclass(frozen=True)
class Split:
    """How rows are divided; the parts are those of scikit-learn with the same seed.

    Args:
        form: the argument of the dataset, with its `seed`.
        way: the key that says how, such as `group`; empty for a random part.
    """

    form: Values
    way: str

    @classmethod
    def read(cls, value: object, given: Collection[str]) -> Split:
        """Read the argument.

        Args:
            value: the argument.
            given: the parts that have files of their own.

        Raises:
            ArgumentError: it has another form, or names a part that has files of its own.
        """
        if not isinstance(value, Mapping):
            raise ArgumentError("split", f"{value!r} is not a mapping such as {{valid: 0.2}}")
        check_keys("split", value, list(SplitForm.__annotations__))
        form = {"seed": 0, **{key: each for key, each in value.items() if each is not None}}
        check_number("split.seed", form["seed"], "a whole number from 0 to 4294967295", least=0, below=2**32)
        check_count("split.seed", form["seed"])
        ways = [each for each in _WAYS if each in form]
        if len(ways) > 1:
            advice = f"keep one of them; `{ways[0]}: null` leaves out what a base or another file has set"
            raise ArgumentError(f"split.{ways[1]}", f"{listed(ways)} exclude each other; {advice}")
        found = cls(form, *ways or [""])
        found.check_shares()
        found.check_way()
        for name in found.named:
            if name in given and name != "train":
                key = f"split.{name}" if name in form else "split"
                raise ArgumentError(key, f"the rows of {name!r} have files of their own, `{name}`; keep one of the two")
        return found

    @property
    def value(self) -> Any:
        """The value of the key that says how."""
        return self.form.get(self.way)

    @property
    def shares(self) -> dict[str, float]:
        """Part -> its share; the last part of the rows first."""
        return {name: self.form[name] for name in ("test", "valid") if name in self.form}

    @property
    def column(self) -> dict[str, str]:
        """The argument `column` in its long form: `name`, and part -> value."""
        given = {"name": self.value} if isinstance(self.value, str) else self.value
        return {key: str(each) for key, each in given.items()}

    @property
    def key(self) -> str:
        """The key of the config that divides the rows, for messages."""
        return f"split.{self.way}" if self.way else "split"

    @property
    def named(self) -> list[str]:
        """The parts that must have rows."""
        own = {"folds": ["valid"], "files": self.value, "column": self.value}.get(self.way) or ()
        own = () if isinstance(own, str) else own
        return [name for name in PARTS if name in ("train", *self.shares, *own)]

    @property
    def helpers(self) -> list[str]:
        """The columns that only divide the rows, and are not a source by themselves."""
        if self.way == "column":
            return [self.column["name"]]
        return [self.value] if self.way in ("group", "time", "hash") else []

    def check_shares(self) -> None:
        """Check the shares of the parts."""
        taken = {"column": PARTS, "files": PARTS, "folds": ["valid"]}.get(self.way, ())
        for name, share in self.shares.items():
            if name in taken:
                raise ArgumentError(f"split.{name}", f"`{self.way}` says which rows are {name}; remove one of the two")
            check_number(f"split.{name}", share, "a share above 0 and below 1, such as 0.2", above=0, below=1)
        if sum(self.shares.values()) >= 1:
            raise ArgumentError("split.test", "the shares of valid and test leave nothing to train on")
        if not self.shares and not taken:
            raise ArgumentError("split", "it has no part; write a share, such as valid: 0.2")

    def check_way(self) -> None:
        """Check the key that says how the rows are divided."""
        value = self.value
        kind, what, allowed = _FORMS.get(self.way, (object, "", ()))
        lacks_name = self.way == "column" and isinstance(value, Mapping) and "name" not in value
        if not isinstance(value, kind) or value == {} or lacks_name:
            raise ArgumentError(self.key, f"{value!r} is {what}")
        if isinstance(value, Mapping) and allowed:
            check_keys(self.key, value, allowed)
        if self.way == "folds":
            check_count(self.key, value, minimum=2)
            fold = self.form.get("fold")
            if isinstance(fold, bool) or not isinstance(fold, int) or not 0 <= fold < value:
                what = f"{fold!r} is not the number of a fold, from 0 to {value - 1}"
                raise ArgumentError("split.fold", f"{what}; the rows of this fold are those of valid")
        elif "fold" in self.form:
            raise ArgumentError("split.fold", "has no effect without `folds`")

    def divide(self, rows: Readable) -> Division:
        """Divide rows into parts.

        Raises:
            ArgumentError: a part, or a class in a part, would have no rows; or a column or file does not fit.
        """
        parts = self._parts_of(rows)
        found = {name: np.flatnonzero(parts == index) for index, name in enumerate(PARTS)}
        for name in self.named:
            if not len(found[name]):
                advice = "write other shares or patterns, or give it more rows"
                what = f"no rows are left for {name}; there are {len(rows)} rows; {advice}"
                raise ArgumentError(self.key, f"{rows.place}: {what}")
        found = {name: each for name, each in found.items() if len(each)}
        digest = hashlib.sha256(parts.tobytes())
        if rows.ids is not None:
            digest.update("\0".join(rows.ids).encode(errors="surrogateescape"))
        return Division(found, digest.hexdigest(), self._classes(rows, found))

    def _classes(self, rows: Readable, found: Mapping[str, Rows]) -> dict[str, dict[str, int]]:
        """Return the classes of each part; each of them must be in all parts."""
        label = self.form.get("by", rows.label)
        if not label:
            return {}
        classes, numbers = numbered(self.key, label, rows)
        counts = {name: np.bincount(numbers[each], minlength=len(classes)) for name, each in found.items()}
        for part, each in counts.items():
            if not each.all():
                empty = int(np.argmin(each))
                own = np.flatnonzero(numbers == empty)
                first = rows.where(int(own[0]))
                size = counted(len(own), "row")
                advice = "leave out `by`" if self.way == "by" else f"write by: {label}"
                raise ArgumentError(
                    self.key,
                    f"the class {classes[empty]!r} of column {label!r} has {size}, the first in {first}, "
                    f"and none of them would be in {part}; write larger shares, or {advice}",
                )
        return {part: dict(zip(classes, each.tolist(), strict=True)) for part, each in counts.items()}

    def keep(self, division: Division, kept: Json | None, place: str) -> Json:
        """Return what a run keeps of a division; log a new one, and compare another one with that of the run.

        Args:
            division: the parts.
            kept: what the run has kept; None for a new run.
            place: the files, for messages.

        Raises:
            ArgumentError: it is not that of the run, and rows may have got into other parts.
        """
        counts = {name: len(rows) for name, rows in division.rows.items()}
        form = plain_of(self.form)
        if kept is None:
            _LOG.info("split of %s: %s", place, division)
            return {"form": form, "rows": counts, "classes": division.classes, "sha256": division.sha256}
        if kept["sha256"] != division.sha256:
            what = f"{place} has changed since the run began: the rows were {_shown(kept['rows'])}, and now are"
            what = f"{what} {_shown(counts)}"
            if self.way not in ("hash", "column", "files"):
                message = f"{what}, with other ids or in other parts; use the data of the run, or train anew"
                raise ArgumentError("split", message)
            _LOG.warning("%s; rows that were there before are in the same parts", what)
        return kept

    def _parts_of(self, rows: Readable) -> Array:
        """Return the index in `PARTS` of the part of each row."""
        if self.way == "column":
            return self._of_column(rows)
        if self.way == "files":
            return self._of_files(rows)
        if self.way == "hash":
            return self._of_hash(rows)
        numbers = np.arange(len(rows))
        draw = self._random
        if self.way == "group":
            numbers = numbered(self.key, self.value, rows)[1]
        elif self.way == "by":
            draw = partial(self._stratified, numbered(self.key, self.value, rows)[1])
        elif self.way == "time":
            draw = partial(_last, moments(self.key, self.value, rows))
        units = np.zeros(int(numbers.max(initial=-1)) + 1, np.int8)  # rows or groups
        rest = np.arange(len(units))
        for name, share in self.shares.items():
            rest, taken = draw(rest, math.ceil(share * len(units)))
            units[taken] = PARTS.index(name)
            rest = np.sort(rest) if self.way == "group" else rest
        if self.way == "folds":
            order = np.arange(len(rest))
            np.random.RandomState(self.form["seed"]).shuffle(order)
            units[rest[np.array_split(order, self.value)[self.form["fold"]]]] = PARTS.index("valid")
        parts: Array = units[numbers]
        return parts

    def _random(self, rest: Rows, count: int) -> tuple[Rows, Rows]:
        """Return what is left of some rows, and the rows that are drawn, as `ShuffleSplit` of scikit-learn does."""
        drawn = rest[np.random.RandomState(self.form["seed"]).permutation(len(rest))]
        return drawn[count:], drawn[:count]

    def _stratified(self, labels: Rows, rest: Rows, count: int) -> tuple[Rows, Rows]:
        """Return the same, with the shares of the classes, as `StratifiedShuffleSplit` of scikit-learn does."""
        random = np.random.RandomState(self.form["seed"])
        counts = np.bincount(labels[rest])
        kept = _shared(counts, len(rest) - count, random)
        taken = _shared(counts - kept, count, random)
        left = []
        drawn = []
        for label, (begin, size) in enumerate(zip(kept, taken, strict=True)):
            own = rest[labels[rest] == label]
            own = own[random.permutation(len(own))]
            left.append(own[:begin])
            drawn.append(own[begin : begin + size])
        return random.permutation(np.concatenate(left)), np.concatenate(drawn)

    def _of_hash(self, rows: Readable) -> Array:
        parts = np.zeros(len(rows), np.int8)
        for row, text in enumerate(filled(self.key, self.value, rows)):
            drawn = hashlib.sha256(f"{self.form['seed']}:{text}".encode(errors="surrogateescape"))
            number = int.from_bytes(drawn.digest()[:8]) / 2**64
            for name, share in self.shares.items():
                if 0 <= number < share:
                    parts[row] = PARTS.index(name)
                number -= share
        return parts

    def _of_column(self, rows: Readable) -> Array:
        column = self.column
        name = column["name"]
        values = {column.get(part, part): index for index, part in enumerate(PARTS)}
        texts = filled(self.key, name, rows)
        for row, text in enumerate(texts):
            if text not in values:
                what = f" has {text!r}, which names no part ({listed([*values])}){meant_of(text, values)}"
                advice = f"write for example `column: {{name: {name}, valid: {text}}}`"
                raise rows.refusal(self.key, row, name, f"{what}; {advice}")
        return np.array([values[text] for text in texts], np.int8)

    def _of_files(self, rows: Readable) -> Array:
        patterns = {name: [each] if isinstance(each, str) else list(each) for name, each in self.value.items()}
        known: dict[str, int] = {}
        for file in dict.fromkeys(rows.files()):
            ways = (file, PurePath(file).name)
            found = [
                name for name, own in patterns.items() if any(fnmatchcase(way, each) for way in ways for each in own)
            ]
            if len(found) > 1:
                raise ArgumentError(self.key, f"{file} fits the patterns of {listed(found)}")
            known[file] = PARTS.index([*found, "train"][0])
        return np.array([known[file] for file in rows.files()], np.int8)


def _shown(counts: Counts) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def check_form(split: Split | None, kept: Json | None) -> None:
    """Check that the argument is that of the run.

    Raises:
        ArgumentError: it is not.
    """
    before = kept and kept["form"]
    if before != (None if split is None else plain_of(split.form)):
        raise ArgumentError("split", f"the split of the run is {before or 'null'}; keep it, or train anew")


def plain_of(value: Any) -> Any:
    """Return files or a form as JSON has them."""
    return changed(value, lambda each: each if isinstance(each, int | float) else str(each))


def filled(argument: str, column: str, rows: Readable) -> Strings:
    """Return a column as texts.

    Raises:
        ArgumentError: it has a gap, or there is no such column.
    """
    texts = rows.texts(argument, column)
    if None in texts:
        raise rows.refusal(argument, [*texts].index(None), column, " is empty; write a value, or leave out the row")
    return texts  # type: ignore[return-value]


def numbered(argument: str, column: str, rows: Readable) -> tuple[list[str], Rows]:
    """Return the values of a column as texts, whole numbers in their order, and the number of that of each row."""
    values: Array = np.array(filled(argument, column, rows), dtype=str)
    with suppress(ValueError, OverflowError):
        wholes = values.astype(np.int64)
        values = wholes if (wholes.astype(str) == values).all() else values
    found, numbers = np.unique(values, return_inverse=True)
    return [str(each) for each in found.tolist()], np.asarray(numbers, np.int64)


def moments(argument: str, column: str, rows: Readable) -> Array:
    """Return a column of times: numbers, or dates such as 2020-01-31 and 2020-01-31 12:00:00.

    Raises:
        ArgumentError: it has a gap, or something else.
    """
    texts = np.array([each.removesuffix("Z") for each in filled(argument, column, rows)], dtype=str)
    for dtype in (np.int64, np.float64, "datetime64[us]"):
        try:
            times: Array = texts.astype(dtype)
        except (ValueError, OverflowError):
            continue
        if not (np.isnat if times.dtype.kind == "M" else np.isnan)(times).any():
            return times
    row = next((index for index, text in enumerate(texts.tolist()) if not _is_moment(text)), 0)
    what = f": {str(texts[row])!r} is neither a number nor a date such as 2020-01-31 or 2020-01-31 12:00:00"
    raise rows.refusal(argument, row, column, f"{what}; write all in one of these forms")


def _is_moment(text: str) -> bool:
    try:
        return not np.isnat(np.datetime64(text))
    except ValueError:
        return False


def _last(times: Array, rest: Rows, count: int) -> tuple[Rows, Rows]:
    """Return what is left of some rows, and the last rows; those of one time stay together."""
    own = times[rest]
    is_last = own >= np.sort(own)[-count:][:1]
    return rest[~is_last], rest[is_last]


def _shared(counts: Rows, total: int, random: np.random.RandomState) -> Rows:
    """Return how many rows of each class make up a total; what whole numbers leave goes to the largest rests."""
    exact = counts / counts.sum() * total
    found: Rows = np.floor(exact).astype(np.int64)
    missing = total - int(found.sum())
    rests = exact - found
    for rest in np.unique(rests)[::-1]:
        if not missing:
            break
        equal = np.flatnonzero(rests == rest)
        chosen = random.choice(equal, size=min(len(equal), missing), replace=False)
        found[chosen] += 1
        missing -= len(chosen)
    return found
