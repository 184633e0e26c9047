"""Compute statistics of variables over each stream of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from emrun.base.arguments import check_choice
from emrun.base.errors import HookError
from emrun.base.types import EpochData, VariableName
from emrun.base.wording import did_you_mean, listed
from emrun.hook import Loop
from emrun.hooks._shared.aggregations import ByVariable, read
from emrun.hooks._shared.streams import OfStreams
from emrun.record.running_stats import RunningStats

_LOG = logging.getLogger(__name__)

MissingVariable = Literal["error", "skip"]


class ComputeStats(OfStreams):
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

    Streams may have different variables: list the hook several times, with `streams`. A variable that only some batches
    have, such as the loss of a task, is one of `on_missing_variable: skip`; a stream of which no batch has it has no
    statistic of it, and a warning says so:

        - ComputeStats: {variables: [loss]}
        - ComputeStats: {variables: [overlap], streams: [valid], on_missing_variable: skip}

    Args:
        variables: a list of names and mappings `{name: [aggregation, ...]}`; a name alone means the mean. A single
            mapping for all variables is allowed too: `{loss: [mean, std], accuracy: mean}`. None for the loss and the
            metrics of the model (`AbstractModel.metric_names`).
        streams: the streams whose statistics are computed; by default all. A metric of the model that has `streams` of
            its own is left out elsewhere.
        on_missing_variable: what to do if a batch does not have a variable: `error`, or `skip` to compute the
            statistics over the batches that have it.

    Raises:
        ArgumentError: `variables` has another form, an aggregation is unknown, or `streams` is not a list of names.
        HookError: a batch does not have one of `variables`, it is not a number, or its length differs from that of the
            batch; or the dataset does not have one of `streams`.
    """

    every_rank = True

    def __init__(
        self,
        variables: Sequence[VariableName | ByVariable] | ByVariable | None = None,
        streams: Sequence[str] | None = None,
        on_missing_variable: MissingVariable = "error",
    ) -> None:
        super().__init__(streams)
        check_choice("on_missing_variable", on_missing_variable, MissingVariable)
        self._asks_model = variables is None
        self._skips = on_missing_variable == "skip"
        self._there: dict[str, list[str]] = {}  # stream -> the variables of its first batch
        self.collected: dict[str, dict[str, RunningStats]] = {}
        """Stream -> variable -> its values in this epoch; the means between epochs are made from the same copies."""
        self._left_out: set[tuple[str, str]] = set()  # streams and variables of which the log has told
        self._set(read(["loss"] if variables is None else variables))

    def _set(self, aggregations: dict[str, list[str]]) -> None:
        self._aggregations = aggregations
        of_model = self.main_loop.model.only_in if hasattr(self, "main_loop") else {}

        # the streams of each variable, if they are not all
        self.only_in = {}
        for name in aggregations:
            limits = [set(streams) for streams in (self._streams, of_model.get(name)) if streams is not None]
            if limits:
                self.only_in[name] = sorted(set.intersection(*limits))

        # what the loop checks
        if self._asks_model:
            self.reads = ()
        elif self._skips or self._streams:
            self.reads = None
        else:
            self.reads = tuple(name for name in aggregations if name not in self.only_in)
        self._named_by_arguments = tuple(
            argument for argument in self._named_by_arguments if argument[1] in (self.reads or ())
        )
        self.writes = tuple(
            f"{name}/{aggregation}" for name, names in self._aggregations.items() for aggregation in names
        )

    def register_mainloop(self, main_loop: Loop) -> None:
        """Take the names of the metrics from the model, if no variables are given; check the streams.

        Raises:
            HookError: another statistic than the mean is wanted of a metric of whole streams; or none of the streams
                has a metric.
        """
        super().register_mainloop(main_loop)
        self._set(read(["loss", *main_loop.model.metric_names]) if self._asks_model else self._aggregations)
        nowhere = next((name for name, streams in self.only_in.items() if not streams), None)
        if nowhere is not None and not self._asks_model:
            streams = listed(list(main_loop.model.only_in[nowhere]))
            raise self._error(f"ComputeStats: the model has {nowhere!r} only in {streams} (model.metrics)", nowhere)
        for name in main_loop.model.writes:
            self._leave_to_model(name)

    def _leave_to_model(self, name: str) -> None:
        """Do not compute a statistic of whole streams, which the model writes and no batch has."""
        further = [aggregation for aggregation in self._aggregations.get(name, ()) if aggregation != "mean"]
        if further:
            raise self._error(
                f"ComputeStats: {name!r} is a metric of the whole stream, one number, so it has no {further[0]!r}; "
                "write its name alone, or remove it: the model writes it anyway"
            )
        self._set({variable: names for variable, names in self._aggregations.items() if variable != name})

    def _error(self, message: str, *about: str) -> HookError:
        return HookError(message, self._index, about)

    def _of(self, stream: str) -> dict[str, list[str]]:
        """Return variable -> aggregations of a stream."""
        return {
            name: aggregations
            for name, aggregations in self._aggregations.items()
            if stream in self.only_in.get(name, (stream,))
        }

    def _new(self, stream: str) -> dict[str, RunningStats]:
        """Return variable -> its statistics, of a stream of which no batch was read."""
        return {name: RunningStats(aggregations) for name, aggregations in self._of(stream).items()}

    def before_epoch(self, epoch_id: int) -> None:
        """Drop the statistics of the previous epoch; set aside those of an epoch in which a hook evaluates."""
        self._outer = self.collected if self.main_loop.evaluating else {}
        self.collected = {}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the values of a batch to the statistics of its stream."""
        stats = self.collected.get(stream_name)
        if stats is None:
            stats = self.collected[stream_name] = self._new(stream_name)
            self._there[stream_name] = list(batch_data)
        weights = batch_data.get("example_weight")
        length = self.main_loop.batch_length
        for name, running in tuple(stats.items()):
            try:
                running.add(batch_data[name], length, weights)
            except (KeyError, TypeError, ValueError) as error:
                if not (self._skips and isinstance(error, KeyError)):
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
        for stream, stats in self.collected.items():
            for name, running in stats.items():
                if running.count or not self._skips:
                    epoch_data.setdefault(stream, {})[name] = running.result()
                elif name not in epoch_data.get(stream, {}) and (stream, name) not in self._left_out:
                    self._left_out.add((stream, name))
                    known = self._there.get(stream, [])
                    _LOG.warning(
                        "ComputeStats: no batch of stream %r has a variable %r%s; there is no statistic of it (the "
                        "first batch has %s)",
                        stream,
                        name,
                        did_you_mean(name, known),
                        listed(known),
                    )
        if self.main_loop.evaluating:
            self.collected = self._outer

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the epoch so far."""
        return {
            "aggregations": {stream: self._of(stream) for stream in self.collected},
            "stats": {
                stream: {name: running.state_dict() for name, running in stats.items()}
                for stream, stats in self.collected.items()
            },
        }

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the statistics of other ranks."""
        for state in states:
            for stream, saved in state["stats"].items():
                for name, running in self.collected.setdefault(stream, self._new(stream)).items():
                    if name in saved:
                        running.merge(saved[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the statistics of an epoch that is resumed in its middle, unless other variables are wanted now."""
        self.collected = {}
        if any(self._of(stream) != aggregations for stream, aggregations in state["aggregations"].items()):
            _LOG.warning(
                "ComputeStats: the variables are not those of the checkpoint; the statistics of this epoch cover only "
                "the batches after the checkpoint"
            )
            return
        for stream, saved in state["stats"].items():
            self.collected[stream] = {name: RunningStats(self._aggregations[name]) for name in saved}
            for name, running in self.collected[stream].items():
                running.load_state_dict(saved[name])
