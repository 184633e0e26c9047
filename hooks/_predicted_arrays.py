"""Keep the outputs for every example of a stream as arrays, for `emrun.predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emrun.base.errors import UsageError
from emrun.hooks._shared.columns import Column
from emrun.hooks._shared.probabilities import Probabilities
from emrun.hooks.save_predictions import SavePredictions


class PredictedArrays(SavePredictions):
    """Keeps the columns of `SavePredictions` in memory.

    Args:
        stream: see `SavePredictions`.
        variables: see `SavePredictions`.
        classes: see `SavePredictions`.
        limit: the most examples.
        probabilities: see `SavePredictions`.
    """

    def __init__(
        self,
        stream: str,
        variables: Sequence[str] | None,
        classes: bool,
        limit: int,
        probabilities: Probabilities = False,
    ) -> None:
        super().__init__(stream, "arrays.csv", variables, None, None, classes, probabilities)  # is not written
        self._limit = limit
        self._batches: list[Mapping[str, Column]] = []

    def write(self, columns: Mapping[str, Column]) -> None:
        """Keep the rows of a batch.

        Raises:
            UsageError: there are too many.
        """
        if self._count > self._limit:
            advice = f"write a file, as in predict(run, {self._stream!r}, 'predictions.parquet'), or set limit"
            raise UsageError(f"stream {self._stream!r} has more than {self._limit:,} examples: {advice}")
        self._batches.append(columns)

    def after_stream(self, stream_name: str) -> None:
        """Count the rows."""
        self.rows = self._written

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Name -> the values of all examples.

        Raises:
            UsageError: the values of a variable have different shapes.
        """
        arrays = {}
        for name in self._batches[0]:
            try:
                arrays[name] = np.concatenate([np.asarray(batch[name]) for batch in self._batches])
            except ValueError as error:
                raise UsageError(
                    f"no array can hold {name!r}, whose values have different shapes: leave it out of "
                    "variables, or write a .parquet or .jsonl file"
                ) from error
        return arrays
