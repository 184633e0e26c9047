"""The wrapped streams of a dataset by name, and the streams that are evaluated in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from emrun.dataset import stream_function
from emrun.errors import ArgumentError
from emrun.streams.extra_streams import read_extra_streams
from emrun.streams.kept_batches import KeptBatches
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.types import Batch

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
        fixed_epoch_size: how many batches of the train stream make an epoch, None for a pass.
        overfit: how many batches every stream has instead of its own: the first ones of pass 1 of the train stream.
        seed: the seed of the streams.
        interrupted: returns whether to stop waiting for a batch.

    Raises:
        ArgumentError: `extra_streams` is not a list of streams or has a stream twice; or there is a time limit, but
            neither a buffer nor workers.
    """

    def __init__(
        self,
        dataset: Any,
        train_stream_name: str,
        extra_streams: Sequence[str | Mapping[str, Any]] = (),
        *,
        reading: Reading | None = None,
        fixed_epoch_size: int | None = None,
        overfit: int | None = None,
        seed: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        reading = reading or Reading()
        if reading.timeout is not None and not reading.ahead:
            raise ArgumentError(
                "stream_timeout", "needs `buffer` or `workers`; without read-ahead the wait for a batch has no limit"
            )
        self._evaluated_train = f"{train_stream_name}_eval"
        self.extra = read_extra_streams(extra_streams, train_stream_name, self._evaluated_train)
        """Extra stream -> when it is evaluated, and how much of it. The train stream has another name here, so that
        hooks can distinguish its evaluation from the training."""
        self._dataset = dataset
        self.train_stream_name = train_stream_name
        self._reading = reading
        self._fixed_epoch_size = fixed_epoch_size
        self._overfit = overfit
        self._kept: KeptBatches | None = None
        self._seed = seed
        self._wrapped = partial(StreamWrapper, seed=seed, interrupted=interrupted)
        self.trained: dict[str, StreamWrapper] = {}
        """The wrappers of the streams for training that were requested so far, by name."""
        self._evaluated: dict[tuple[str, int | None], StreamWrapper] = {}  # by name and number of batches

    def get(self, name: str, *, train: bool, batches: int | None = None) -> StreamWrapper:
        """Return the wrapper of a stream, which is created at the first call.

        Args:
            name: the name of the stream.
            train: whether the model is trained on the stream.
            batches: how many batches an evaluation has at most; None for all.

        Raises:
            AttributeError: the dataset has no method `<name>_stream`.
        """
        key = name, batches
        if (name in self.trained) if train else (key in self._evaluated):
            return self.trained[name] if train else self._evaluated[key]
        source = self.source_of(name)
        function, reading = stream_function(self._dataset, source), self._reading
        if self._overfit is not None:
            function, reading = self._kept_batches(self._overfit), replace(reading, workers=0)
        if source == self.train_stream_name:
            batches = batches or self._fixed_epoch_size
        wrapper = self._wrapped(
            function, epoch_size=batches or -1, name=name, training=train, reading=reading, context_name=source
        )
        if train:
            self.trained[name] = wrapper
        else:
            self._evaluated[key] = wrapper
        return wrapper

    def _kept_batches(self, count: int) -> KeptBatches:
        if self._kept is None:
            name = self.train_stream_name
            self._kept = KeptBatches(stream_function(self._dataset, name), name, self._seed, count)
        return self._kept

    @property
    def sizes(self) -> dict[str, int]:
        """Stream -> how many batches of it an epoch has at most, if the config says so."""
        sizes = {name: each.batches for name, each in self.extra.items()}
        sizes[self.train_stream_name] = self._fixed_epoch_size
        if self._overfit is not None:
            sizes = {name: min(size or self._overfit, self._overfit) for name, size in sizes.items()}
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
        here = replace(self._reading, workers=0)  # the iterable exists only in this process
        return self._wrapped(lambda: stream, name=unnamed, training=train, reading=here)

    def due(self, epoch_id: int) -> list[StreamWrapper]:
        """Return the extra streams that are evaluated in an epoch."""
        due = {name: each for name, each in self.extra.items() if each.every is None or epoch_id % each.every == 0}
        return [self.get(name, train=False, batches=each.batches) for name, each in due.items()]

    def stop(self) -> None:
        """Stop the readers; positions and the batches that were read ahead are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.__exit__()

    def close(self) -> None:
        """End the passes that have begun; positions are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.close()
