"""Several datasets mixed by weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_count, check_number
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.preparations import named_classes
from emrun.base.sources import NEW, POSITION
from emrun.base.types import Batch, Counts, Named, Values, takes_path
from emrun.base.wording import listed
from emrun.dataset import stream_function, stream_names, takes_context
from emrun.datasets._examples import NamedSplits
from emrun.datasets._splits import ThreeStreams, has_only
from emrun.stream_context import Rows, StreamContext
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamPosition, StreamWrapper

_Read = tuple[Batch, dict[str, str]]
_READING = Reading(on_bad_example="ignore")  # a dataset that leaves out none is read as with `error`


class Mixed(ThreeStreams):
    """Several datasets, mixed: each training batch comes from one of them, drawn by weight.

        dataset:
          class: Mixed
          datasets:
            easy: {class: emrun.datasets.Majority, n: 400}
            hard: {class: emrun.datasets.Majority, n: 1000, data_seed: 1}
          weights: {easy: 1, hard: 3}
          batches_per_epoch: 50

    Streams: `train`, with `batches_per_epoch` batches in each pass; `valid` and `test`, which read those streams of all
    datasets, one dataset after the other; and every stream of each dataset, as `<name>_<stream>` (`easy_valid`).
    Sources: those of the dataset that the batch comes from, but for the `position` of `ImageFolder` and `TarShards`.

    A dataset continues from one training pass to the next. When its own pass ends, it starts its next one. An
    evaluation of `train` reads each dataset from its first batch, in the order of evaluations. The context of a dataset
    has the stream name `<name>.<stream>`.

    A resume is exact if the passes of each dataset depend only on their context. A dataset with `num_batches` that uses
    `ctx.batches` skips the batches that were read before. Without `ctx.batches`, the current pass is read again up to
    its position; without `num_batches`, all previous passes are read again too. More than one worker is not faster,
    because each worker also reads the batches of the other workers.

    Args:
        datasets: name -> a dataset with a stream `train`.
        weights: name -> how often a training batch comes from this dataset, in proportion to the other weights. All
            batches count the same, whatever their size.
        batches_per_epoch: the number of batches in a training pass.

    Raises:
        ArgumentError: a dataset has no stream `train` or no weight, a weight is not a positive number, or a label is
            another class in another dataset.
        StreamError: the `train` stream of a dataset is empty, or has another number of batches than `num_batches` says.
    """

    train_only = ("weights",)

    def __init__(self, datasets: Values, weights: Mapping[str, float], batches_per_epoch: int) -> None:
        check_count("batches_per_epoch", batches_per_epoch, minimum=1)
        _check(datasets, weights)
        self._datasets = dict(datasets)
        self._names = list(datasets)
        self._edges = np.cumsum([weights[name] for name in datasets])
        self._batches_per_epoch = batches_per_epoch
        self.read_ahead = max(getattr(each, "read_ahead", 0) for each in datasets.values())
        self._counts: dict[tuple[int, str], list[Rows]] = {}
        self._kept: dict[tuple[int, str], dict[int, tuple[int, Iterator[_Read]]]] = {}
        for name, dataset in datasets.items():
            for stream in stream_names(dataset):
                setattr(self, f"{name}_{stream}_stream", stream_function(dataset, stream))
        has_only(self, ["train", *filter(self._having, ("valid", "test"))])

    @property
    def num_batches(self) -> Counts:
        """Stream -> number of its batches, if its datasets have `num_batches`."""
        own = {name: _lengths(dataset) for name, dataset in self._datasets.items()}
        found = {"train": self._batches_per_epoch}
        for stream in ("valid", "test"):
            having = self._having(stream)
            if having and all(stream in own[name] for name in having):
                found[stream] = sum(own[name][stream] for name in having)
        return {**found, **{f"{name}_{stream}": count for name in own for stream, count in own[name].items()}}

    def classes_names(self) -> Any:
        """Return the names of the classes, if they are the same in all datasets."""
        first, *others = map(named_classes, self._datasets.values())
        return [] if any(each != first for each in others) else first

    def classes_instead(self, source: str) -> str | None:
        """Return what a loss of classes reads instead of a picture; None if no dataset has such a source."""
        found = [getattr(each, "classes_instead", lambda source: None)(source) for each in self._datasets.values()]
        return next(filter(None, found), None)

    @property
    def is_packed(self) -> bool:
        """Whether a dataset has packs, whose parts must not see each other."""
        return any(getattr(each, "is_packed", False) for each in self._datasets.values())

    def check_vocabulary(self, size: int) -> None:
        """Check that a table of embeddings has a row for each token of the datasets."""
        for each in self._datasets.values():
            check = getattr(each, "check_vocabulary", None)
            if check is not None:
                check(size)

    def new_stream(self, path: Path, ctx: StreamContext) -> Iterator[Batch]:
        """Yield the batches of data that the run has not seen, which must be those of one of the datasets.

        Raises:
            StreamError: several datasets, or none, could read them.
        """
        able = [
            name for name, each in self._datasets.items() if takes_path(NEW, getattr(each, "new_stream", lambda: None))
        ]
        if len(able) != 1:
            what = f"new data could be those of {listed(able)}" if able else "no dataset has a method new_stream(path)"
            others = " ".join(f"'~dataset.datasets.{name}' '~dataset.weights.{name}'" for name in able[1:])
            advice = f"; leave all but one out, as by {others}" if able else ""
            raise StreamError(f"{what}{advice}", first_batch=True)
        function = stream_function(self._datasets[able[0]], NEW, path)
        yield from function(ctx) if takes_context(function) else function()

    def train_stream(self, ctx: StreamContext) -> Iterator[Batch]:
        """Yield batches of the datasets, mixed by weight."""
        key = ctx.seed, ctx.stream_name
        choices = self._choices(ctx.seed, ctx.stream_name, ctx.epoch)
        before = self._read_before(ctx.seed, ctx.stream_name, ctx.epoch)
        places = np.empty_like(choices)  # of each batch, among those of the same dataset in this pass
        for chosen in range(len(self._names)):
            places[choices == chosen] = np.arange(np.count_nonzero(choices == chosen))
        readers = self._kept.pop(key, {}) if ctx.epoch else {}
        for (index,) in ctx.batches(self._batches_per_epoch, 1):
            chosen = int(choices[index])
            read = int(before[chosen] + places[index])
            if chosen not in readers or readers[chosen][0] > read:
                readers[chosen] = self._begin(self._names[chosen], read, ctx)
            count, reader = readers[chosen]
            batch, left_out = next(itertools.islice(reader, read - count, None))  # skips those of other workers
            readers[chosen] = read + 1, reader
            yield self._told(ctx, self._names[chosen], batch, left_out)
        if ctx.epoch:
            self._kept[key] = readers

    def __getstate__(self) -> Named:
        return {**self.__dict__, "_kept": {}}

    def _having(self, stream: str) -> list[str]:
        return [name for name, dataset in self._datasets.items() if stream in stream_names(dataset)]

    def _open(self, stream: str, ctx: StreamContext) -> Iterator[Batch]:
        for name in self._having(stream):  # one after the other
            for batch, left_out in _with_left_out(self._wrapped(name, stream, ctx, training=False)):
                yield self._told(ctx, name, batch, left_out)

    def _told(self, ctx: StreamContext, name: str, batch: Batch, left_out: Mapping[str, str]) -> Batch:
        """Tell a context what was left out of a batch; return it without numbers that other examples have too."""
        ctx.rows = 0  # not known: `batches` was told the number of batches, and each dataset has its own limit
        for example, reason in left_out.items():
            ctx.leave_out(f"{name}: {example}", reason)
        if not isinstance(self._datasets[name], NamedSplits):
            return batch
        return {source: values for source, values in batch.items() if source != POSITION}

    def _wrapped(self, name: str, stream: str, ctx: StreamContext, *, training: bool) -> StreamWrapper:
        function = stream_function(self._datasets[name], stream)
        name = f"{name}.{stream}"
        return StreamWrapper(
            function,
            name=name,
            seed=ctx.seed,
            training=training,
            ranks=ctx.ranks,
            reading=_READING,
            read_by=ctx.read_by,
        )

    def _choices(self, seed: int, stream: str, epoch: int) -> Rows:
        """Return the index of the dataset that each batch of a pass comes from."""
        drawn = StreamContext(stream, seed=seed, epoch=epoch).rng.random(self._batches_per_epoch)
        return np.asarray(np.searchsorted(self._edges[:-1], drawn * self._edges[-1], side="right"), np.int64)

    def _read_before(self, seed: int, stream: str, epoch: int) -> Rows:
        """Return how many batches of each dataset were read in all training passes before `epoch`."""
        counts = self._counts.setdefault((seed, stream), [np.zeros(len(self._names), np.int64)])  # of each pass
        for each in range(len(counts), epoch):
            counts.append(np.bincount(self._choices(seed, stream, each), minlength=len(self._names)))
        return np.asarray(np.sum(counts[: max(epoch, 1)], axis=0), np.int64)

    def _begin(self, name: str, read: int, ctx: StreamContext) -> tuple[int, Iterator[_Read]]:
        """Return how many of the first `read` batches of a dataset are left out, and all batches that follow them."""
        told = _lengths(self._datasets[name]).get("train") if ctx.epoch else None
        stream = self._wrapped(name, "train", ctx, training=ctx.epoch > 0)
        if told:
            stream.seek(StreamPosition(1 + read // told, read % told))
        return read if told else 0, _passes(name, stream, told)


def _passes(name: str, stream: StreamWrapper, told: int | None) -> Iterator[_Read]:
    """Yield the batches of a dataset, one pass after the other."""
    while True:
        number, length = stream.position
        for each in _with_left_out(stream):
            length += 1
            yield each
        if not length or (told and length != told):
            says = f" in pass {number}, but num_batches says {told}" if told else ""
            raise StreamError(f"dataset {name!r}: its stream 'train' has {length} batches{says}")


def _with_left_out(stream: StreamWrapper) -> Iterator[_Read]:
    """Yield each batch of an epoch, and the examples that were left out of it: name -> reason."""
    told = 0
    for batch in stream:
        yield batch, dict(itertools.islice(stream.left_out.items(), told, None))
        told = len(stream.left_out)


def _lengths(dataset: Any) -> dict[str, int]:
    return dict(getattr(dataset, "num_batches", None) or {})


def _check(datasets: Values, weights: Mapping[str, float]) -> None:
    for argument, value in (("datasets", datasets), ("weights", weights)):
        if not isinstance(value, Mapping) or not value:
            raise ArgumentError(argument, f"{value!r} is not a mapping with one entry per dataset")
    for name, dataset in datasets.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("datasets", f"{name!r} is not a name; use letters, digits and underscores")
        streams = stream_names(dataset)
        if "train" not in streams:
            kind = type(dataset).__name__
            raise ArgumentError("datasets", f"{name}: {kind} has no stream 'train' (its streams: {listed(streams)})")
    _check_classes(datasets)
    if weights.keys() != datasets.keys():
        raise ArgumentError(
            "weights", f"are those of {listed([*map(str, weights)])}; the datasets are {listed([*datasets])}"
        )
    for name, weight in weights.items():
        check_number("weights", weight, f"a positive number, as the weight of {name}", above=0)


def _check_classes(datasets: Values) -> None:
    """Check that a label has one meaning in all datasets that have names for their classes."""
    known: dict[Any, tuple[str, Any]] = {}
    for name, dataset in datasets.items():
        found = named_classes(dataset) or []
        for source, classes in (found if isinstance(found, Mapping) else {None: found}).items():
            first, others = known.setdefault(source, (name, classes))
            for label, (one, two) in enumerate(zip(others, classes, strict=False)):
                if one != two:
                    message = f"label {label} is the class {one!r} in {first!r}, but {two!r} in {name!r}"
                    raise ArgumentError("datasets", f"{message}; give both the same classes in the same order")
