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
from emrun.hook import Loop, TrainingTerminated
from emrun.loop.endings import Endings, switched_on
from emrun.loop.interrupts import Ending, Interrupts
from emrun.ranks.group import Ranks

_SECONDS = 0.25  # between two reductions; a wish takes at most about three times as long
_SECONDS_OF_SIGNALS = 1.0  # in which a launcher and a scheduler may both send the same signal
_LONGEST = 1_000  # iterations between two reductions


class _Wishes(NamedTuple):
    """What a rank wants; all are false if it wants nothing."""

    ending: Ending | None
    wants_checkpoint: bool
    end: tuple[str, bool] | None  # the reason, and whether it is a limit
    names: list[tuple[str, Policy]]


class AgreedEndings(Endings):
    """The endings of several ranks; all of them call the methods alike.

    Args:
        loop: see `Endings`.
        on_interrupt: see `Endings`.
        ranks: the ranks.
    """

    def __init__(self, loop: Loop, on_interrupt: InterruptPolicy, ranks: Ranks) -> None:
        super().__init__(loop, on_interrupt, patience=_SECONDS_OF_SIGNALS)
        self._ranks = ranks
        self._known = Interrupts(self._wake)  # only has what all ranks know
        self._wish: TrainingTerminated | None = None
        self._requests: list[tuple[str, Policy, InsteadOf]] = []  # the arguments of `ask`
        self._reduction: tuple[Callable[[], None], torch.Tensor] | None = None
        self._every = 1  # iterations between two reductions
        self._began = perf_counter()
        self._counted = self.left = 1
        """How many batches are left until the loop is to call `look`; all ranks count alike."""
        self.must_look = True

    def begin(self) -> None:
        """Handle signals until `restore`; forget earlier signals and terminations."""
        super().begin()
        self._known, self._wish, self._requests = Interrupts(self._wake), None, []

    def take(self, event: str, ended: Sequence[TrainingTerminated]) -> None:
        """Handle the terminations of an event: one that all ranks have ends the run now, another one is a wish."""
        alike = [each for each in ended if each.alike]
        if self.have_effect and not self._loop.at_end:
            self._wish = self._wish or next((each for each in ended if not each.alike), None)
        if alike:
            super().take(event, alike)

    def defer(self, termination: TrainingTerminated) -> None:
        """End the run with this termination at the next call of `raise_if_due`, when all ranks know it."""
        if termination.alike:
            super().defer(termination)
        else:
            self._wish = self._wish or termination

    def ask(self, name: str, on_failure: Policy, instead_of: InsteadOf) -> None:
        """Request a checkpoint: now, or, by a hook of one rank, when all ranks know it."""
        if not self.is_alone:
            super().ask(name, on_failure, instead_of)
        elif self.have_effect:
            self._requests.append((name, on_failure, instead_of))

    def look(self, is_last: Callable[[], bool]) -> bool:
        """Find out now and then whether a rank has a wish; return whether the loop leaves the stream."""
        self.must_look = False
        if self.left <= 0:
            if self._end_reduction():
                self.agree()
            self._begin_reduction()
        if self.ending is None and self._termination is None and self.limit is None:
            return False
        ends = super().look(is_last)
        self.must_look = True
        return ends

    def _begin_reduction(self) -> None:
        now = perf_counter()
        batches = self._counted - self.left
        proposed = min(_LONGEST, max(1, int(batches * _SECONDS / max(now - self._began, 1e-6))))
        self._counted = self.left = self._every
        self._began = now
        tensor = torch.tensor([any(self._wishes()), proposed if self._ranks.is_first else 0])
        self._reduction = self._ranks.begin_maximum(tensor), tensor

    def _end_reduction(self) -> bool:
        """Return whether a rank had a wish when the last reduction was started."""
        if self._reduction is None:
            return False
        (end, tensor), self._reduction = self._reduction, None
        end()
        has_wishes, self._every = tensor.tolist()
        return bool(has_wishes)

    def _wishes(self) -> _Wishes:
        wish = self._wish if self.have_effect else None
        names = [each[:2] for each in self._requests] if self._ranks.is_first else []
        ending, agreed = self._interrupts.ending, self.ending
        if ending is not None and agreed is not None and ending.after_batch <= agreed.after_batch:
            ending = None
        end = None if wish is None else (wish.reason, wish.limit)
        return _Wishes(ending, self._interrupts.wants_checkpoint, end, names)

    def agree(self) -> None:
        """Exchange the wishes; all ranks call this at the same point, and then have the same ones."""
        self._end_reduction()
        self._counted = self.left = self._every
        self._began = perf_counter()
        all_wishes = self._ranks.all_gathered("wishes", self._wishes())
        self._interrupts.wants_checkpoint = False
        own, self._requests = self._requests, []
        if self.have_effect:  # otherwise the wish is for after the evaluation
            self._wish = None
        endings = [each.ending for each in all_wishes if each.ending is not None]
        self._known.ending = max(endings, key=lambda each: each.after_batch, default=self.ending)
        self._known.wants_checkpoint |= any(each.wants_checkpoint for each in all_wishes)
        self.must_look = True
        for reason, is_limit in [each.end for each in all_wishes if each.end is not None]:
            super().defer(TrainingTerminated(reason, limit=is_limit))
        for number, (name, on_failure) in enumerate(all_wishes[0].names):
            self.request(name, on_failure, own[number][2] if self._ranks.is_first else ())


def one_rank(call: Callable[..., Any], endings: AgreedEndings) -> Callable[..., None]:
    """Return a method of a hook that only this rank calls: what it wants is a wish."""

    @wraps(call)
    def called(**arguments: Any) -> None:
        try:
            with switched_on(endings, "is_alone"):
                call(**arguments)
        except TrainingTerminated as error:
            error.alike = False
            raise

    return called
