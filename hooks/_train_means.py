"""The means of the variables of the train stream since the last row that a hook wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emrun.base.errors import HookError
from emrun.base.wording import listed
from emrun.epoch_data import declared
from emrun.hook import Loop
from emrun.hooks._parts.running_stats import RunningStats


class TrainMeans:
    """Collects the values of the train stream between two rows, without waiting for the device.

    Args:
        owner: the class of the hook that writes the rows, for messages.
        variables: which variables; None for those of which earlier hooks write statistics. Those that the batches do
            not have, such as what a hook computes once an epoch, are left out.
    """

    def __init__(self, owner: str, variables: Sequence[str] | None) -> None:
        self._owner = owner
        self._variables = variables
        self._stats: dict[str, RunningStats] = {}

    def add(self, loop: Loop, batch_data: Mapping[str, Any]) -> None:
        """Add the values of a batch of the train stream.

        Raises:
            HookError: the batch has none of the variables, or a variable is not a number for each example or batch.
        """
        stats = self._stats or self._begin(loop, batch_data)
        weights = batch_data.get("example_weight")
        name = ""
        try:
            for name, running in stats.items():
                running.add(batch_data[name], loop.batch_length, weights)
        except KeyError as error:
            raise HookError(f"{self._owner}: a batch of the train stream has no variable {name!r}") from error
        except (TypeError, ValueError) as error:
            raise HookError(f"{self._owner}: train stream, variable {name!r}: {error}") from error

    def take(self) -> dict[str, float]:
        """Return variable -> mean since the last call, and begin anew; this waits for the device."""
        means = {name: running.result()["mean"] for name, running in self._stats.items()}
        self.forget()
        return means

    def forget(self) -> None:
        """Begin anew."""
        self._stats = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the values since the last row."""
        return {name: running.state_dict() for name, running in self._stats.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values since the last row."""
        self.forget()
        for name, saved in state.items():
            self._stats[name] = RunningStats(["mean"])
            self._stats[name].load_state_dict(saved)

    def _begin(self, loop: Loop, batch_data: Mapping[str, Any]) -> dict[str, RunningStats]:
        wanted = list(written_by(loop.hooks)) if self._variables is None else self._variables
        self._stats = {name: RunningStats(["mean"]) for name in wanted if name in batch_data}
        if not self._stats:
            raise HookError(
                f"{self._owner} writes the means of {listed(list(wanted))} between epochs, but the batches of the "
                f"train stream have {listed(list(batch_data))}; set every to epochs, or name other variables"
            )
        return self._stats


def written_by(hooks: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return variable -> aggregations -> None, of what hooks declare to write into the data of epochs."""
    found: dict[str, dict[str, Any]] = {}
    for hook in hooks:
        for address in declared(hook, "writes") or ():
            variable, _, aggregation = address.partition("/")
            found.setdefault(variable, {})[aggregation or "mean"] = None
    return found
