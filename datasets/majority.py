"""The majority task: are there more ones than zeros in a vector?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from emrun.base.arguments import check_count
from emrun.base.types import Batch
from emrun.dataset import AbstractDataset
from emrun.stream_context import StreamContext


class Majority(AbstractDataset):
    """Random vectors of zeros and ones, to be classified by whether there are more ones than zeros.

        dataset: {class: Majority, n: 500, dim: 11, batch_size: 10}

    Streams: `train` (four fifths of the examples, shuffled in every pass), `valid` (the rest). Sources: `x`, float32 of
    shape (B, dim); `y`, float32 of shape (B,), 1.0 if there are more ones, else 0.0.

    Args:
        n: the number of examples, at least 5.
        dim: the length of the vectors; use an odd number, so that there is always a majority.
        batch_size: the number of examples in a batch.
        data_seed: the seed from which the examples are drawn.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    def __init__(self, n: int = 500, dim: int = 11, batch_size: int = 10, data_seed: int = 0) -> None:
        check_count("n", n, minimum=5)
        check_count("dim", dim, minimum=1)
        check_count("batch_size", batch_size, minimum=1)
        check_count("data_seed", data_seed)
        vectors = np.random.default_rng(data_seed).integers(0, 2, size=(n, dim))
        self._x = vectors.astype(np.float32)
        self._y = (vectors.sum(axis=1) * 2 > dim).astype(np.float32)
        self._split = n * 4 // 5
        self._batch_size = batch_size

    @property
    def num_batches(self) -> Mapping[str, int]:
        """Stream -> number of its batches."""
        sizes = {"train": self._split, "valid": len(self._y) - self._split}
        return {name: -(-size // self._batch_size) for name, size in sizes.items()}

    def train_stream(self, ctx: StreamContext) -> Iterator[Batch]:
        """Yield the training batches, shuffled."""
        for rows in ctx.batches(self._split, self._batch_size, shuffle=True):
            yield {"x": self._x[rows], "y": self._y[rows]}

    def valid_stream(self, ctx: StreamContext) -> Iterator[Batch]:
        """Yield the validation batches."""
        for rows in ctx.batches(len(self._y) - self._split, self._batch_size):
            yield {"x": self._x[self._split + rows], "y": self._y[self._split + rows]}
