"""Rows between epochs: statistics of what each train batch has, made once for all sinks that ask for an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from emrun.base.errors import HookError
from emrun.base.wording import listed
from emrun.epoch_data import declared, learning_rates
from emrun.hook import Loop
from emrun.record.intervals import Every
from emrun.record.running_stats import RunningStats

LAST = "last"
"""The aggregation that is the mean of the last batch."""


class IntervalRows:
    """Collects the values of the train stream and makes a row at each interval, without waiting for the device before.

    Args:
        add: gets interval, means, and the main loop for each row that is due.
        flush: called at the end of a train stream, because the next row may be far away.
    """

    whole_batches = True

    def __init__(self, add: Callable[[str, dict[str, float], Loop], None], flush: Callable[[], None]) -> None:
        self.main_loop: Loop
        self._add = add
        self._flush = flush
        self._asked: dict[str, _Means] = {}
        self.recorded: dict[str, Any] = {}
        """What hooks have recorded for the current batch."""
        self.before_training: Any = None
        """Starts the clocks. The loop calls this event and the next two after those of the hooks, unless it is None."""
        self.after_batch: Any = None
        """Adds the values of a batch, and makes rows."""
        self.after_stream: Any = None
        """Makes rows that are due with the last update of a train stream."""

    def register_mainloop(self, main_loop: Loop) -> None:
        """Get the loop, whose train stream is looked at."""
        self.main_loop = main_loop

    def ask(
        self,
        owner: str,
        every: Every | None,
        variables: Mapping[str, Sequence[str]] | Iterable[str] | None = None,
    ) -> str:
        """Ask for rows; to be called when a hook is registered.

        Args:
            owner: the class of the hook, for messages.
            every: when a row is due; None for no rows.
            variables: which variables, or variable -> its aggregations beside the mean; by default those of which hooks
                write statistics. An aggregation has the name `VARIABLE/AGGREGATION` in the rows.

        Returns:
            The interval as the rows have it.
        """
        if every is None or not every.is_within_epochs:
            return ""
        self.before_training = self._start
        self.after_batch = self._take
        self.after_stream = self._end
        self._asked.setdefault(str(every.interval), _Means(every)).ask(owner, variables)
        return str(every.interval)

    def note(self, name: str, value: Any) -> None:
        """Note a value that a hook records for the current batch."""
        if self._asked:
            self.recorded[name] = value

    def _start(self) -> None:
        for means in self._asked.values():
            means.every.start()

    def _take(self, stream_name: str, batch_data: Mapping[str, Any]) -> None:
        loop = self.main_loop
        if not loop.training or stream_name != loop.train_stream_name:
            return
        for means in self._asked.values():
            means.add(loop, batch_data, self.recorded)
            if means.every.is_batch_due(loop):
                self._make(means)
        self.recorded.clear()

    def _end(self, stream_name: str) -> None:
        loop = self.main_loop
        if not loop.training and stream_name == loop.train_stream_name and loop.iterations_done:
            for means in self._asked.values():
                if means.every.is_stream_due(loop, stream_name):
                    means.record(self.recorded)
                    self._make(means)
                means.forget()  # the epoch has a row of its own
            self.recorded.clear()
            self._flush()

    def _make(self, means: _Means) -> None:
        loop = self.main_loop
        self._add(str(means.every.interval), {**learning_rates(loop.model), **means.take()}, loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the values since the last rows."""
        return {interval: means.state_dict() for interval, means in self._asked.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values since the last rows."""
        self.recorded.clear()
        for interval, means in self._asked.items():
            means.load_state_dict(state.get(interval, {}))


class _Means:
    """The means of an interval."""

    def __init__(self, every: Every) -> None:
        self.every = every
        self._owners: dict[str, list[str] | None] = {}
        self._stats: dict[str, RunningStats] = {}  # of variables of the batches
        self._recorded: dict[str, RunningStats] = {}  # of what hooks record, and of the minimised loss
        self._names: list[str] | None = None  # from the first batch of an epoch on, the variables to copy
        self._aggregations: dict[str, list[str]] = {}  # of variables with others than the mean
        self._last: list[str] = []  # the variables of which the value of the last batch is wanted

    def ask(self, owner: str, variables: Mapping[str, Sequence[str]] | Iterable[str] | None) -> None:
        self._owners[owner] = None if variables is None else list(variables)
        if not isinstance(variables, Mapping):
            return
        for name, aggregations in variables.items():
            if LAST in aggregations and name not in self._last:
                self._last.append(name)
            known = self._aggregations.setdefault(name, ["mean"])
            known += [aggregation for aggregation in aggregations if aggregation != LAST and aggregation not in known]

    def _of(self, name: str) -> RunningStats:
        return RunningStats(self._aggregations.get(name, ["mean"]))

    def add(self, loop: Loop, batch_data: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
        """Add the values of a batch, of the variables that it has.

        Raises:
            HookError: the batch has none of the variables, or a variable is not a number for each example or batch.
        """
        if self._names is None:
            self._names = self._find(loop, batch_data)
            for hook in loop.hooks:
                for name, other in getattr(hook, "collected", {}).get(loop.train_stream_name, {}).items():
                    if name in self._names and name in batch_data and other.source is batch_data[name]:
                        self._stats.setdefault(name, self._of(name)).follow(other)
                        self._names.remove(name)
        weights = batch_data.get("example_weight")
        length = loop.batch_length
        name = ""
        try:
            for name in self._names:
                if name in batch_data:
                    running = self._stats.get(name)
                    if running is None:
                        running = self._stats[name] = self._of(name)
                    running.add(batch_data[name], length, weights)
            for name in self._last:
                if name in self._stats and name in batch_data:
                    last = self._stats[f"{name}/{LAST}"] = RunningStats(["mean"])
                    last.add(batch_data[name], length, weights)
        except (TypeError, ValueError) as error:
            raise HookError(f"{listed(list(self._owners))}: train stream, variable {name!r}: {error}") from error
        if "loss" not in self._stats and (loss := loop.model.step_values().get("loss")) is not None:
            recorded = {"loss": loss, **recorded}
        if recorded:
            self.record(recorded)

    def record(self, recorded: Mapping[str, Any]) -> None:
        """Add values that hooks record for a batch."""
        for name, value in recorded.items():
            if name not in self._stats:
                self._recorded.setdefault(name, self._of(name)).add(value, 1)
                if name in self._last:
                    last = self._recorded[f"{name}/{LAST}"] = RunningStats(["mean"])
                    last.add(value, 1)

    def _find(self, loop: Loop, batch_data: Mapping[str, Any]) -> list[str]:
        """Return the names of the variables."""
        written = written_by(loop.hooks, loop.train_stream_name)
        has_loss = "loss" in loop.model.step_values()  # so that the row has something
        for owner, names in self._owners.items():
            wanted = names if names is not None else [] if has_loss else written
            if wanted and not any(name in batch_data for name in wanted):
                raise HookError(
                    f"{owner} writes the means of {listed(wanted)} between epochs, but the batches of the train stream "
                    f"have {listed(list(batch_data))}; set every to epochs, or name other variables"
                )
        return list(dict.fromkeys([*written, *[name for names in self._owners.values() for name in names or ()]]))

    def take(self) -> dict[str, float]:
        """Return variable -> mean since the last call, and begin anew; this waits for the device.

        Other aggregations are `VARIABLE/AGGREGATION`.
        """
        means = {}
        for name, stats in {**self._stats, **self._recorded}.items():
            if stats.count:
                for aggregation, value in stats.result().items():
                    means[name if aggregation == "mean" else f"{name}/{aggregation}"] = value
        self._stats = {name: stats for name, stats in self._stats.items() if stats.begin_anew()}
        self._recorded = {}
        return means

    def forget(self) -> None:
        """Begin anew, with the variables that the next batch has."""
        self._stats = {}
        self._recorded = {}
        self._names = None

    def state_dict(self) -> dict[str, Any]:
        by_kind = {"stats": self._stats, "recorded": self._recorded}
        states = {
            kind: {name: stats.state_dict() for name, stats in by_name.items()} for kind, by_name in by_kind.items()
        }
        return {**states, "aggregations": self._aggregations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        if state.get("aggregations", {}) != self._aggregations:
            return  # the totals are not those of the aggregations that are wanted now
        for kind, into in (("stats", self._stats), ("recorded", self._recorded)):
            for name, saved in state.get(kind, {}).items():
                into[name] = self._of(name)
                into[name].load_state_dict(saved)


def written_by(hooks: Iterable[Any], stream: str | None = None) -> list[str]:
    """Return the variables that hooks declare to write into the data of epochs, each once; with a stream, for it."""
    variables: dict[str, None] = {}
    for hook in hooks:
        for address in declared(hook, "writes") or ():
            variable = address.partition("/")[0]
            if stream is None or stream in hook.only_in.get(variable, (stream,)):
                variables[variable] = None
    return list(variables)
