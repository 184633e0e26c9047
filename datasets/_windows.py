"""Windows of a table whose rows follow each other in time: the past that a model gets, and the future it tells."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypedDict

import numpy as np

from emrun.base.arguments import check_count, check_flag, check_keys, check_names
from emrun.base.errors import ArgumentError
from emrun.base.sources import ID
from emrun.base.types import Named, Strings, Values
from emrun.base.wording import listed
from emrun.datasets._division import Readable, moments, numbered
from emrun.datasets._splits import Part
from emrun.stream_context import Array, Rows, StreamContext

FUTURE = "future"
"""The source with what follows the past."""
_MOST_APART = 1.5  # times the usual distance of two rows: months differ in length


class WindowForm(TypedDict, total=False):
    """The argument `window` in a config; `past`, `future` and `future_of` are required."""

    past: int
    future: int
    stride: int
    order: str
    group: str
    future_of: Strings
    past_across: bool


class RowSources(Protocol):
    """The sources of all rows of a file."""

    def arrays(self, rows: Rows, ctx: StreamContext) -> dict[str, Array]:
        """Return the sources of some rows."""
        ...

    def is_category(self, source: str) -> bool:
        """Return whether a source has the numbers of categories."""
        ...

    def ids(self, rows: Rows) -> list[str] | None:
        """Return the names of some rows; None if they have none."""
        ...


def check_window(form: Any) -> None:
    """Check the argument.

    Raises:
        ArgumentError: it has another form.
    """
    if not isinstance(form, Mapping):
        raise ArgumentError("window", f"{form!r} is not a mapping such as {{past: 48, future: 24, future_of: [load]}}")
    check_keys("window", form, list(WindowForm.__annotations__))
    for key in ("past", "future", "stride"):
        check_count(f"window.{key}", {"stride": 1, **form}.get(key), minimum=1)
    check_flag("window.past_across", form.get("past_across", False))
    check_names("window.future_of", form.get("future_of"))


class Windows(Part):
    """The windows of one stream.

    Args:
        form: the argument `window`.
        rows: all rows of the file.
        chosen: the numbers of the rows of the stream; None for all.
        sources: the sources of all rows.
        place: the file and the stream, for messages.

    Raises:
        ArgumentError: a column does not fit, or rows are missing in the order of time.
    """

    def __init__(self, form: Values, rows: Readable, chosen: Rows | None, sources: RowSources, place: str) -> None:
        self._form = form
        past = form["past"]
        future = form["future"]
        self._past = np.arange(past)
        self._future = np.arange(past, past + future)
        self._sources = sources
        self._place = place
        self._is_prediction = False
        # the rows of a group follow each other
        count = len(rows)
        groups = numbered("window.group", form["group"], rows)[1] if "group" in form else np.zeros(count, np.int64)
        times = moments("window.order", form["order"], rows) if "order" in form else np.arange(count)
        self._order = np.lexsort((times, groups))
        in_group = groups[self._order]
        if "order" in form:
            _check_gaps(form["order"], rows, self._order, in_group, times[self._order])
        numbers = np.arange(count)
        first = np.searchsorted(in_group, in_group)
        left = np.searchsorted(in_group, in_group, side="right") - numbers
        # a window lies in one part, but perhaps for its past
        inside = np.ones(count, bool) if chosen is None else np.isin(self._order, chosen)
        until = np.concatenate([[0], np.cumsum(inside)])
        is_start = (numbers - first) % form.get("stride", 1) == 0
        starts = np.flatnonzero(is_start & (left >= past))
        last = starts + past
        end = np.minimum(last + future, count)
        is_past = (until[last] - until[starts] == past) | form.get("past_across", False)
        is_whole = left[starts] >= past + future
        is_own = is_past & np.where(is_whole, until[end] - until[last] == future, inside[last - 1])
        self._whole = starts[is_own & is_whole]
        self._all = starts[is_own]

    def __len__(self) -> int:
        return len(self._all if self._is_prediction else self._whole)

    def check(self) -> Self:
        """Check that there are windows, and return them.

        Raises:
            ArgumentError: there are none.
        """
        if not len(self):
            size = self._form["past"]
            advice = "add the rows that come before them; the model needs as many as it was trained with"
            if not self._is_prediction:
                size += self._form["future"]
                advice = "write a smaller past or future, or larger parts"
            what = f"{self._place} has no {size} rows that follow each other with {listed(self._form['future_of'])}"
            raise ArgumentError("window", f"{what}; {advice}")
        return self

    def predicted(self) -> Self:
        """Return the past of all windows, also of those whose future is not known."""
        found = copy.copy(self)
        found.forget_future()
        return found

    def forget_future(self) -> None:
        """Have only the past from now on."""
        self._is_prediction = True

    def read(self, rows: Rows, ctx: StreamContext) -> Named:
        """Return the batch of these windows."""
        starts = (self._all if self._is_prediction else self._whole)[rows, None]
        past = self._order[starts + self._past]
        found = self._sources.arrays(past.reshape(-1), ctx)
        batch: Named = {}
        for source, values in found.items():
            width = values.shape[1:] if values.ndim > 1 or self._sources.is_category(source) else (1,)
            if source != FUTURE:
                batch[source] = values.reshape(*past.shape, *width)
        if not self._is_prediction:
            future = self._order[starts + self._future]
            batch[FUTURE] = self._sources.arrays(future.reshape(-1), ctx)[FUTURE].reshape(*future.shape, -1)
        ids = self._sources.ids(past[:, -1])
        return batch if ids is None else {**batch, ID: ids}


def _check_gaps(column: str, rows: Readable, order: Rows, groups: Rows, times: Array) -> None:
    """Check that the rows of each group are evenly apart.

    Raises:
        ArgumentError: rows are missing, or two have the same time.
    """
    apart = np.diff(times)
    is_inside = np.diff(groups) == 0
    if not is_inside.any():
        return
    usual = np.median(apart[is_inside].astype(np.float64))
    wrong = is_inside & ((apart.astype(np.float64) <= 0) | (apart.astype(np.float64) > _MOST_APART * usual))
    if wrong.any():
        place = int(np.argmax(wrong))
        step = np.array(usual).astype(apart.dtype)
        what = f"column {column!r} goes from {times[place]} to {times[place + 1]}, but rows are {step} apart"
        advice = "write the missing rows, or leave out `order` if the rows of the file follow each other"
        raise ArgumentError("window.order", f"{rows.where(int(order[place + 1]))}: {what}; {advice}")
