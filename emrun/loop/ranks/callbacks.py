"""Which methods of hooks a rank calls, and with what: with its share of a batch, or with the whole batch on rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from emrun.base.errors import HookError
from emrun.base.types import EpochData
from emrun.epoch_data import ByStream
from emrun.events import merges, reads_batches, runs_on_every_rank
from emrun.hook import AbstractHook
from emrun.loop.progress import Progress
from emrun.loop.ranks.batches import RankBatches, in_main_memory
from emrun.loop.ranks.requests import SharedRequests, one_rank
from emrun.ranks.group import Ranks, answered
from emrun.ranks.parts import Joined, weight_of

Call = Callable[..., Any]


@dataclass(eq=False)
class RankCallbacks:
    """Chooses what each rank calls at an event; all ranks do this alike.

    Args:
        ranks: the ranks.
        hooks: the hooks.
        progress: has the length of the current batch.
        requests: collects what hooks of rank 0 want.
        batches: knows the share of this rank in the current batch.
        is_sharded: whether each rank has a part of the model, so that a hook may wait for the others.
    """

    ranks: Ranks
    hooks: list[AbstractHook]
    progress: Progress
    requests: SharedRequests
    batches: RankBatches
    is_sharded: bool
    _whole_length: int = field(default=0, init=False)  # of the current batch of all ranks
    _whole: Mapping[str, Any] = field(default_factory=dict, init=False)  # its data

    def calls_of(self, event: str, methods: Sequence[tuple[AbstractHook, Call]]) -> list[Call]:
        """Return what to call at an event, for the hooks and their methods, in their order."""
        calls: list[Call] = []
        if event == "after_epoch" and not self.ranks.is_first:
            calls.append(self._exchange)
        for is_whole, group in itertools.groupby(
            methods, lambda each: event == "after_batch" and self._is_whole(each[0])
        ):
            if is_whole:
                calls.append(self._gather)
            for hook, method in group:
                if runs_on_every_rank(hook):
                    calls.append(self._as_here(hook, method, event))
                elif self.ranks.is_first:
                    calls.append(one_rank(self._with_whole_batch(method) if is_whole else method, self.requests))
        if event == "after_epoch" and self.ranks.is_first:
            calls.append(self._exchange)
        return list(map(answered(), calls)) if self.is_sharded else calls

    def _is_whole(self, hook: AbstractHook) -> bool:
        """Return whether a hook gets whole batches on rank 0.

        Raises:
            HookError: it takes the data of batches, and does not declare how.
        """
        if runs_on_every_rank(hook):
            return False
        if not hook.whole_batches and hook.reads != () and reads_batches(hook):
            raise HookError(
                f"{type(hook).__name__}.after_batch takes batch_data, and several ranks have parts of each batch: set "
                "whole_batches = True in the class, and the hook gets whole batches on rank 0, or every_rank = True, "
                "and it gets the rows of each rank",
                [other is hook for other in self.hooks].index(True),
            )
        return hook.whole_batches

    def merge(self, hooks: Sequence[AbstractHook]) -> None:
        """Give rank 0 what the hooks of other ranks have collected in the epoch."""
        for hook in filter(merges, hooks):
            states = self.ranks.gathered(f"state of hook {type(hook).__name__}", hook.state_dict())
            if self.ranks.is_first:
                hook.merge(states[1:])

    def _exchange(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Give all ranks the data of the epoch that rank 0 has after its hooks."""
        received = self.ranks.from_first("epoch data", {name: dict(values) for name, values in epoch_data.items()})
        if not self.ranks.is_first:
            epoch_data.clear()
            epoch_data.update(received)

    def _as_here(self, hook: AbstractHook, method: Call, event: str) -> Call:
        """Return what this rank calls for a method of a hook that runs on every rank."""
        if event == "after_batch" and (hook.reads != () or merges(hook)):
            return self._with_share(method)
        if event == "after_epoch" and not self.ranks.is_first:
            return _without_effect_on_data(method)
        return method

    def _with_share(self, method: Call) -> Call:
        """Return `after_batch` of a hook that reads batches on every rank; not called if the rank has no rows."""

        @wraps(method)
        def called(**arguments: Any) -> None:
            if self.batches.rows:
                method(**arguments)

        return called

    def _gather(self, stream_name: str, batch_data: Mapping[str, Any]) -> None:
        """Collect the batch on rank 0, for the hooks after this that get whole batches there."""
        self._whole = {}  # frees the last one
        self._whole_length = 0
        joined = Joined("several ranks", "several ranks")
        rows = self.batches.rows
        for count, data in self.ranks.gathered("whole batch", (rows, in_main_memory(batch_data) if rows else None)):
            if data is not None:
                joined.counts.append(count)
                joined.add(data, weight_of(data, count))
        self._whole = joined.on_demand()
        self._whole_length = sum(joined.counts)

    def _with_whole_batch(self, method: Call) -> Call:
        """Return `after_batch` of a hook with the batch of all ranks; not called if the batch is empty on all ranks."""

        @wraps(method)
        def called(stream_name: str, batch_data: object) -> None:
            if self._whole_length:  # otherwise there is an error at the end of the stream
                with self.progress.whole_batch(self._whole_length):
                    method(stream_name=stream_name, batch_data=self._whole)

        return called


def _without_effect_on_data(method: Call) -> Call:
    """Return `after_epoch` of a hook of a rank that has the data of rank 0, and would write those of its own rows."""

    @wraps(method)
    def called(epoch_id: int, epoch_data: EpochData) -> None:
        own_data = ByStream((name, dict(values)) for name, values in epoch_data.items())
        own_data.before = getattr(epoch_data, "before", {})
        method(epoch_id=epoch_id, epoch_data=own_data)

    return called
