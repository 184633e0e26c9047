"""How several ranks end a run, and save checkpoints, at the same point: what one of them wants, all do.

A limit that is counted is the same on every rank and needs no agreement. A signal reaches one rank, a hook of rank 0
sees what others do not, and clocks differ: these are wishes. A small reduction that is started after one iteration and
ended some iterations later tells every rank whether any of them has a wish; then they exchange the wishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from time import perf_counter
from typing import Any, NamedTuple

import torch

from emrun.base.types import InsteadOf, InterruptPolicy, Policy
from emrun.hook import TrainingTerminated
from emrun.loop.interrupts import Ending, Interrupts
from emrun.loop.progress import Progress
from emrun.loop.requests import Requests
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks

_SECONDS = 0.25  # between two reductions; a wish takes at most about three times as long
_SECONDS_OF_SIGNALS = 1.0  # in which a launcher and a scheduler may both send the same signal
_LONGEST = 1_000  # iterations between two reductions


class _Checkpoint(NamedTuple):
    """The arguments of `Requests.checkpoint`."""

    name: str
    on_failure: Policy
    instead_of: InsteadOf


class _End(NamedTuple):
    """A termination, for the other ranks."""

    reason: str
    is_limit: bool


class _Wishes(NamedTuple):
    """What a rank wants; all are false if it wants nothing."""

    ending: Ending | None
    wants_checkpoint: bool
    end: _End | None
    checkpoints: list[tuple[str, Policy]]  # name, on_failure


class _Reduction(NamedTuple):
    """A reduction that has been started."""

    end: Callable[[], None]
    tensor: torch.Tensor  # whether a rank has a wish, and how many iterations rank 0 proposes


class SharedRequests(Requests):
    """The requests of several ranks; all of them call the methods alike.

    Args:
        progress: see `Requests`.
        model: see `Requests`.
        on_interrupt: see `Requests`.
        has_run: see `Requests`.
        ranks: the ranks.
    """

    def __init__(
        self, progress: Progress, model: AbstractModel, on_interrupt: InterruptPolicy, *, has_run: bool, ranks: Ranks
    ) -> None:
        super().__init__(progress, model, on_interrupt, has_run=has_run, patience=_SECONDS_OF_SIGNALS)
        self._ranks = ranks
        self._known = Interrupts(self._wake)  # only has what all ranks know
        self._wish: TrainingTerminated | None = None
        self._wished: list[_Checkpoint] = []
        self._reduction: _Reduction | None = None
        self.every = 1
        """After how many batches the loop is to look again; all ranks count alike."""
        self._read = 0  # batches since the last reduction, when the loop has to look
        self._began = perf_counter()  # with the last reduction
        self.pending = True

    def begin(self) -> None:
        """Handle signals until `restore`; forget earlier signals and terminations."""
        super().begin()
        self._known = Interrupts(self._wake)
        self._wish = None
        self._wished = []

    def look_again(self) -> None:
        """Make the loop look after this batch, as `every` batches are read."""
        self._read += self.every
        self.pending = True

    def end(self, event: str, terminations: Sequence[TrainingTerminated]) -> None:
        """Handle the terminations of an event: one that all ranks have ends the run now, another one is a wish."""
        of_all_ranks = [termination for termination in terminations if termination.alike]
        if self._progress.hooks_steer and not self._progress.at_end:
            self._wish = self._wish or next(
                (termination for termination in terminations if not termination.alike), None
            )
        if of_all_ranks:
            super().end(event, of_all_ranks)

    def end_later(self, termination: TrainingTerminated) -> None:
        """End the run with this termination at the next call of `raise_if_due`, when all ranks know it."""
        if termination.alike:
            super().end_later(termination)
        else:
            self._wish = self._wish or termination

    def checkpoint(self, name: str, on_failure: Policy = "error", instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint: now, or, by a hook of one rank, when all ranks know it."""
        if not self.is_alone:
            super().checkpoint(name, on_failure, instead_of)
        elif self._progress.hooks_steer:
            self._wished.append(_Checkpoint(name, on_failure, instead_of))

    def leaves(self, is_last: Callable[[], bool]) -> bool:
        """Find out now and then whether a rank has a wish; return whether the loop leaves the stream."""
        self.pending = False
        if self._read:
            if self._end_reduction():
                self.exchange()
            self._begin_reduction()
        if self.ending is None and self._termination is None and self.limit is None:
            return False
        ends = super().leaves(is_last)
        self.pending = True
        return ends

    def _begin_reduction(self) -> None:
        seconds = perf_counter() - self._began
        proposed = min(_LONGEST, max(1, int(self._read * _SECONDS / max(seconds, 1e-6))))
        self._count_anew()
        tensor = torch.tensor([any(self._wishes()), proposed if self._ranks.is_first else 0])
        self._reduction = _Reduction(self._ranks.begin_maximum(tensor), tensor)

    def _count_anew(self) -> None:
        self._read = 0
        self._began = perf_counter()

    def _end_reduction(self) -> bool:
        """Return whether a rank had a wish when the last reduction was started."""
        reduction = self._reduction
        if reduction is None:
            return False
        self._reduction = None
        reduction.end()
        has_wishes, self.every = reduction.tensor.tolist()
        return bool(has_wishes)

    def _wishes(self) -> _Wishes:
        wish = self._wish if self._progress.hooks_steer else None
        checkpoints = [(wished.name, wished.on_failure) for wished in self._wished] if self._ranks.is_first else []
        ending = self._interrupts.ending
        agreed = self.ending
        if ending is not None and agreed is not None and ending.after_batch <= agreed.after_batch:
            ending = None
        end = None if wish is None else _End(wish.reason, wish.limit)
        return _Wishes(ending, self._interrupts.wants_checkpoint, end, checkpoints)

    def exchange(self) -> None:
        """Exchange the wishes; all ranks call this at the same point, and then have the same ones."""
        self._end_reduction()
        self._count_anew()
        all_wishes = self._ranks.all_gathered("requests", self._wishes())

        # what this rank has wished is known now
        self._interrupts.forget_checkpoint()
        own_wishes = self._wished
        self._wished = []
        if self._progress.hooks_steer:  # otherwise the wish is for after the evaluation
            self._wish = None

        # what any rank wants, all do
        endings = [wishes.ending for wishes in all_wishes if wishes.ending is not None]
        strictest = max(endings, key=lambda each: each.after_batch, default=self.ending)
        self._known.take(strictest, wants_checkpoint=any(wishes.wants_checkpoint for wishes in all_wishes))
        self.pending = True
        for wishes in all_wishes:
            if wishes.end is not None:
                super().end_later(TrainingTerminated(wishes.end.reason, limit=wishes.end.is_limit))
        for number, (name, on_failure) in enumerate(all_wishes[0].checkpoints):
            self.checkpoints.add(name, on_failure, own_wishes[number].instead_of if self._ranks.is_first else ())


def one_rank(call: Callable[..., Any], requests: SharedRequests) -> Callable[..., None]:
    """Return a method of a hook that only this rank calls: what it wants is a wish."""

    @wraps(call)
    def called(**arguments: Any) -> None:
        try:
            with requests.alone():
                call(**arguments)
        except TrainingTerminated as error:
            error.only_here()
            raise

    return called
