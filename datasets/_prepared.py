"""The base of datasets whose files may be divided by `split`, and which a run need not read again to know its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.fields import TEXT, mapping_of, optional, record, whole
from emrun.base.preparations import BINDS, named_classes
from emrun.base.sources import NEW
from emrun.base.types import Batch, Counts, Json, Strings, Values
from emrun.datasets._categories import ColumnForms
from emrun.datasets._division import SPLIT, Readable, Split, Texts, check_form, numbered, plain_of
from emrun.datasets._splits import Part, Splits
from emrun.stream_context import Rows, StreamContext

_COUNTS = mapping_of(whole())
_KEPT = record({"class": TEXT, "files": record({}), "rows": _COUNTS, "split": optional(SPLIT), "learnt": record({})})


def evenly(labels: Rows, blocks: Sequence[int] | None, random: Generator) -> Rows:
    """Return as many rows as there are labels, the same number of each class, in random order.

    Args:
        labels: the number of the class of each row.
        blocks: the lengths of parts of the rows, which are read one after the other, each once; None for none.
        random: the generator.
    """
    classes = np.unique(labels)
    count = len(classes)
    sizes = np.full(count, len(labels) // count)
    sizes[random.permutation(count)[: len(labels) % count]] += 1
    drawn = []
    for label, size in zip(classes, sizes.tolist(), strict=True):
        own = np.flatnonzero(labels == label)
        passes = [random.permutation(own) for _ in range(-(-size // len(own)))]
        drawn.append(np.concatenate(passes)[:size])
    order = random.permutation(np.concatenate(drawn))
    if blocks is None:
        return order
    places = random.permutation(len(blocks))[np.searchsorted(np.cumsum(blocks), order, side="right")]
    return order[np.argsort(places, kind="stable")]


@contextmanager
def _opening() -> Iterator[None]:
    """Let the block read the files of a stream; what is wrong with them is an error of its first batch."""
    try:
        yield
    except ArgumentError as error:
        key = "" if error.argument == NEW else f"dataset.{error.argument}: "
        raise StreamError(f"{key}{error.message}", first_batch=True) from error


class Prepared(Splits):
    """Streams of files, which are opened when the dataset is built, or with a preparation at their first use.

    A derived class sets what `_read` needs, then calls this constructor.

    Args:
        files: `train`, and perhaps `valid` and `test` -> its files; None for no such stream.
        batch_size: the number of examples in a batch.
        split: how the rows of `train` are divided; None for not at all.
        preparation: what the run keeps of the data; None for a new run.
        balance: the column of the classes that training passes draw evenly; None to read each row once.

    Raises:
        ArgumentError: an argument has a value that is not allowed, the files cannot be read or divided, or the
            preparation is that of another dataset.
    """

    _label = ""
    """The column with the classes of all rows; empty if there are none."""

    def __init__(
        self,
        files: Values,
        batch_size: int,
        split: Any = None,
        preparation: Json | None = None,
        balance: str | None = None,
    ) -> None:
        check_count("batch_size", batch_size, minimum=1)
        self._files = {name: each for name, each in files.items() if each is not None}
        self._split = None if split is None else Split.read(split, self._files if preparation is None else ())
        self._helpers: Strings = [] if self._split is None else self._split.helpers
        self._balance = balance
        self._labels: Rows | None = None  # the class of each row of train, if they are drawn evenly
        self._opened: dict[str, Part] = {}
        self._new: Path | None = None  # the data of the stream `new`, once they are read
        self._kept: Json = preparation or {}
        self._division: Json = {}
        self._groups: set[str | None] = set()  # of the divided rows
        if preparation is None:
            for name in self._files:
                self._opened |= self._loaded(name)
        else:
            self._check_kept()
            self._use(preparation["learnt"])
        divided = [name for name in self._kept.get("rows", ()) if name not in self._kept["files"]]
        super().__init__(self._opened, batch_size, [*self._files, *divided, *self._opened])

    @property
    def preparation(self) -> Json | None:
        """What the run keeps of the data: the streams, their rows, and what was learnt from the train rows."""
        return self._kept or {
            "class": type(self).__name__,
            BINDS: bool(self._split or self._learns),
            "files": plain_of(self._files),
            "rows": self.lengths(),
            "split": self._division or None,
            "learnt": self._learnt(),
        }

    def new_stream(self, path: Path, ctx: StreamContext) -> Iterator[Batch]:
        """Return the batches of data that the run has not seen; their targets may be missing."""
        with _opening():
            if self._new != path:
                self._opened[NEW] = self._complete(NEW, self._read_new(path))
                self._new = path
            part = self._of_pass(self._opened[NEW], ctx)
            if not len(part):
                raise ArgumentError(NEW, f"{path} contains no examples")
        return self._batches(part, ctx, shuffle=False)

    def lengths(self) -> Counts:
        """Return stream -> number of its rows, if its files are those of the run."""
        is_same = self._kept.get("files") == plain_of(self._files)
        return {**(self._kept["rows"] if is_same else {}), **super().lengths()}

    def class_counts(self, source: str) -> list[int] | None:
        """Return the number of train rows of each class of a source, if `split` has counted them; otherwise None."""
        split = (self.preparation or {}).get("split")
        if split is None or self._column_of(source) != split["form"].get("by", self._label):
            return None
        names = named_classes(self)
        names = names.get(source, ()) if isinstance(names, Mapping) else names
        counts = {
            names.index(name) if name in names else int(name): count
            for name, count in split["classes"]["train"].items()
        }
        return [counts.get(number, 0) for number in range(max(counts) + 1)]

    def _column_of(self, source: str) -> object:
        """Return the column, or the columns, that a source is made of."""
        return source

    def _read(self, name: str, files: Any) -> Values:
        """Return stream -> its rows, for the files of an argument."""
        raise NotImplementedError

    def _read_new(self, path: Path) -> Any:
        """Return the rows of new data, perhaps without targets."""
        rows = self._read(NEW, self._files_at(path))[NEW]
        self._warn_of(rows)
        return rows

    def _warn_of(self, rows: Any) -> None:
        """Warn of what is in new data, but not in the train rows."""

    def _files_at(self, path: Path) -> Any:
        """Return the files of new data as an argument has them."""
        return path

    def _complete(self, name: str, part: Any) -> Any:
        """Return the rows of a stream as they are read in batches, its `Part`; those of train come first."""
        if name == "train":
            part.train(learns=not self._kept)
        return part

    @property
    def _learns(self) -> bool:
        """Whether the train rows tell more than the split."""
        return False

    def _learnt(self) -> Json:
        """Return what was learnt from the train rows."""
        return {}

    def _use(self, learnt: Json) -> None:
        """Take what was learnt from the train rows."""

    def _check_kept(self) -> None:
        kept = self._kept
        _KEPT.check(kept, "preparation.json")
        if kept["class"] != type(self).__name__:
            what = f"the run has learnt from the train rows of {kept['class']}, which {type(self).__name__} cannot use"
            raise ArgumentError("class", f"{what}; keep the class of the dataset, or train anew")
        check_form(self._split, kept["split"])

    def _loaded(self, name: str) -> Iterator[tuple[str, Part]]:
        """Read the files of a stream; yield each stream that they have, train first."""
        source = name if name in self._files else "train"
        found = dict(self._read(source, self._files[source]))
        for stream, rows in found.items():
            if not len(rows):
                raise ArgumentError(stream, f"{rows.place}: contains no examples")
        group = None if self._split is None or self._kept else self._split.form.get("group")
        if source == "train" and self._balance is not None:
            self._labels = numbered("balance", self._balance, found["train"])[1]
        if source == "train" and self._split is not None:
            whole = found["train"]
            division = self._split.divide(whole)
            if group is not None:
                self._groups = set(whole.texts("split.group", group))
            self._division = self._split.keep(division, self._kept.get("split"), whole.place)
            if self._labels is not None:
                self._labels = self._labels[division.rows["train"]]
            own = [part for part in division.rows if part == "train" or part not in self._files]
            found |= {part: whole.take(division.rows[part]) for part in own}
        elif group is not None:
            self._check_groups(group, found[name])
        for stream, part in found.items():
            yield stream, self._complete(stream, part)

    def _check_groups(self, column: str, rows: Readable) -> None:
        """Check that the groups of other files are not those of the divided rows; files may lack the column."""
        groups: Texts = ()
        with suppress(ArgumentError):
            groups = rows.texts("split.group", column)
        row = next((row for row, group in enumerate(groups) if group in self._groups), None)
        if row is not None:
            what = f"{rows.where(row)}: {groups[row]!r} of column {column!r} is in the rows of train too"
            raise ArgumentError("split.group", f"{what}; leave the group out of one of the two files")

    def _part(self, name: str) -> Part:
        if name not in self._opened:
            self._opened |= self._loaded(name)
        return self._opened[name]

    def _open(self, name: str, ctx: StreamContext) -> Iterable[Batch]:
        with _opening():
            part = self._of_pass(self._part(name), ctx)
        trains = name == "train" and ctx.epoch > 0
        if trains and self._labels is not None and not ctx.in_order:
            return self._drawn(part, evenly(self._labels, part.blocks, ctx.rng), ctx)
        return self._batches(part, ctx, shuffle=trains)

    def _drawn(self, part: Part, order: Rows, ctx: StreamContext) -> Iterator[Batch]:
        for places in ctx.batches(len(order), self._batch_size):
            yield part.read(order[places], ctx)

    def _of_pass(self, part: Part, ctx: StreamContext) -> Part:
        """Return the examples of a pass over a stream."""
        return part


class PreparedColumns(Prepared):
    """Streams of rows with columns, which `forms` fills, numbers and scales; the other arguments are those above."""

    unnamed_classes = 1
    """How many classes have no name: that of unknown categories."""

    def __init__(self, forms: ColumnForms, files: Values, batch_size: int, *prepared: Any) -> None:
        self._forms = forms
        super().__init__(files, batch_size, *prepared)

    def _warn_of(self, rows: Any) -> None:
        for source in self._forms.names:
            self._forms.tell_unknown(source, self._column_of(source), rows)
        for name in self._forms.fill:
            self._forms.tell_filled(name, rows.gaps(name), len(rows), rows.place)

    @property
    def _learns(self) -> bool:
        return self._forms.learns

    def scale_of(self, source: str) -> Json | None:
        """Return how a source is scaled, for `units` of a model; None if it is not."""
        return self._forms.scales.get(source)

    def classes_names(self) -> Mapping[str, Strings]:
        """Return source of `categories` -> the names of its categories."""
        return self._forms.names

    def use_classes(self, names: Mapping[str, Strings]) -> None:
        """Number the categories as a run does."""
        self._forms.use(names)
