"""The wrapped streams of a dataset by name, and the streams that are evaluated in an epoch."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError, UsageError
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch, Interval, Reader
from emrun.dataset import asks_model, stream_function, stream_lengths, stream_names
from emrun.extra_streams import ExtraStream, read_extra_streams
from emrun.ranks.group import Ranks
from emrun.stream_context import WithLeftOut
from emrun.streams.pass_lengths import asked_length
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.streams.stream_pass import StreamPass, WithState, closable

_LOG = logging.getLogger(__name__)
StreamLike = str | StreamWrapper | Iterable[Batch]


class DatasetStreams:
    """Wraps the streams that a loop runs. Training and evaluation use separate wrappers of the same stream.

    Args:
        dataset: any object with methods `<name>_stream`.
        train_stream_name: the stream that the model learns from.
        extra_streams: names of the streams that are evaluated after the train stream; `{name: '5 epochs'}` for every
            fifth epoch, `{name: {batches: 20}}` for 20 batches at most. The train stream may be among them: it is
            evaluated as `train_eval`.
        reading: how the streams are read.
        fixed_epoch_size: how many batches of the train stream make an epoch, such as 200 or `200 updates`; None for a
            pass.
        overfit: how many batches every stream has instead of its own: the first ones of pass 1 of the train stream.
        seed: the seed of the streams.
        interrupted: returns whether to stop waiting for a batch.
        iterations_per_update: the number of batches of an update, for a `fixed_epoch_size` in updates.
        ranks: the ranks that share the batches; None for those of the run.

    Raises:
        ArgumentError: `extra_streams` is not a list of streams or has a stream twice; a number of batches is not one,
            or both are given; or there is a time limit, but neither a buffer nor workers.
    """

    def __init__(
        self,
        dataset: Any,
        train_stream_name: str,
        extra_streams: Sequence[str | Mapping[str, Any]] = (),
        *,
        reading: Reading | None = None,
        fixed_epoch_size: int | str | None = None,
        overfit: int | None = None,
        seed: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
        iterations_per_update: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        given = reading or Reading()
        reading = given.of(dataset)
        if reading.timeout is not None and not reading.ahead:
            raise ArgumentError(
                "stream_timeout", "needs `buffer` or `workers`; without read-ahead the wait for a batch has no limit"
            )
        if overfit is not None:
            check_count("overfit", overfit, minimum=1)
            if asks_model(dataset):
                raise ArgumentError("overfit", f"{type(dataset).__name__} takes the model: no batches can be kept")
            if fixed_epoch_size is not None:
                raise ArgumentError(
                    "overfit", "overfit and fixed_epoch_size both set the number of batches of an epoch; remove one"
                )
        self.fixed_epoch_size = (
            None if fixed_epoch_size is None else _batches_of(fixed_epoch_size, iterations_per_update)
        )
        self._evaluated_train = f"{train_stream_name}_eval"
        self.extra = read_extra_streams(extra_streams, train_stream_name, self._evaluated_train)
        """Extra stream -> when it is evaluated, and how much of it. The train stream has another name here, so that
        hooks can distinguish its evaluation from the training."""
        self._dataset = dataset
        self.train_stream_name = train_stream_name
        self.reading = reading
        """How the streams of the dataset are read."""
        self._given = given
        self.overfit = overfit
        self._seed = seed
        self._wrapped = partial(StreamWrapper, seed=seed, interrupted=interrupted, ranks=ranks)
        self.trained: dict[str, StreamWrapper] = {}
        """The wrappers of the streams for training that were requested so far, by name."""
        self._evaluated: dict[tuple[Any, ...], StreamWrapper] = {}  # by the arguments of `get`

    def get(
        self,
        name: str,
        *,
        train: bool,
        batches: int | None = None,
        in_order: bool = False,
        path: Path | None = None,
    ) -> StreamWrapper:
        """Return the wrapper of a stream, which is created at the first call.

        Args:
            name: the name of the stream.
            train: whether the model is trained on the stream.
            batches: how many batches an evaluation has at most; None for all.
            in_order: see `StreamContext`.
            path: where new data are; see `stream_function`.

        Raises:
            AttributeError: the dataset has no method `<name>_stream`.
        """
        known: dict[Any, StreamWrapper] = self.trained if train else self._evaluated
        key = name if train else (name, batches, in_order, path)
        if key in known:
            return known[key]
        source = self.source_of(name)
        function = stream_function(self._dataset, source, path)
        reading = self.reading
        if self.overfit is not None:
            function = self._kept_batches
            reading = replace(reading, workers=0)
        if source == self.train_stream_name:
            batches = batches or self.fixed_epoch_size
        known[key] = self._wrapped(
            function,
            epoch_size=batches or -1,
            name=name,
            training=train,
            reading=reading,
            context_name=source,
            in_order=in_order,
        )
        return known[key]

    def shorten(self, lengths: Mapping[str, int]) -> None:
        """Limit each stream of the dataset to so many batches in an epoch, and evaluate extra streams in each epoch."""
        train_length = lengths[self.train_stream_name]
        self.fixed_epoch_size = min(train_length, self.fixed_epoch_size or train_length)
        shorter = {name: lengths[self.source_of(name)] for name in self.extra}
        self.extra = {
            name: ExtraStream(None, min(shorter[name], extra.batches or shorter[name]))
            for name, extra in self.extra.items()
        }

    @cached_property
    def _kept_batches(self) -> KeptBatches:
        name = self.train_stream_name
        return KeptBatches(stream_function(self._dataset, name), name, self._seed, self.overfit or 0, self.reading.by)

    @property
    def pass_length(self) -> int | None:
        """Number of batches of a pass of the train stream, if the dataset knows it."""
        length = stream_lengths(self._dataset).get(self.train_stream_name, 0)
        return (length if self.overfit is None else min(length, self.overfit)) or None

    def asked_length(self, batch_size: int | None) -> int | None:
        """Return what `ctx.batches` tells of the length of a pass of the train stream; see `asked_length`."""
        name = self.train_stream_name
        if name not in stream_names(self._dataset):
            return None
        length = asked_length(stream_function(self._dataset, name), name, self._seed, batch_size)
        return length if length is None or self.overfit is None else min(length, self.overfit)

    @property
    def sizes(self) -> dict[str, int]:
        """Stream -> how many batches of it an epoch has at most, if the config says so."""
        sizes = {name: extra.batches for name, extra in self.extra.items()}
        sizes[self.train_stream_name] = self.fixed_epoch_size
        if self.overfit is not None:
            sizes = {name: min(size or self.overfit, self.overfit) for name, size in sizes.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def sources(self) -> list[str]:
        """The names of the dataset's streams that are run, the train stream first."""
        return list(dict.fromkeys([self.train_stream_name, *map(self.source_of, self.extra)]))

    def source_of(self, name: str) -> str:
        """Return the name of the dataset's stream that is run under `name`."""
        is_train = name == self._evaluated_train and name in self.extra
        return self.train_stream_name if is_train else name

    def resolve(self, stream: StreamLike, unnamed: str, *, train: bool) -> StreamWrapper:
        """Return the wrapper for a name, a wrapper or an iterable; an iterable gets a new wrapper called `unnamed`."""
        if isinstance(stream, str):
            return self.get(stream, train=train)
        if isinstance(stream, StreamWrapper):
            return stream
        reading = replace(self._given, workers=0)  # the iterable exists only in this process
        return self._wrapped(lambda: stream, name=unnamed, training=train, reading=reading)

    def due(self, epoch_id: int) -> list[StreamWrapper]:
        """Return the extra streams that are evaluated in an epoch."""
        due = {name: extra for name, extra in self.extra.items() if extra.every is None or epoch_id % extra.every == 0}
        return [self.get(name, train=False, batches=extra.batches) for name, extra in due.items()]

    def all_extra(self) -> list[StreamWrapper]:
        """Return all extra streams."""
        return [self.get(name, train=False, batches=extra.batches) for name, extra in self.extra.items()]

    def stop(self) -> None:
        """Stop the readers; positions and the batches that were read ahead are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.__exit__()

    def close(self) -> None:
        """End the passes that have begun; positions are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.close()


def _batches_of(size: int | str, iterations_per_update: int) -> int:
    """Return the number of batches in `fixed_epoch_size`, a number or an interval such as `200 updates`."""
    if isinstance(size, str):
        try:
            interval = Interval.parse("fixed_epoch_size", size, ("updates", "iterations"))
        except ArgumentError as error:
            message = f"{size!r} is not a number of batches; write for example 200, '200 updates' or '200 iterations'"
            raise ArgumentError("fixed_epoch_size", message) from error
        return int(interval.count) * (iterations_per_update if interval.unit == "updates" else 1)
    check_count("fixed_epoch_size", size, minimum=1)
    return size


def different_names(streams: Sequence[StreamWrapper]) -> list[str]:
    """Return the names of an epoch's streams.

    Raises:
        UsageError: two streams have the same name.
    """
    names = [stream.name for stream in streams]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two streams of the epoch have the name {name!r}")
    return names


class KeptBatches:
    """A stream function that gives the first batches of pass 1 of another stream, the same in each call.

    The batches are read once, with random states that are a function of the seed and the name of the stream, so that
    they are the same also for a stream that draws from global random states. Every call gives copies.

    Args:
        function: returns an iterable of batches; takes no argument, or the `StreamContext`.
        name: the name of the stream.
        seed: the seed of the run.
        count: the number of batches.
        read_by: who would read the stream, see `StreamContext`.
    """

    def __init__(
        self, function: Callable[..., Iterable[Batch]], name: str, seed: int, count: int, read_by: Reader = "loop"
    ) -> None:
        self._pass = StreamPass(function, name, seed, 1, read_by=read_by)
        self._count = count

    def __call__(self) -> Iterator[Batch]:
        """Yield a copy of each batch."""
        return map(copy.deepcopy, self._batches)

    @cached_property
    def _batches(self) -> list[Batch]:
        with preserved_randomness():
            seed_everything(self._pass.seed, self._pass.name, "overfit", devices=False)
            with closing(closable(self._pass.read())) as batches:
                copies = [copy.deepcopy(each) for each in itertools.islice(batches, self._count)]
        _LOG.info("overfit: every stream gives the first %d batches of stream %r", self._count, self._pass.name)
        if len(copies) < self._count:
            _LOG.warning("overfit: pass 1 of stream %r has only %d batches", self._pass.name, len(copies))
        return [each.batch if isinstance(each, WithState | WithLeftOut) else each for each in copies]
