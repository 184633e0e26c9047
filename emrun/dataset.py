"""The contract of datasets: objects with methods `<name>_stream` that return iterables of batches."""

from __future__ import annotations

import itertools
import math
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.errors import HookError, StreamError, reason_of
from emrun.base.preparations import named_classes
from emrun.base.sources import is_nested, parts
from emrun.base.tables import Table, width
from emrun.base.types import parameters_of, takes_path
from emrun.base.wording import counted, did_you_mean, listed
from emrun.stream_context import StreamContext

ASKS = "a batch depends on the updates before it, so it cannot be read ahead"
"""What holds for the streams of a dataset that takes the model."""
_SUFFIX = "_stream"
_NUMERIC_KINDS = "biuf"


class AbstractDataset:
    """Optional base class of datasets.

    A dataset is built with the keys of its section. If its constructor has a parameter `output_dir`, emrun also passes
    the run directory, a `pathlib.Path`, or None without a run. A dataset has one method `<name>_stream` for each
    stream. The method takes no argument or a `StreamContext`, and returns an iterable of batches.

    A method `new_stream(path)`, or `new_stream(path, context)`, reads data that a run has not seen, for `emrun predict
    --data PATH`: a path as the user gives it, without targets, and never divided. What a dataset needs to know of the
    train rows is in its `preparation`, so that the train rows need not be there.

    A parameter `preparation` of the constructor gets None in a new run. The run keeps what the attribute `preparation`
    of the dataset is then, a mapping of values that JSON has. The constructor gets it when the dataset is built again:
    on the other ranks, to resume, to evaluate and to predict. So what was learnt from the train rows stays
    as it was, and need not be read again.
    """

    fresh_batches = False
    """Whether each batch has arrays of its own, so that a batch that is read ahead need not be copied."""
    read_ahead = 0
    """How many batches a thread reads ahead if the config has neither `buffer` nor `workers`."""
    train_only: Sequence[str] = ("batch_size",)
    """The keys of the section that change the training alone, and no example that is evaluated, for `emrun compare`."""

    @property
    def num_batches(self) -> Mapping[str, int]:
        """Stream -> number of batches, for the streams whose length is known. The progress bar uses the numbers."""
        return {}

    def classes_names(self) -> Sequence[str] | Mapping[str, Sequence[str]]:
        """Return the names of the classes, in the order of their numbers, for tables and pictures of hooks.

        If several sources are labels, return a mapping, source -> the names of its classes. Return an empty list if the
        classes have no names.
        """
        return []

    def use_classes(self, names: Mapping[str, Sequence[str]]) -> None:
        """Number the classes as a run does: for a resume, an evaluation or a prediction, before anything is read.

        For a dataset that finds its classes in the train rows, which may be others by then. Where the names stay
        others than those of the run, the command ends with an error.

        Args:
            names: source -> the names of its classes when the run began, in the order of their numbers; of
                `classes_names` as a list, the source is empty.
        """

    def stream_info(self, max_batches: int = 100) -> str:
        """Return a table of all sources of all streams: dtype, shape without the batch axis (or `ragged`), range.

        For each stream that raises an error, a line below the table describes the error. The table is folded to the
        width of standard output, if that is a terminal.

        Args:
            max_batches: how many batches of each stream to read.
        """
        rows, broken = describe_sources(self, max_batches)
        return "\n".join([Table(rows, SOURCE_COLUMNS).folded(width(sys.stdout)), *(line for line, _ in broken)])


SOURCE_COLUMNS = ("stream", "source", "dtype", "shape", "range")
"""What a row of `describe_sources` has; a stream without batches has a row with the source `no batches`."""


def describe_sources(dataset: Any, max_batches: int = 100) -> tuple[list[list[str]], list[tuple[str, BaseException]]]:
    """Return a row for each source of each stream, see `SOURCE_COLUMNS`, and (line, error) of streams that raised one.

    Args:
        dataset: any object with methods `<name>_stream`.
        max_batches: how many batches of each stream to read.
    """
    rows: list[list[str]] = []
    broken: list[tuple[str, BaseException]] = []
    for name in stream_names(dataset):
        sources: dict[str, SourceInfo] = {}
        count = 0
        try:
            for batch in itertools.islice(open_stream(dataset, name, StreamContext(name, seed=0)), max_batches):
                for source, values in parts(batch):
                    sources.setdefault(source, SourceInfo()).add(values)
                count += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may also call sys.exit
            broken.append((f"stream {name!r} fails after {counted(count, 'batch', 'es')}: {_in_a_line(error)}", error))
        rows += [[name, source, *info.row()] for source, info in sources.items()] or [[name, "no batches", "", "", ""]]
    return rows, broken


def _in_a_line(error: BaseException) -> str:
    """Return the type of an error, the first line of its message, and where the error was raised."""
    first = next(iter(reason_of(error).strip().splitlines()), "")
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}{': ' if first else ''}{first} ({place.filename}:{place.lineno})"


def stream_names(dataset: Any) -> list[str]:
    """Return the names of a dataset's streams."""
    names = [name for name in dir(type(dataset)) if name.endswith(_SUFFIX) and not name.startswith("_")]
    methods = [name for name in names if callable(getattr(type(dataset), name, None))]
    streams = [name.removesuffix(_SUFFIX) for name in methods if callable(getattr(dataset, name))]  # or set to None
    return [name for name in streams if not _is_of_new_data(dataset, name)]


def _is_of_new_data(dataset: Any, name: str) -> bool:
    function = getattr(dataset, name + _SUFFIX, None)
    return callable(function) and takes_path(name, function)


def stream_function(dataset: Any, name: str, path: Path | None = None) -> Any:
    """Return the dataset's method `<name>_stream`.

    Args:
        dataset: the dataset.
        name: the name of the stream.
        path: where new data are, for the stream `new`; None for any other stream.

    Raises:
        AttributeError: the dataset has no such method.
    """
    function = getattr(dataset, name + _SUFFIX, None)
    if path is not None and callable(function) and takes_path(name, function):
        return partial(function, path)
    if path is not None:
        what = f"dataset {type(dataset).__name__} has no method new_stream(path), which reads new data"
        ways = "write the method, or predict a stream"
        if "test" in parameters_of(type(dataset)):
            ways += ", which may have the data: emrun predict RUN test 'dataset.test=...'"
        raise AttributeError(f"{what}; {ways} (its streams: {listed(stream_names(dataset))})")
    if _is_of_new_data(dataset, name):
        raise AttributeError(f"the stream {name!r} is that of new data: emrun predict RUN --data PATH -o FILE")
    if not callable(function):
        names = stream_names(dataset)
        raise AttributeError(
            f"dataset {type(dataset).__name__} has no method '{name}{_SUFFIX}'{did_you_mean(name, names)}"
            f" (its streams: {listed(names)})"
        )
    return function


def check_streams(names: Iterable[str], dataset: Any, extra: Iterable[str], owner: str, index: int) -> None:
    """Check that a dataset has the streams that a hook or a model names in an argument `streams`.

    Args:
        names: the names.
        dataset: the dataset.
        extra: the extra streams of the main loop, which may have other names, such as `train_eval`.
        owner: who names the streams, with a verb, for the message.
        index: the index of the hook, or that of the model after the last hook.

    Raises:
        HookError: there is no such stream.
    """
    there = list(dict.fromkeys([*stream_names(dataset), *extra]))
    for name in sorted(names):
        if name not in there and not _is_of_new_data(dataset, name):
            raise HookError(
                f"{owner} stream {name!r}, which the dataset does not have{did_you_mean(name, there)} "
                f"(its streams: {listed(there)})",
                index,
                (name, "streams"),
            )


def stream_lengths(dataset: Any) -> dict[str, int]:
    """Return the number of batches of each stream whose length the dataset knows, from its `num_batches`."""
    known = getattr(dataset, "num_batches", None)
    if callable(known):
        raise StreamError(f"num_batches of dataset {type(dataset).__name__} is a method; write @property above it")
    counts = known.items() if isinstance(known, Mapping) else ()
    return {str(name): int(count) for name, count in counts if count is not None and math.isfinite(count)}


def classes_of(dataset: Any, source: str) -> list[str] | None:
    """Return the names of the classes of a source with labels, from the dataset's `classes_names`; None if it has none.

    Args:
        dataset: any object; `classes_names` may be a method, as in `AbstractDataset`, or an attribute.
        source: the name of the source. If the dataset has one list of names, it is that of all sources.

    Raises:
        HookError: the names are not a list of different strings.
    """
    names = named_classes(dataset)
    names = names.get(source) if isinstance(names, Mapping) else names
    if names is None or (isinstance(names, list | tuple) and not names):
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise HookError(f"classes_names of dataset {type(dataset).__name__}: {names!r:.80} is not a list of names")
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise HookError(f"classes_names of dataset {type(dataset).__name__} has the name {twice!r} twice")
    return [str(name) for name in names]


def takes_context(function: Any) -> bool:
    """Return whether a stream function takes a `StreamContext`."""
    parameters = parameters_of(function).values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def asks_model(dataset: Any) -> bool:
    """Return whether the constructor of a dataset takes the model, so that its batches depend on the updates."""
    return "model" in parameters_of(type(dataset))


def open_stream(dataset: Any, name: str, context: StreamContext) -> Any:
    """Begin a pass over a stream: call the stream function, with the context if the function takes one."""
    function = stream_function(dataset, name)
    return function(context) if takes_context(function) else function()


class SourceInfo:
    """Dtype, shape and range of one source, or of one output of a model, collected over batches."""

    def __init__(self) -> None:
        self.is_scalar = False
        self.has_gaps = False  # values that are not finite
        self.dtypes: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()
        self.ragged = False
        self.low = np.inf
        self.high = -np.inf

    def add(self, values: Any) -> None:
        """Add the values of a batch."""
        is_list = isinstance(values, list | tuple) and bool(values)
        if is_nested(values) or (is_list and all(hasattr(each, "shape") for each in values)):
            self.ragged = self.ragged or not is_list
            rows = values if is_list else values.unbind()
            for each in rows:
                self.add(each[None])
            return
        if is_list and not isinstance(values[0], str | int | float | list | tuple):  # such as graphs
            self.dtypes.add(f"list of {type(values[0]).__name__}")
            self.shapes.add(())
            return
        dtype = getattr(values, "dtype", None)
        if hasattr(values, "detach"):  # a tensor: NumPy cannot read one with a gradient, on a GPU or in bfloat16
            values = values.detach().cpu().to_dense()
            values = values.double() if values.is_floating_point() else values
        try:
            array = np.asarray(values)
        except ValueError:  # rows of different lengths
            self.ragged = True
            self.dtypes.add(type(values[0]).__name__)
            return
        self.dtypes.add(str(dtype or array.dtype))
        self.is_scalar = array.ndim == 0
        self.shapes.add(array.shape[1:])
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            self.has_gaps = True
            array = array[np.isfinite(array)]
        if array.dtype.kind in _NUMERIC_KINDS and array.size:
            self.low = min(self.low, float(array.min()))
            self.high = max(self.high, float(array.max()))

    def row(self) -> list[str]:
        """Return dtype, shape without the batch axis, and range."""
        ragged = self.ragged or len(self.shapes) > 1
        shape = "ragged" if ragged else str(next(iter(self.shapes), ()))
        span = f"{self.low:g} to {self.high:g}" if self.low <= self.high else ""
        found = [span, "not finite" if self.has_gaps else ""]
        return [", ".join(sorted(self.dtypes)), shape, ", ".join(filter(None, found))]
