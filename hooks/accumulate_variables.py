"""Keep the values of variables until the end of the epoch; a base for hooks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError, StreamError
from emrun.base.sources import length
from emrun.hooks._shared.columns import Column, column, missing
from emrun.hooks._shared.streams import OfStreams

_LOG = logging.getLogger(__name__)


class AccumulateVariables(OfStreams):
    """Keeps all values of variables until the end of the epoch; a base for hooks that look at them in `after_epoch`.

        hooks:
          - AccumulateVariables: {variables: [accuracy]}

    By itself it writes nothing. A derived hook passes `variables` on to `super().__init__` and reads `accumulated`,
    stream -> variable -> list, which begins anew with each epoch:

        class LogMedian(AccumulateVariables):
            def after_epoch(self, epoch_data):
                for stream, variables in self.accumulated.items():
                    print(stream, numpy.median(variables["accuracy"]))

    One that overrides `before_epoch`, `after_batch` or the methods of the state calls those of this class too.

    The values of all examples are in memory, on the host, and a checkpoint in the middle of an epoch has those so far:
    for statistics, `ComputeStats` is cheaper.

    Args:
        variables: sources, outputs, or what an earlier hook adds.
        streams: the streams whose values are kept; by default all.

    Raises:
        ArgumentError: an argument is not a list of names.
        HookError: the dataset does not have one of `streams`.
        StreamError: a batch does not have a variable, or the variable is a single number, a mapping, or something that
            is neither a number nor a string.
    """

    def __init__(
        self,
        variables: Sequence[str],
        streams: Sequence[str] | None = None,
        model: Any = None,
        dataset: Any = None,
        output_dir: Any = None,
    ) -> None:
        check_names("variables", variables)
        if not variables:
            raise ArgumentError("variables", "the list is empty; name at least one variable")
        self._variables = list(dict.fromkeys(variables))
        super().__init__(streams, self._variables, model=model, dataset=dataset, output_dir=output_dir)
        self._chunks: dict[str, dict[str, list[Column]]] = {}

    @property
    def accumulated(self) -> dict[str, dict[str, list[Any]]]:
        """Stream -> variable -> the values of this epoch, in the order of the stream.

        Each entry of the list is a number of NumPy, an array, a string or a list of strings.
        """
        return {
            stream: {name: [value for chunk in chunks for value in chunk] for name, chunks in variables.items()}
            for stream, variables in self._chunks.items()
        }

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the values of the previous epoch."""
        self._chunks = {}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the values of a batch."""
        if not self.looks_at(stream_name):
            return
        chunks = self._chunks.get(stream_name)
        if chunks is None:
            chunks = self._chunks[stream_name] = {name: [] for name in self._variables}
        for name in self._variables:
            chunks[name].append(_copied(self._column(name, stream_name, batch_data)))

    def _column(self, name: str, stream_name: str, batch_data: dict[str, Any]) -> Column:
        if name not in batch_data:
            message = missing(name, batch_data)
        elif length(batch_data[name]) < 0:
            message = f"{name!r} is {type(batch_data[name]).__name__}, not a list, an array or a tensor with an axis"
        else:
            try:
                return column(batch_data[name])
            except (TypeError, ValueError) as error:
                message = f"{name!r}: {error}"
        owner = type(self).__name__
        raise StreamError(
            f"{owner}: stream {stream_name!r}: {message}", first_batch=not self._chunks[stream_name][name]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the epoch so far."""
        return {
            "variables": self._variables,
            "chunks": self._chunks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of an epoch that is resumed in its middle, unless other variables are wanted now."""
        self._chunks = {}
        if list(state["variables"]) != self._variables:
            if state["chunks"]:
                _LOG.warning(
                    "%s: the variables are not those of the checkpoint; the values of this epoch are only those after "
                    "the checkpoint",
                    type(self).__name__,
                )
            return
        for stream, saved in state["chunks"].items():
            self._chunks[stream] = {name: list(saved[name]) for name in self._variables}


def _copied(values: Any) -> Any:
    """Return a copy, because the stream or the model may use the memory of an array again."""
    if isinstance(values, list):
        return [_copied(entry) for entry in values]
    return np.array(values) if isinstance(values, np.ndarray) else values
