"""Save the worst or the first examples of each evaluation, with their pictures or texts."""

from __future__ import annotations

import csv
import heapq
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from emrun.base.arguments import check_choice, check_count, check_names
from emrun.base.errors import ArgumentError, needing
from emrun.base.sources import length
from emrun.base.types import Units
from emrun.base.wording import counted, from_here
from emrun.hooks._shared.aside import Aside
from emrun.hooks._shared.columns import csv_of, names_of_classes, plain
from emrun.hooks._shared.evaluations import SavesExamples, needed
from emrun.hooks._shared.examples import Examples, file_stem
from emrun.hooks._shared.figures import png
from emrun.storage.files import storing

Select = Literal["worst", "first"]
Pixels = np.ndarray[Any, Any]

_LOG = logging.getLogger(__name__)
_CHANNELS = (1, 3, 4)


class _Kept(NamedTuple):
    """An example that is kept; the smallest one is dropped first, and no two have the same rank."""

    rank: tuple[float, ...]
    id: str
    values: dict[str, Any]
    shown: Pixels | str | None


class SaveExamples(SavesExamples):
    """Saves the examples with the highest loss, or the first ones, after each evaluation of a stream.

        hooks:
          - SaveExamples: {show: image, label: label, prediction: logits, streams: [valid]}

    The folder `examples/epoch_3/valid` in the run directory has `examples.csv`, with the ids and values, and the
    pictures, such as `01_17.png` of the worst example, whose id is 17. The folder appears when it is complete; an
    evaluation that is repeated replaces it.

    Only the examples that are saved are kept in memory. A loss that is NaN is the worst; of equal losses the one that
    comes first in the stream is worse. Batches that the model is trained on are left out; to look at the examples of
    the train stream, evaluate it: `extra_streams: [train]` makes a stream `train_eval`.

    Pictures are arrays (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels. They hold uint8, floats from 0 to 1,
    or whole numbers from 0 to 255. Of other numbers, the smallest becomes black and the largest white in each picture.

    Needs Pillow (`pip install 'emrun[data]'`).

    Args:
        show: a variable with a picture or a text for each example.
        select: `worst`, the examples with the largest `by`; `first`, those that come first in the stream.
        by: the variable with a number for each example, by default `loss`; only with `select: worst`. A loss for each
            example needs `reduction: none` in `model.loss`.
        count: the number of examples.
        label: the variable with the true classes.
        prediction: the variable with class numbers, or with a number for each class, of which the largest counts.
        variables: more variables whose values are written.
        classes_names: the names of the classes, in the order of their numbers; by default those of the dataset.
        id_variable: the source with the ids; by default `id`, or else the position in the stream.
        streams: the streams; by default all that are evaluated, but the train stream in the zeroth epoch.
        every: how often examples are saved, such as `5 epochs`; a number means epochs.
        root_dir: the folder, in the run directory.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have one of `streams`, or two hooks write to one folder.
        MissingExtra: Pillow is not installed.
        StreamError: a batch lacks a variable, the variable has no value for each example, or is not a picture or text.
        StorageError: a file cannot be written.
    """

    def __init__(
        self,
        show: str | None = None,
        select: Select = "worst",
        by: str | None = None,
        count: int = 16,
        label: str | None = None,
        prediction: str | None = None,
        variables: Sequence[str] = (),
        classes_names: Sequence[str] | None = None,
        id_variable: str | None = None,
        streams: Sequence[str] | None = None,
        every: Annotated[int | str, Units(("epochs",))] = 1,
        root_dir: str = "examples",
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        check_choice("select", select, Select)
        check_count("count", count, minimum=1)
        if by is not None and select == "first":
            raise ArgumentError(
                "by", f"`select: first` does not compare examples; to write {by!r}, add it to variables"
            )
        check_names("variables", variables)
        by = (by or "loss") if select == "worst" else None
        super().__init__(
            streams, every, needed(show, by, label, prediction, *variables, id_variable), root_dir, dataset, output_dir
        )
        with needing(type(self).__name__, "pillow", "data"):
            import PIL  # noqa: F401 - the package, without its heavy parts
        self._show = show
        self._by = by
        self._most = count
        self._label = label
        self._prediction = prediction
        self._id = id_variable
        self._variables = [name for name in needed(*variables) if name not in (show, by, label, prediction)]
        self._classes = names_of_classes("classes_names", classes_names, dataset if label else None, label or "")
        self._kept: list[_Kept] = []  # the largest first

    def before_stream(self, stream_name: str) -> None:
        """Begin with no examples."""
        super().before_stream(stream_name)
        self._kept = []

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Keep the examples of a batch that belong to those that are saved."""
        if not self.looks_at(stream_name) or (self._by is None and len(self._kept) >= self._most):
            return
        examples = self.next_batch(batch_data)
        ranks = [(0.0, 0.0)] * examples.count if self._by is None else _ranks(examples, self._by)
        keys = [(*rank, -float(examples.first + row)) for row, rank in enumerate(ranks)]
        rows = heapq.nlargest(self._most, range(examples.count), key=keys.__getitem__)
        if len(self._kept) >= self._most:
            rows = [row for row in rows if keys[row] > self._kept[-1].rank]
        if rows:
            self._kept = heapq.nlargest(self._most, [*self._kept, *self._read(examples, rows, keys)])

    def after_stream(self, stream_name: str) -> None:
        """Write the folder of the evaluation.

        Raises:
            StorageError: a file cannot be written.
        """
        if not self.looks_at(stream_name) or not self._kept:
            return
        kept = self._kept
        self._kept = []
        place = self.root / f"epoch_{self._epoch}" / stream_name
        folder = Aside(place, is_folder=True)
        path = folder.begin()
        try:
            with storing(place, "write"):
                for number, example in enumerate(kept, start=1):
                    if isinstance(example.shown, np.ndarray):
                        (path / _file(number, example)).write_bytes(png(example.shown))
                (path / "examples.csv").write_bytes(self._table(kept))
            folder.finish()
        finally:
            folder.drop()
        examples = counted(len(kept), "example")
        once = {"once": f"{self.root}/{stream_name}"}
        _LOG.info("saved %s of stream %r in %s", examples, stream_name, from_here(place), extra=once)

    def _read(self, examples: Examples, rows: Sequence[int], keys: Sequence[tuple[float, ...]]) -> list[_Kept]:
        """Return some examples of a batch, as copies."""
        columns: dict[str, list[Any]] = {}
        for name in needed(self._by, self._label, self._prediction, *self._variables):
            values = plain(examples.column(name, rows))
            columns[name] = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
        for name in needed(self._label, self._prediction):
            columns[name] = [_class_of(examples, name, value) for value in columns[name]]
        ids = examples.ids(self._id, rows)
        shown = self._shown(examples, rows)
        return [
            _Kept(keys[row], ids[index], {name: values[index] for name, values in columns.items()}, shown[index])
            for index, row in enumerate(rows)
        ]

    def _shown(self, examples: Examples, rows: Sequence[int]) -> list[Pixels | str | None]:
        """Return the pictures or texts of some examples."""
        values = [None] * len(rows) if self._show is None else examples.column(self._show, rows)
        try:
            return [value if value is None or isinstance(value, str) else picture_of(value).copy() for value in values]
        except ValueError as error:
            raise examples.error(f"show: {self._show!r} is neither a picture nor a text: {error}") from error

    def _table(self, kept: Sequence[_Kept]) -> bytes:
        """Return the examples as CSV."""
        named = needed(self._label, self._prediction) if self._classes else []
        rows = []
        for number, example in enumerate(kept, start=1):
            classes = [(f"{name}_name", self._called(example.values[name])) for name in named]
            shown = (self._show, example.shown) if isinstance(example.shown, str) else ("file", _file(number, example))
            more = [shown] if self._show is not None else []
            rows.append([("rank", number), ("id", example.id), *example.values.items(), *classes, *more])
        table = [[name for name, _ in rows[0]], *([value for _, value in row] for row in rows)]
        return csv_of(table, quoting=csv.QUOTE_NONNUMERIC)

    def _called(self, number: Any) -> str:
        """Return the name of a class, or its number."""
        names = self._classes or ()
        return names[number] if isinstance(number, int) and 0 <= number < len(names) else str(number)


def _file(number: int, example: _Kept) -> str:
    """Return the name of the file of a picture."""
    return f"{number:02}_{file_stem(example.id)}.png"


def _ranks(examples: Examples, name: str) -> list[tuple[float, float]]:
    """Return how bad each example is; NaN is the worst."""
    if name in examples.batch and length(examples.batch[name]) < 0:
        advice = ""
        if name == "loss":
            advice = (
                "; for a loss of each example, set model.loss.reduction: none, or name one of several "
                "losses that have it"
            )
        raise examples.error(f"by: {name!r} has one value for the whole batch{advice}")
    column = examples.column(name)
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "biuf" or column.size != examples.count:
        has = f"the shape {column.shape}" if isinstance(column, np.ndarray) else "strings or lists"
        raise examples.error(f"by: {name!r} has {has}, not a number for each example")
    values = [float(value) for value in column.reshape(-1)]
    return [(1.0, 0.0) if math.isnan(value) else (0.0, value) for value in values]


def _class_of(examples: Examples, name: str, value: Any) -> Any:
    """Return the class of an example: a number, a string, or the index of the largest of several numbers."""
    if isinstance(value, list) and value and all(isinstance(entry, int | float) for entry in value):
        return int(np.argmax(value))
    if isinstance(value, list):
        raise examples.error(f"{name!r} is neither a class nor a number for each class")
    return int(value) if isinstance(value, bool | float) and math.isfinite(value) and value == int(value) else value


def picture_of(image: Any) -> Pixels:
    """Return an image as pixels: uint8 of shape (H, W), (H, W, 3) or (H, W, 4).

    Args:
        image: an array of shape (H, W), (C, H, W) or (H, W, C), with 1, 3 or 4 channels. uint8 stays as it is. Other
            numbers are taken as 0 to 1 if they are floats in this range, and as 0 to 255 if they are whole numbers in
            that range; otherwise the smallest becomes black and the largest white. What is not finite becomes black.

    Raises:
        ValueError: the array is not an image.
    """
    if not isinstance(image, np.ndarray) or image.dtype.kind not in "biuf" or 0 in image.shape:
        raise ValueError("not an image")
    if image.ndim == 3 and image.shape[0] in _CHANNELS:
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim != 2 and not (image.ndim == 3 and image.shape[2] in _CHANNELS):
        raise ValueError(
            f"shape {image.shape}, but an image has the shape (H, W), (C, H, W) or (H, W, C), C of 1, 3, 4"
        )
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    is_whole = image.dtype.kind in "iu"
    values = image.astype(np.float64)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 1.0)
    if low >= 0 and high <= (255 if is_whole else 1):
        low = 0.0
        high = 255.0 if is_whole else 1.0
    values = np.where(finite, values, low)
    return np.ascontiguousarray(np.rint((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8))
