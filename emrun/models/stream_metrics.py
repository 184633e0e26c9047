"""Metrics of whole streams: objects that see every batch of a stream and are computed once, at its end."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ArgumentError, StateError
from emrun.base.types import EpochData, State, Values
from emrun.base.wording import in_one_line, listed
from emrun.epoch_data import is_rate
from emrun.models.modes import Tensors
from emrun.models.object_state import ObjectState
from emrun.models.outputs import Calculations
from emrun.ranks.group import answered, ranks

_LOG = logging.getLogger(__name__)
_BY_ORDER = {"MulticlassStatScores", "MulticlassConfusionMatrix", "MulticlassExactMatch"}
"""Classes of torchmetrics that only look for the largest value; others take values in [0, 1] as probabilities."""


class StreamMetrics:
    """Updates metrics with each batch of a stream and computes them at its end.

    Args:
        calculations: name -> the metric with its inputs; calling it updates the object `metric`.
        device: the device of the model.

    Raises:
        ArgumentError: a metric has a name that is not allowed.
    """

    def __init__(self, calculations: Calculations, device: torch.device) -> None:
        if (taken := next(filter(is_rate, calculations), None)) is not None:
            raise ArgumentError("metrics", f"{taken!r} is the name of a learning rate; choose another name")
        self._calculations = calculations
        self._states: dict[str, ObjectState] = {}
        for name, each in calculations.items():
            if ranks().several and not hasattr(each.metric, "sync_context"):
                raise ArgumentError(each.key, "several ranks need a metric of torchmetrics, which adds up over ranks")
            self._states[name] = ObjectState(each.key, each.metric, device)
        self._outside: dict[str, list[Tensor]] = {  # whether the values of each update are not all in [0, 1]
            name: [] for name, each in calculations.items() if _looks_at_range(each.metric)
        }
        self._told: set[str] = set()  # those of which it was logged what is left out
        self._open: str | None = None  # the stream of the batches that have been added
        self._of_open: Calculations = {}  # the metrics that are of this stream
        self._values: EpochData = {}
        self._is_saved = False  # whether a checkpoint will need the states

    def add(self, stream: str, outputs: Values, inputs: Tensors) -> None:
        """Update the metrics with a batch; the first batch of a stream resets them.

        Args:
            stream: the name of the stream.
            outputs: the outputs of the batch, detached.
            inputs: source name -> tensor on the model's device.

        Raises:
            ArgumentError: an output or a source has the name of a metric, or the state of a metric cannot be saved.
            StreamError: a metric needs a name that is neither an output nor a source.
        """
        if stream != self._open:
            for what, there in (("an output", outputs), ("a source", inputs)):
                for name in filter(there.__contains__, self._calculations):
                    raise ArgumentError("metrics", f"there is {what} {name} already; rename one of the two")
            self._turn_to(stream)
        with torch.no_grad():
            for name, each in self._of_open.items():
                each(outputs, inputs)
                value = {**inputs, **outputs}[each.inputs[0]] if name in self._outside else None
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    self._outside[name].append(((value < 0) | (value > 1)).any())
        if self._is_saved:  # again, now that there is something in the states
            self._is_saved = False
            self._take()

    def begin(self, stream: str | None) -> None:
        """Begin a stream, unless it has begun, without a batch; None for no stream."""
        if stream != self._open:
            self._turn_to(stream)

    def end(self, stream: str) -> None:
        """Compute the metrics at the end of a stream, unless it had no batches.

        Raises:
            ArgumentError: the result of a metric is neither a number nor a mapping from names to numbers.
        """
        if stream != self._open:
            return
        found = {}
        with torch.no_grad():
            for name, each in self._of_open.items():
                try:
                    with answered():  # a metric of torchmetrics exchanges its states
                        result = each.metric.compute()
                except Exception as error:
                    error.add_note(f"in compute() of model.{each.key} for stream {stream!r}")
                    raise
                found[name] = self._statistic(name, result)
                self._tell_of_range(stream, name)
        self._values[stream] = found
        self._turn_to(None)

    def _statistic(self, name: str, result: Any) -> Any:
        """Return a result as a number, or those of its entries that are numbers by their names; log the others.

        Raises:
            ArgumentError: the result is something else.
        """
        values = dict(result) if isinstance(result, Mapping) and result else {"": result}
        found = {str(key): number for key, each in values.items() if (number := _number(each)) is not None}
        if not found:
            metric = self._calculations[name]
            key, wrong = next(iter(values.items()))
            entry = f" for {str(key)!r}" if key != "" else ""
            raise ArgumentError(
                metric.key,
                f"compute() of {type(metric.metric).__name__} returns {in_one_line(f'{wrong!r:.60}')}{entry}, not a "
                "number; a metric of a whole stream is one number, or a mapping from names to numbers: choose an "
                "average, or write a class that returns one of them",
            )
        if len(found) < len(values) and name not in self._told:
            self._told.add(name)
            _LOG.info(
                "model.metrics.%s: %s are left out, which are not numbers",
                name,
                listed([str(key) for key in values if str(key) not in found]),
            )
        return found if isinstance(result, Mapping) else found[""]

    def _tell_of_range(self, stream: str, name: str) -> None:
        """Warn once of a metric that has taken some updates of a stream as logits, and some as probabilities."""
        flags = self._outside.get(name, [])
        count = int(torch.stack(flags).sum()) if flags else 0
        if 0 < count < len(flags):
            del self._outside[name]
            _LOG.warning(
                "model.metrics.%s is wrong for stream %r: of %d updates, %d have values outside of 0 to 1, which "
                "torchmetrics takes as logits, and the others are taken as probabilities; give the metric "
                "probabilities, such as an output of softmax or sigmoid",
                name,
                stream,
                len(flags),
                count,
            )

    def values(self, stream: str) -> Values:
        """Return metric -> a number, or a mapping from names to numbers, of a stream that has ended in this epoch."""
        return self._values.get(stream, {})

    def clear(self) -> None:
        """Forget the batches and the results of an epoch."""
        self.begin(None)
        self._values = {}

    def check(self) -> None:
        """Check that the states of the metrics can be saved, now and after the next batch.

        Raises:
            ArgumentError: a state cannot be saved.
        """
        self._take()
        for name, each in self._states.items():
            if not each.is_kept:
                _LOG.warning(
                    "model.metrics.%s: a resume within an epoch begins it anew, because %s does not have state_dict() "
                    "and load_state_dict()",
                    name,
                    type(self._calculations[name].metric).__name__,
                )
        self._is_saved = True

    def state_dict(self) -> State:
        """Return the states of the metrics, and the results of the streams that have ended in this epoch."""
        return {
            "open": self._open,
            "metrics": self._take(),
            "values": {stream: dict(found) for stream, found in self._values.items()},
        }

    def load_state_dict(self, state: Values) -> None:
        """Restore what `state_dict` returned; a metric that was built differently begins anew.

        Raises:
            FieldError: the state has another form.
        """
        self._turn_to(state["open"])
        saved = {name: state["metrics"].get(name) for name in self._states}
        changed = [name for name, each in saved.items() if not self._states[name].fits(each)]
        for name in saved.keys() - changed:
            self._states[name].restore(saved[name])
        if changed and self._open is not None:
            _LOG.warning(
                "model.metrics: %s is not that of the checkpoint; its value for this epoch covers only the batches "
                "after the checkpoint",
                listed(changed),
            )
        self._values = {
            stream: {name: value for name, value in found.items() if name in self._calculations}
            for stream, found in state["values"].items()
        }

    def merged(self, states: Sequence[Values], *, empty: bool) -> State:
        """Return what several ranks have in `state_dict` as one, or with metrics that have seen nothing."""
        self._turn_to(None)
        metrics = self._take() if empty else dict(states[0]["metrics"])
        if empty or states[0]["open"] is None or len(states) == 1:  # there is nothing to merge
            return {**states[0], "metrics": metrics}
        for name, each in self._states.items():
            saved = [state["metrics"].get(name) for state in states]
            if not all(map(each.fits, saved)):
                continue
            metric = self._calculations[name].metric
            others = []
            for one in saved[1:]:
                each.restore(one)
                others.append(copy.deepcopy(metric))
            each.restore(saved[0])
            try:
                for one in others:
                    metric.merge_state(one)
            except Exception as error:
                _LOG.warning("model.metrics.%s: its value for this epoch covers the rows of rank 0: %s", name, error)
            else:
                metrics[name] = each.take()
        self._turn_to(None)
        return {**states[0], "metrics": metrics}

    def _take(self) -> dict[str, Any | None]:
        try:
            return {name: each.take() for name, each in self._states.items()}
        except StateError as error:
            raise ArgumentError("metrics", str(error)) from error

    def _turn_to(self, stream: str | None) -> None:
        """Reset the metrics, for the batches of a stream."""
        for each in self._calculations.values():
            each.metric.reset()
        for flags in self._outside.values():
            flags.clear()
        self._open = stream
        self._of_open = {name: each for name, each in self._calculations.items() if each.is_of(stream or "")}


def _looks_at_range(metric: Any) -> bool:
    """Return whether a metric applies softmax or sigmoid to the values of an update if they are not all in [0, 1]."""
    parts = metric.modules() if isinstance(metric, Module) else ()  # perhaps a collection
    return any(
        any(each.__module__.startswith("torchmetrics.classification.") for each in type(part).__mro__)
        and _BY_ORDER.isdisjoint(each.__name__ for each in type(part).__mro__)
        for part in parts
    )


def _number(value: Any) -> float | int | None:
    """Return a value with exactly one number as a plain number; None for any other value."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item() if np.prod(value.shape) == 1 else None
    return value + 0 if isinstance(value, bool | int | float) else None
