"""Compute statistics of variables over each stream of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData, VariableName
from emrun.base.wording import did_you_mean
from emrun.epoch_data import RUNNING
from emrun.hook import AbstractHook, Loop
from emrun.hooks._parts.running_stats import RunningStats

_LOG = logging.getLogger(__name__)

ByVariable = Mapping[VariableName, str | Sequence[str]]
"""Variable -> its aggregation, or a list of its aggregations."""


class ComputeStats(AbstractHook):
    """Computes statistics of variables over each stream and adds them to the data of the epoch.

        hooks:
          - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}

    `- ComputeStats` alone computes the mean of `loss` and of each entry of `model.metrics`, and leaves out what the
    batches of a stream do not have, or not as a number for each example or batch. `emrun train` puts it before the
    hooks of a config that does not list this hook, unless the model is a class of your own.

    The hooks that follow and `metrics.jsonl` have these statistics. A metric of the whole stream is one number, which
    the model writes with or without this hook.

    `mean`, `sum`, `min`, `max`, `std`, `var`, `count`, `nancount` and `nanfraction` are computed batch by batch, in
    constant memory and double precision. Nothing is copied from the device before the end of the epoch. Any other
    NumPy function that reduces an array to one number, such as `median`, is called with all values of the epoch, which
    are stored until then.

    If a variable has one entry per example, each number of each entry counts once. A scalar counts once per example of
    its batch. `std` and `var` divide by the number of values (population statistics). If a batch has a variable
    `example_weight` of shape (B,), the weights apply to `mean`, `std` and `var`; a scalar of a batch whose weights are
    all 0 counts only for `count`. If no batch has weight, the mean is NaN.

    Args:
        variables: a list of names and mappings `{name: [aggregation, ...]}`; a name alone means the mean. A single
            mapping for all variables is allowed too: `{loss: [mean, std], accuracy: mean}`. None for the loss and the
            metrics of the model (`AbstractModel.metric_names`).

    Raises:
        ArgumentError: `variables` has another form, or an aggregation is unknown.
        HookError: a batch does not have one of `variables`, it is not a number, or its length differs from that of the
            batch.
    """

    every_rank = True

    def __init__(self, variables: Sequence[VariableName | ByVariable] | ByVariable | None = None) -> None:
        super().__init__()
        self._asks_model = variables is None
        self._stats: dict[str, dict[str, RunningStats]] = {}
        self._left_out: set[tuple[str, str]] = set()  # streams and variables of which the log has told
        self._set(_read(["loss"] if variables is None else variables))

    def _set(self, aggregations: dict[str, list[str]]) -> None:
        self._aggregations = aggregations
        self.reads = () if self._asks_model else tuple(self._aggregations)
        self.writes = tuple(f"{name}/{each}" for name, names in self._aggregations.items() for each in names)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Take the names of the metrics from the model, if no variables are given.

        Raises:
            HookError: another statistic than the mean is wanted of a metric of whole streams.
        """
        super().register_mainloop(main_loop)
        if self._asks_model:
            self._set(_read(["loss", *main_loop.model.metric_names]))
        for name in main_loop.model.writes:
            self._leave_to_model(name)

    def _leave_to_model(self, name: str) -> None:
        """Do not compute a statistic of whole streams, which the model writes and no batch has."""
        others = [each for each in self._aggregations.get(name, ()) if each != "mean"]
        if others:
            raise HookError(
                f"ComputeStats: {name!r} is a metric of the whole stream, one number, so it has no {others[0]!r}; "
                "write its name alone, or remove it: the model writes it anyway",
                [each is self for each in self.main_loop.hooks].index(True),
            )
        self._set({each: names for each, names in self._aggregations.items() if each != name})
        self._named_by_arguments = tuple(each for each in self._named_by_arguments if each[1] != name)

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the statistics of the previous epoch."""
        self._stats = {}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the values of a batch to the statistics of its stream."""
        stats = self._stats.get(stream_name)
        if stats is None:
            stats = {name: RunningStats(each) for name, each in self._aggregations.items()}
            self._stats[stream_name] = stats
        weights = batch_data.get("example_weight")
        length = self.main_loop.batch_length
        name, items = "", iter(tuple(stats.items()))
        while True:  # again after a variable that is left out
            try:
                for name, running in items:
                    running.add(batch_data[name], length, weights)
                return
            except (KeyError, TypeError, ValueError) as error:
                self._leave_out(stream_name, name, error)
                del stats[name]

    def _leave_out(self, stream: str, name: str, error: Exception) -> None:
        """Log, once, that a stream has no statistic of a variable.

        Raises:
            HookError: the variable is one of `variables`.
        """
        is_missing = isinstance(error, KeyError)
        what = f": a batch has no variable {name!r}" if is_missing else f", variable {name!r}: {error}"
        if not self._asks_model:
            raise HookError(f"ComputeStats: stream {stream!r}{what}") from error
        if (stream, name) not in self._left_out:
            self._left_out.add((stream, name))
            _LOG.info("ComputeStats: stream %r%s; it has no statistic", stream, what)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Add the statistics to the data of the epoch."""
        for stream, stats in self._stats.items():
            for name, running in stats.items():
                epoch_data.setdefault(stream, {})[name] = running.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the epoch so far."""
        return {
            "aggregations": self._aggregations,
            "stats": {
                stream: {name: running.state_dict() for name, running in stats.items()}
                for stream, stats in self._stats.items()
            },
        }

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the statistics of other ranks."""
        for state in states:
            for stream, saved in state["stats"].items():
                stats = self._stats.setdefault(
                    stream, {name: RunningStats(each) for name, each in self._aggregations.items()}
                )
                for name, running in stats.items():
                    if name in saved:
                        running.merge(saved[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the statistics of an epoch that is resumed in its middle, unless other variables are wanted now."""
        self._stats = {}
        if state["aggregations"] != self._aggregations:
            if state["stats"]:
                _LOG.warning(
                    "ComputeStats: the variables are not those of the checkpoint; the statistics of this epoch cover "
                    "only the batches after the checkpoint"
                )
            return
        for stream, saved in state["stats"].items():
            self._stats[stream] = {name: RunningStats(self._aggregations[name]) for name in saved}
            for name, running in self._stats[stream].items():
                running.load_state_dict(saved[name])


def _read(variables: Any) -> dict[str, list[str]]:
    if isinstance(variables, str) or not isinstance(variables, Sequence | Mapping) or not variables:
        raise ArgumentError(
            "variables", f"{variables!r} is not a list of variables such as [loss, {{accuracy: [mean, std]}}]"
        )
    aggregations: dict[str, list[str]] = {}
    for entry in [variables] if isinstance(variables, Mapping) else variables:
        pairs = entry.items() if isinstance(entry, Mapping) else [(entry, ["mean"])]
        for name, wanted in pairs:
            names = [wanted] if isinstance(wanted, str) else wanted
            if not isinstance(name, str) or not isinstance(names, Sequence) or not names:
                raise ArgumentError("variables", f"{entry!r} is neither a name nor {{name: [aggregation, ...]}}")
            for each in names:
                _check_aggregation(each)
            aggregations.setdefault(name, []).extend(each for each in names if each not in aggregations.get(name, []))
    return aggregations


def _check_aggregation(name: Any) -> None:
    if name in RUNNING:
        return
    function = getattr(np, name, None) if isinstance(name, str) else None
    try:
        usable = callable(function) and isinstance(function(np.array([1.0, 2.0])), Real | np.bool_)
    except Exception:  # a function that fails on two numbers, with whatever error, is not an aggregation
        usable = False
    if not usable:
        hint = did_you_mean(str(name), RUNNING)
        allowed = ", ".join(RUNNING)
        raise ArgumentError(
            "variables",
            f"{name!r} is not an aggregation{hint} (allowed: {allowed}, or a NumPy function such as median)",
        )
