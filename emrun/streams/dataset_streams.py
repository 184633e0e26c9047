"""The wrapped streams of a dataset by name, and the streams that are evaluated in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from emrun.dataset import stream_function
from emrun.errors import ArgumentError
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.types import Batch, Interval

StreamLike = str | StreamWrapper | Iterable[Batch]


class DatasetStreams:
    """Wraps the streams that a loop runs. Training and evaluation use separate wrappers of the same stream.

    Args:
        dataset: any object with methods `<name>_stream`.
        train_stream_name: the stream that the model learns from.
        extra_streams: names of the streams that are evaluated after the train stream; `{name: '5 epochs'}` for every
            fifth epoch. The train stream may be among them: it is evaluated as `train_eval`.
        reading: how the streams are read.
        fixed_epoch_size: how many batches of the train stream make an epoch, None for a pass.
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
        seed: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        reading = reading or Reading()
        if reading.timeout is not None and not reading.ahead:
            raise ArgumentError(
                "stream_timeout", "needs `buffer` or `workers`; without read-ahead the wait for a batch has no limit"
            )
        self._evaluated_train = f"{train_stream_name}_eval"
        self.intervals = _read_extra_streams(extra_streams, train_stream_name, self._evaluated_train)
        """Extra stream -> the number of epochs between its evaluations, None for every epoch. The train stream has
        another name here, so that hooks can distinguish its evaluation from the training."""
        self._dataset = dataset
        self.train_stream_name = train_stream_name
        self._reading = reading
        self._fixed_epoch_size = fixed_epoch_size
        self._wrapped = partial(StreamWrapper, seed=seed, interrupted=interrupted)
        self.trained: dict[str, StreamWrapper] = {}
        """The wrappers of the streams for training that were requested so far, by name."""
        self._evaluated: dict[str, StreamWrapper] = {}

    def get(self, name: str, *, train: bool) -> StreamWrapper:
        """Return the wrapper of a stream, which is created at the first call.

        Raises:
            AttributeError: the dataset has no method `<name>_stream`.
        """
        wrappers = self.trained if train else self._evaluated
        if name not in wrappers:
            source = self.source_of(name)
            cut = self._fixed_epoch_size if source == self.train_stream_name else None
            wrappers[name] = self._wrapped(
                stream_function(self._dataset, source),
                epoch_size=cut or -1,
                name=name,
                training=train,
                reading=self._reading,
                context_name=source,
            )
        return wrappers[name]

    @property
    def sources(self) -> list[str]:
        """The names of the dataset's streams that are run, the train stream first."""
        return list(dict.fromkeys([self.train_stream_name, *map(self.source_of, self.intervals)]))

    def source_of(self, name: str) -> str:
        """Return the name of the dataset's stream that is run under `name`."""
        is_train = name == self._evaluated_train and name in self.intervals
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
        names = [name for name, interval in self.intervals.items() if interval is None or epoch_id % interval == 0]
        return [self.get(name, train=False) for name in names]

    def stop(self) -> None:
        """Stop the readers; positions and the batches that were read ahead are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.__exit__()

    def close(self) -> None:
        """End the passes that have begun; positions are kept."""
        for stream in (*self.trained.values(), *self._evaluated.values()):
            stream.close()


def _read_extra_streams(
    entries: Sequence[str | Mapping[str, Any]], train_stream_name: str, evaluated_train: str
) -> dict[str, int | None]:
    """Return name -> number of epochs, None for every epoch; the train stream is called `evaluated_train`."""
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ArgumentError("extra_streams", f"{entries!r} is not a list of streams")
    intervals: dict[str, int | None] = {}
    for entry in entries:
        pairs = list(entry.items()) if isinstance(entry, Mapping) else [(entry, None)]
        if len(pairs) != 1 or not isinstance(pairs[0][0], str):
            raise ArgumentError("extra_streams", f"{entry!r} is not a stream; write a name, or `name: 5 epochs`")
        stream, interval = pairs[0]
        name = evaluated_train if stream == train_stream_name else stream
        if name in intervals:
            why = f" ({train_stream_name!r} is evaluated as {name!r})" if name == evaluated_train else ""
            raise ArgumentError("extra_streams", f"stream {stream!r} is listed twice{why}; remove one entry")
        intervals[name] = None if interval is None else int(Interval.parse("extra_streams", interval).count)
    return intervals
