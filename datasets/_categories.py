"""Columns with gaps, which a value fills, of categories such as cities, which become numbers, and of scaled numbers."""

from __future__ import annotations

import json
import logging
import mmap
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from emrun.base.arguments import check_choice, check_keys, check_names, check_one_of
from emrun.base.errors import ArgumentError
from emrun.base.types import Json, Named, Strings, Values
from emrun.base.wording import counted, listed
from emrun.datasets._statistics import FillBy, Normalize
from emrun.stream_context import Rows

if TYPE_CHECKING:
    from emrun.datasets._division import Readable

_MOST_TOLD = 10  # categories that no train row has
_STATISTICS = {"median": "the median", "most_frequent": "the most frequent value"}
_LOG = logging.getLogger(__name__)
Columns = Sequence[str | Sequence[str]]
"""Names of columns; a list among them stands for its entries, so that a config can join lists."""


class ColumnForms:
    """The arguments `fill`, `categories` and `normalize` of a dataset, and what the train rows tell.

    The categories of the train rows have the numbers 0, 1, ... in their order, all others the next number.

    Args:
        fill: column -> the value that fills its gaps, or `{by: STATISTIC}`; None for no column.
        categories: the columns of categories, in lists or not; None for none.
        normalize: source -> how its numbers are scaled; None for no source.
        future: the columns that windows tell.

    Raises:
        ArgumentError: an argument has another form.
    """

    def __init__(
        self,
        fill: Values | None,
        categories: Columns | None,
        normalize: Mapping[str, Normalize] | None = None,
        future: Strings = (),
    ) -> None:
        named: Any = categories or []
        if isinstance(named, list | tuple):
            lists = [each if isinstance(each, list | tuple) else [each] for each in named]
            named = list(chain.from_iterable(lists))
        check_names("categories", named)
        given = dict(fill or {})
        self.fill_by = {name: each.get("by") for name, each in given.items() if isinstance(each, Mapping)}
        """Column -> the statistic of the train rows that fills its gaps."""
        self.fill = {name: each for name, each in given.items() if name not in self.fill_by}
        """Column -> the value that fills its gaps, as far as it is known."""
        for name in self.fill_by:
            check_keys(f"fill.{name}", given[name], ["by"])
            check_choice(f"fill.{name}.by", self.fill_by[name], FillBy)
        self.future = tuple(future)
        self.normalize = dict(normalize or {})
        for name, each in self.normalize.items():
            check_choice(f"normalize.{name}", each, Normalize)
        self.scales: dict[str, Json] = {}
        """Source -> how it is scaled, once it is known."""
        self.categories: tuple[str, ...] = tuple(dict.fromkeys(named))
        self.types: Named = {}
        """Column -> the type of Arrow that it is read as, once it is known."""
        self.names: dict[str, list[str]] = {}
        """Source, or column of a source of several -> the names of its categories, in the order of their numbers."""
        self._told: Any = mmap.mmap(-1, max(1, len(self.categories)))  # a flag for each, which workers share

    def __getstate__(self) -> Named:
        return {**self.__dict__, "_told": bytearray(self._told)}

    def way_to_fill(self, name: str, *, is_new: bool) -> str:
        """Return what to do about a gap in a column.

        Args:
            name: the column.
            is_new: whether the gap is in data that a run has not seen, where its model needs the column.
        """
        if not is_new:
            return f"fill it by `fill: {{{name}: VALUE}}`, or leave the column out by `columns`"
        by = {column: {"by": each} for column, each in self.fill_by.items()}
        filled = {**self.fill, **by, name: "?" if name in self.categories else 0}
        override = shlex.quote(f"dataset.fill={json.dumps(filled)}")
        return f"write a value into the file, or choose one in the command: {override}"

    @property
    def learns(self) -> bool:
        """Whether there are statistics of the train rows."""
        return bool(self.fill_by or self.normalize)

    def check(self, there: Strings, alone: Strings, sources: Iterable[str]) -> None:
        """Check the names of the columns.

        Args:
            there: the columns that are read.
            alone: those that are a source of their own, or are in a list of categories.
            sources: the sources.

        Raises:
            ArgumentError: a column is not one of them, or a column of categories is several sources.
        """
        for name in (*self.fill, *self.fill_by):
            check_one_of(f"fill.{name}", name, there, f"{name!r} is not a column that is read")
        for name in self.normalize:
            check_one_of(f"normalize.{name}", name, sources, f"{name!r} is not a source")
            if name in self.categories:
                raise ArgumentError(f"normalize.{name}", "categories are numbers that have no scale; list it once")
        for name in self.categories:
            check_one_of("categories", name, alone, f"{name!r} is not a source of its own")
            if alone.count(name) > 1:
                what = f"{name!r} is several sources, whose numbers would be the same; keep one"
                raise ArgumentError("categories", what)

    def learn(self, source: str, names: Iterable[str]) -> None:
        """Number the categories of the train rows, unless they have numbers; whole numbers are in their order."""
        self.names.setdefault(source, sorted(set(names), key=in_order))

    def restore(self, learnt: Json) -> None:
        """Take what `learnt` has returned for the train rows of a run."""
        for key, own, kept in (("fill", self.fill_by, learnt["fill"]), ("normalize", self.normalize, learnt["scales"])):
            before = {name: each["by"] for name, each in kept.items()}
            if own != before:
                raise ArgumentError(key, f"the statistics of the run are {before}; keep them, or train anew")
        self.names |= learnt["categories"]
        self.fill |= {name: each["value"] for name, each in learnt["fill"].items()}
        self.scales |= learnt["scales"]

    @property
    def learnt(self) -> Json:
        """What was learnt from the train rows."""
        fill = {name: {"by": by, "value": self.fill[name]} for name, by in self.fill_by.items()}
        return {"categories": self.names, "fill": fill, "scales": self.scales}

    def use(self, known: Mapping[str, Strings]) -> None:
        """Take the names that a run has recorded instead of those of the train rows."""
        self.names |= {source: list(names) for source, names in known.items() if source in self.names}

    def tell_unknown(self, source: str, column: Any, rows: Readable) -> None:
        """Log how many rows of new data have categories that no train row has; then `numbers` does not."""
        self._told[list(self.names).index(source)] = 1
        with suppress(ArgumentError):  # the column is a target, which may be missing
            texts = rows.texts("categories", column)
            counts = Counter(each for each in texts if each not in (*self.names[source], None))
            if counts:
                first = rows.where(next(row for row, each in enumerate(texts) if each in counts))
                most = listed([f"{name!r} {count}" for name, count in counts.most_common(_MOST_TOLD)])
                count = counted(counts.total(), "row")
                message = "%s: column %r: %s with categories that no train row has (%s), which get the number %d"
                _LOG.warning(message, first, column, count, most, len(self.names[source]))

    def tell_filled(self, name: str, gaps: int, count: int, where: str) -> None:
        """Log that most rows of a column of new data are filled by a statistic, or all of them by any value.

        Args:
            name: the column.
            gaps: how many rows are filled.
            count: the number of all rows.
            where: the file.
        """
        by = self.fill_by.get(name)
        if gaps and (gaps == count or (by is not None and 2 * gaps > count)):
            value = f"{self.fill[name]!r}" + ("" if by is None else f", {_STATISTICS[by]} of the train rows")
            message = "%s: column %r: %d of %s are filled with %s; write the values, if they are known"
            _LOG.warning(message, where, name, gaps, counted(count, "row"), value)

    def numbers(
        self, source: str, names: Strings, indices: Rows, where: str, rows: Rows | None = None, first: int = 0
    ) -> Rows:
        """Return the numbers of the categories of some rows; the first of a source that no train row has is logged.

        Args:
            source: the source.
            names: names of categories.
            indices: for each row, the index of its category in `names`.
            where: the stream and the file, for the message.
            rows: the indices of the rows in the file; None if they are all of its rows.
            first: the number of the first category.
        """
        known = {name: number for number, name in enumerate(self.names[source])}
        numbers = np.array([known.get(name, len(known)) for name in names], np.int64)[indices]
        place = list(self.names).index(source)
        if len(known) in numbers and not self._told[place]:
            self._told[place] = 1
            index = int(np.argmax(numbers == len(known)))
            row = index if rows is None else rows[index]
            name = names[indices[index]]
            once = {"once": f"category of {source}"}
            message = "%s, row %d: column %r has %r, which no train row has; all such categories get the number %d"
            _LOG.warning(message, where, row, source, name, first + len(known), extra=once)
        return numbers + first


def in_order(name: str) -> tuple[bool, int, str]:
    """Return the key by which names of classes are sorted: whole numbers in their order, then texts."""
    is_whole = name.removeprefix("-").isdecimal()
    return not is_whole, int(name) if is_whole else 0, name
