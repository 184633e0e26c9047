"""Which methods of hooks a rank calls, and with what: with its share of a batch, or with the whole batch on rank 0."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from emrun.base.errors import DifferentRanks, HookError, StreamError
from emrun.base.sources import changed, examples_of
from emrun.base.types import Batch, EpochData
from emrun.epoch_data import ByStream
from emrun.events import merges, reads_batches, runs_on_every_rank
from emrun.hook import AbstractHook, Loop
from emrun.loop.agreement import AgreedEndings, one_rank
from emrun.loop.batch_calls import Calls
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.endings import switched_on
from emrun.ranks.group import Ranks, answered
from emrun.ranks.parts import Joined, rows_of, weight_of
from emrun.ranks.shares import Share, rows_in, share_of
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)

Call = Callable[..., Any]


@dataclass(eq=False)
class RankEvents:
    """Chooses what each rank calls at an event; all ranks do this alike.

    Args:
        ranks: the ranks.
        endings: collects what hooks of rank 0 want.
        checks: know whether batches may be left out.
        loop: has the length of the current batch.
    """

    ranks: Ranks
    endings: AgreedEndings
    checks: BatchChecks
    loop: Loop
    _batch: Mapping[str, Any] = field(default_factory=dict, init=False)  # the current one
    _is_told: bool = field(default=False, init=False)
    _spare: dict[tuple[str, bool], Batch] = field(default_factory=dict, init=False)  # see `filled`
    _whole: tuple[int, Mapping[str, Any]] = field(default=(0, {}), init=False)  # of all ranks: its length, its data

    @property
    def share(self) -> tuple[int, int]:
        """The number of rows of this rank in the current batch, and of all ranks."""
        batch, length = self._batch, self.loop.batch_length
        return (length * batch.counts, batch.total) if isinstance(batch, Share) else (length, length)

    def called(self, event: str, hooks: Sequence[tuple[AbstractHook, Call]]) -> list[Call]:
        """Return what to call at an event, for the hooks and their methods, in their order."""
        found: list[Call] = []
        if event == "after_epoch" and not self.ranks.is_first:
            found.append(self._exchange)
        for is_whole, alike in itertools.groupby(
            hooks, lambda each: event == "after_batch" and self._is_whole(each[0])
        ):
            if is_whole:
                found.append(self._gather)
            for hook, call in alike:
                if runs_on_every_rank(hook):
                    found.append(self._as_here(hook, call, event))
                elif self.ranks.is_first:
                    found.append(one_rank(self._with_whole_batch(call) if is_whole else call, self.endings))
        if event == "after_epoch" and self.ranks.is_first:
            found.append(self._exchange)
        return list(map(answered(), found)) if self.loop.model.is_sharded else found

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
                [each is hook for each in self.loop.hooks].index(True),
            )
        return hook.whole_batches

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Give this rank its share of each batch; at the end, raise an error if a batch was empty on all ranks."""
        name, accept, endings, leaves_out = stream.name, calls.intake.accept, self.endings, self.checks.leaves_out
        empty: set[int] = set()  # the batches without rows of this rank
        now, is_usual = 0, False

        def given(batch: Any, *, is_changed: bool) -> Any:
            batch = self.filled(name, batch, is_changed=is_changed)
            if batch.__class__ is Share and not batch.counts:
                empty.add(now)
            self._batch = batch
            return batch

        def taken(batch: Any, number: int) -> Any:
            nonlocal now, is_usual
            now = number
            endings.left -= 1
            if not endings.left:
                endings.must_look = True
            if is_usual and batch.__class__ is Share and batch.counts and batch.whole is None:
                self._batch = batch
                return batch
            if batch.__class__ is Share and batch.whole is not None:
                self._compare(batch.whole, name)
            batch = given(batch, is_changed=False)
            is_usual = not leaves_out and (name, False) in self._spare
            return batch

        def end() -> None:
            empty_everywhere = set.intersection(*self.ranks.all_gathered("empty batches", empty))
            if empty_everywhere:
                place = f"stream {name!r}, batch {min(empty_everywhere)} of the epoch"
                raise StreamError(f"{place}: it is empty on all ranks (see main_loop.on_empty_batch)")

        calls.batches = map(taken, calls.batches, itertools.count())
        calls.intake.accept = lambda batch: accept(given(batch, is_changed=True))
        if self.loop.model.is_sharded:
            calls.run = answered()(calls.run)  # it exchanges weights
        if train and not self._is_told:
            calls.first.append(self._tell)
        calls.end.append(end)

    def filled(self, stream: str, batch: Any, *, is_changed: bool = False) -> Any:
        """Return a batch, with a row that counts nothing if the stream or hooks have left no row of this rank.

        The row is one of the first batch of the stream, which the ranks exchange. If batches may be left out, they also
        exchange the length of each batch. A batch that is empty on all ranks, as far as this is known, stays empty.

        Args:
            stream: the name of the stream.
            batch: the batch, which has not been checked.
            is_changed: whether hooks may have changed the batch.
        """
        rows = rows_in(batch) if isinstance(batch, Mapping) else -1
        if rows < 0:
            return batch  # the checks report it
        key = stream, is_changed
        total, whole = (batch.total, batch.whole) if isinstance(batch, Share) else (rows, None)
        if self.checks.leaves_out:
            of_all = torch.tensor(rows)
            self.ranks.add_up(of_all)
            total = int(of_all)
        if key not in self._spare:
            own = {source: rows_of(values, 0, 1) for source, values in batch.items()} if rows else None
            found = [each for each in self.ranks.all_gathered("spare row", _in_main_memory(own)) if each is not None]
            if found:
                self._spare[key] = found[0]
        if key not in self._spare or (self.checks.leaves_out and not total):
            return {source: rows_of(values, 0, 0) for source, values in batch.items()}  # it may have a row of another
        if not rows and not (isinstance(batch, Share) and not batch.counts and examples_of(batch) > 0):
            return share_of(self._spare[key], False, total, whole)
        if isinstance(batch, Share):
            batch.total = total
        return batch

    def _compare(self, whole: str, stream: str) -> None:
        """Check that all ranks read the same batch."""
        others = self.ranks.all_gathered("checksum of the batch", whole)
        different = [rank for rank, each in enumerate(others) if each != others[0]]
        if different:
            raise DifferentRanks(
                f"rank {different[0]} reads another batch of stream {stream!r} than rank 0: the stream depends on "
                "random numbers that are not those of `ctx`, on the time, or on files that differ; take the order of "
                "the rows from `ctx.batches`"
            )

    def _tell(self, outputs: object) -> None:
        """Log how the first batch is shared."""
        self._is_told = True
        size, total = self.ranks.size, self.share[1]
        rows = str(total // size) if total % size == 0 else f"{total // size} to {total // size + 1}"
        _LOG.info("batch %d = %d ranks x %s", total, size, rows)

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

    def _as_here(self, hook: AbstractHook, call: Call, event: str) -> Call:
        """Return what this rank calls for a method of a hook that runs on every rank."""
        if event == "after_batch" and (hook.reads != () or merges(hook)):
            return self._with_share(call)
        return _without_effect_on_data(call) if event == "after_epoch" and not self.ranks.is_first else call

    def _with_share(self, call: Call) -> Call:
        """Return `after_batch` of a hook that reads batches on every rank; not called if the rank has no rows."""

        @wraps(call)
        def called(**arguments: Any) -> None:
            if self.share[0]:
                call(**arguments)

        return called

    def _gather(self, stream_name: str, batch_data: Mapping[str, Any]) -> None:
        """Collect the batch on rank 0, for the hooks after this that get whole batches there."""
        self._whole = 0, {}  # frees the last one
        joined, rows = Joined("several ranks", "several ranks"), self.share[0]
        for count, data in self.ranks.gathered("whole batch", (rows, _in_main_memory(batch_data) if rows else None)):
            if data is not None:
                joined.counts.append(count)
                joined.add(data, weight_of(data, count))
        self._whole = sum(joined.counts), joined.on_demand()

    def _with_whole_batch(self, call: Call) -> Call:
        """Return `after_batch` of a hook with the batch of all ranks; not called if the batch is empty on all ranks."""

        @wraps(call)
        def called(stream_name: str, batch_data: object) -> None:
            length, whole = self._whole
            if length:  # otherwise there is an error at the end of the stream
                with switched_on(self.loop, "batch_length", length):
                    call(stream_name=stream_name, batch_data=whole)

        return called


def _without_effect_on_data(call: Call) -> Call:
    """Return `after_epoch` of a hook of a rank that has the data of rank 0, and would write those of its own rows."""

    @wraps(call)
    def called(epoch_id: int, epoch_data: EpochData) -> None:
        own = ByStream((name, dict(values)) for name, values in epoch_data.items())
        own.before = getattr(epoch_data, "before", {})
        call(epoch_id=epoch_id, epoch_data=own)

    return called


def _in_main_memory(value: Any) -> Any:
    """Return values with all tensors in main memory."""
    return changed(value, lambda part: part.detach().cpu() if hasattr(part, "detach") else part)
