"""Save a checkpoint whenever a statistic is better than before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from emrun.base.arguments import check_count, safe_component
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData, Policy
from emrun.base.wording import short
from emrun.epoch_data import named
from emrun.hooks._parts.statistic import Condition, Statistic
from emrun.hooks.save_latest import SaveLatest
from emrun.storage.checkpoints.manifest import numbered, share_names

_LOG = logging.getLogger(__name__)


class SaveBest(SaveLatest):
    """Saves a checkpoint after each epoch in which a statistic is better than in all previous epochs.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - SaveBest: {variable: accuracy, condition: max}

    NaN is never better, and of equal values the earliest counts. With `keep: 3`, the three best checkpoints are kept:
    they are named by their epochs, `best-7`, `best-12`, `best-9`, and the best of them is also `best`. `also` lists
    more statistics, each with checkpoints of its own; those of `valid/loss` are named `best-valid-loss`:

        - SaveBest: {variable: accuracy, condition: max, keep: 3, also: {valid/loss: min}}

    Args:
        model_name: the name of the checkpoint. All other names begin with it.
        variable: the variable to compare.
        condition: `min` if smaller values are better, `max` if larger values are better.
        stream: the stream of the variable; epochs in which the stream is not evaluated are skipped.
        aggregation: the aggregation to compare; null if the data of the epoch has one plain number for the variable.
        on_save_failure: what to do if the checkpoint cannot be saved, for whatever reason: `error`, `warn` or
            `ignore`.
        keep: how many of the best checkpoints to keep, for each statistic.
        also: more statistics: `stream/variable` (its mean) or `stream/variable/aggregation`, each with its condition.

    Raises:
        ArgumentError: an argument has a value that is not allowed, or `model_name` cannot name a directory.
        HookError: there is no run directory, or the statistic is missing or not a number.
    """

    def __init__(
        self,
        model_name: str = "best",
        variable: str = "loss",
        condition: Condition = "min",
        stream: str = "valid",
        aggregation: str | None = "mean",
        on_save_failure: Policy = "error",
        keep: int = 1,
        also: Mapping[str, Condition] | None = None,
    ) -> None:
        super().__init__(on_save_failure)
        if not isinstance(model_name, str) or not model_name:
            raise ArgumentError("model_name", f"{model_name!r} is not a name")
        check_count("keep", keep, minimum=1)
        if also is not None and not isinstance(also, Mapping):
            raise ArgumentError("also", f"{also!r} is not a mapping of addresses to conditions, {{valid/loss: min}}")
        self.name = model_name
        statistic = Statistic("SaveBest", variable, condition, stream, aggregation)
        self._bests = [_Best("model_name", model_name, statistic, keep)]
        for address, wanted in (also or {}).items():
            statistic = Statistic.at("SaveBest", "also", address, wanted)
            best = _Best("also", f"{model_name}-{address.replace('/', '-')}", statistic, keep)
            for other in self._bests:
                if other.statistic.identity == statistic.identity:
                    raise ArgumentError("also", f"{address!r} is compared already; remove it from also")
                if share_names(other.name, best.name):
                    first, second = other.statistic.address, statistic.address
                    raise ArgumentError(
                        "also",
                        f"checkpoints of {first} and of {second} would have the same name, {best.name!r}; add another "
                        "SaveBest with its own model_name",
                    )
            self._bests.append(best)
        self.saves = tuple(best.name for best in self._bests)
        self.monitors = tuple(best.statistic.address for best in self._bests)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request the checkpoint under the names of those statistics that are better than before."""
        if self.main_loop.evaluating:
            return
        for best in self._bests:
            value = best.statistic.read(epoch_data)
            for name in best.take(value, epoch_id) if value is not None else ():
                self.main_loop.request_checkpoint(name, self._on_save_failure, best.superfluous)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far with their epochs, each with its statistic and its sign."""
        return {
            best.name: {
                "of": best.statistic.identity,
                "kept": [{"value": value, "epoch": epoch} for value, epoch in best.kept],
            }
            for best in self._bests
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best values so far, except of a statistic that this hook did not compare before."""
        for best in self._bests:
            saved, statistic = state.get(best.name), best.statistic
            if saved is not None and saved["of"] == statistic.identity:
                best.kept = [(each["value"], each["epoch"]) for each in saved["kept"][: best.keep]]
            elif saved is not None:
                _LOG.warning(
                    "SaveBest now compares another statistic, %s (%s); its next value counts as the best, and its "
                    "checkpoint replaces those named %s",
                    statistic.address,
                    statistic.condition,
                    best.name,
                )
            else:
                _LOG.warning(
                    "SaveBest has not saved checkpoints named %s before; the next %s counts as the best",
                    *(best.name, statistic.address),
                )


class _Best:
    """The best values of a statistic so far, and the names of their checkpoints.

    Args:
        argument: the argument from which the name is made, for messages.
        name: the name of the best checkpoint; characters that a file name cannot have are replaced.
        statistic: the statistic.
        keep: how many checkpoints to keep.
    """

    def __init__(self, argument: str, name: str, statistic: Statistic, keep: int) -> None:
        self.name = safe_component(argument, name)
        self.statistic = statistic
        self.keep = keep
        self.kept: list[tuple[float, int]] = []
        """The values that are kept and their epochs, the best first."""

    def take(self, value: float, epoch_id: int) -> list[str]:
        """Compare the value of an epoch; return the names for the checkpoint of the epoch, if it is to be kept."""
        is_better = self.statistic.is_better
        rank = next((i for i, (other, _) in enumerate(self.kept) if is_better(value, other)), len(self.kept))
        if rank >= self.keep or not is_better(value, None):
            return []
        self.kept.insert(rank, (value, epoch_id))
        del self.kept[self.keep :]
        if rank == 0:
            _LOG.info("new best %s: %s", "/".join(named(self.statistic.address)), short(value))
        names = [f"{self.name}-{epoch_id}"] if self.keep > 1 else []
        return [self.name, *names] if rank == 0 else names

    def superfluous(self, names: Iterable[str]) -> list[str]:
        """Return the names of checkpoints that are not among the best any more."""
        if self.keep == 1:
            return []
        kept = {f"{self.name}-{epoch}" for _, epoch in self.kept}
        return [name for name in numbered(self.name, names) if name not in kept]
