"""The base classes of datasets with streams `train`, `valid` and `test`, and of those with examples by row number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Counts
from emrun.dataset import AbstractDataset
from emrun.stream_context import Rows, StreamContext


class Part(Protocol):
    """The examples of one stream."""

    blocks: Sequence[int] | None = None
    """The number of examples in each file or row group; None if every example is found equally fast."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def read(self, rows: Rows, ctx: StreamContext) -> Batch:
        """Return the batch of these rows, an int64 array of shape (B,): source -> values with a first axis of length B.

        The result must depend only on `rows` and `ctx`: batches are read in any order, in any process.
        """
        ...


class ThreeStreams(AbstractDataset):
    """Streams `train`, `valid` and `test`, which `_open` begins."""

    def train_stream(self, ctx: StreamContext) -> Iterable[Batch]:
        """Return the training batches."""
        return self._open("train", ctx)

    def valid_stream(self, ctx: StreamContext) -> Iterable[Batch]:
        """Return the validation batches."""
        return self._open("valid", ctx)

    def test_stream(self, ctx: StreamContext) -> Iterable[Batch]:
        """Return the test batches."""
        return self._open("test", ctx)

    def _open(self, name: str, ctx: StreamContext) -> Iterable[Batch]:
        """Return the batches of a pass over a stream."""
        raise NotImplementedError


def has_only(dataset: ThreeStreams, names: Collection[str]) -> None:
    """Take the other streams away from a dataset, so that a config that uses them fails before the training."""
    for name in {"train", "valid", "test"}.difference(names):
        setattr(dataset, f"{name}_stream", None)


class Splits(ThreeStreams):
    """Streams `train`, `valid` and `test`, each over a `Part`; a name without a part has no stream.

    Args:
        parts: `train`, and perhaps `valid` and `test` -> the examples; those of `train` are shuffled in every training
            pass.
        batch_size: the number of examples in a batch.
        names: the streams; by default those of the parts.

    Raises:
        ArgumentError: the batch size is not a whole number of at least 1, or a part has no examples.
    """

    _set_by_init = "_batch_size"

    def __init__(self, parts: Mapping[str, Part], batch_size: int, names: Collection[str] = ()) -> None:
        check_count("batch_size", batch_size, minimum=1)
        self._parts = parts
        for name, part in parts.items():
            if not len(part):
                raise ArgumentError(name, "contains no examples")
        has_only(self, names or parts)
        self._batch_size = batch_size

    @property
    def num_batches(self) -> Counts:
        """Stream -> number of its batches."""
        return {name: -(-count // self._batch_size) for name, count in self.lengths().items()}

    def lengths(self) -> Counts:
        """Return stream -> number of its examples."""
        return {name: len(part) for name, part in self._parts.items()}

    def _open(self, name: str, ctx: StreamContext) -> Iterable[Batch]:
        return self._batches(self._part(name), ctx, shuffle=name == "train" and ctx.epoch > 0)

    def _part(self, name: str) -> Part:
        """Return the examples of a stream; worker processes have what was read before they began."""
        return self._parts[name]

    def _batches(self, part: Part, ctx: StreamContext, *, shuffle: bool) -> Iterator[Batch]:
        for rows in ctx.batches(len(part), self._batch_size, shuffle=shuffle, blocks=part.blocks):
            yield part.read(rows, ctx)
