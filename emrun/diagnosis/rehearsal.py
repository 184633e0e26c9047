"""Rehearse a training: one short epoch with all hooks, saved in its middle and resumed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emrun.base.types import EpochData
from emrun.config.plan import Plan
from emrun.dataset import asks_model
from emrun.events import listener, runs_on_every_rank
from emrun.hook import EVENTS, AbstractHook, TrainingTerminated
from emrun.loop.main_loop import MainLoop
from emrun.loop.outcome import Outcome
from emrun.storage.run import CHECKPOINTS, Run
from emrun.training.build import assemble

_TRACKER = "emrun.record.trackers.AbstractTracker"  # left out, so that no service gets these runs


def rehearse(plan: Plan, place: Path, dataset: Any, lengths: Mapping[str, int], *, ranks: int = 1) -> None:
    """Train for one epoch that is shortened to a few batches of each stream, with all hooks except trackers.

    After the first update the training is saved and ended; new objects resume it. So hooks and streams give their
    states and get them back.

    Args:
        plan: the checked config.
        place: the directory for all files of the training.
        dataset: the dataset.
        lengths: stream -> its most batches in an epoch.
        ranks: the number of ranks for which it is rehearsed: hooks that only the first of several calls are called so.

    Raises:
        BaseException: any error that the dataset, the model or a hook raises.
    """
    for is_resumed in (False, True):
        loop = assemble(plan, place, Run(place), dataset=None if asks_model(dataset) else dataset).main_loop
        if ranks > 1:
            _call_alone(loop)
        try:
            if is_resumed:
                loop.restore(place / CHECKPOINTS / "latest")
            outcome = train_shortly(loop, lengths, after_epoch=is_resumed)
        except BaseException as error:
            error.__dict__.pop("kept_in", None)  # the log will be deleted
            error.add_note("while training on 2 batches of each stream, in a temporary directory")
            raise
        if outcome.status == "interrupted":
            signal.raise_signal(outcome.signal_number or signal.SIGTERM)


def train_shortly(loop: MainLoop, lengths: Mapping[str, int], *, after_epoch: bool) -> Outcome:
    """Train for one shortened epoch, or for one update, with all hooks except trackers."""
    loop.streams.shorten(lengths)
    loop.change_hooks([*(hook for hook in loop.hooks if not is_tracker(hook)), _End(after_epoch)])
    hooks_log = logging.getLogger("emrun.hooks")
    before = hooks_log.level
    hooks_log.setLevel(logging.ERROR)  # what hooks find unusual in so few batches is not
    try:
        return loop.run_training()
    finally:
        hooks_log.setLevel(before)


def _call_alone(loop: MainLoop) -> None:
    """Let `Loop.is_alone` be true in events of the hooks that several ranks call on rank 0 only."""
    for hook in loop.hooks:
        for event in EVENTS:
            call = None if runs_on_every_rank(hook) else listener(hook, event)
            if call is not None:
                setattr(hook, event, loop.parts.requests.alone()(call))


def is_tracker(hook: AbstractHook) -> bool:
    """Return whether a hook sends a run to a service."""
    return _TRACKER in (f"{ancestor.__module__}.{ancestor.__qualname__}" for ancestor in type(hook).__mro__)


class _End(AbstractHook):
    """Ends the training after the first update, or after an epoch.

    Args:
        after_epoch: whether to end it after an epoch.
    """

    reads = ()
    changes_batches = False

    def __init__(self, after_epoch: bool) -> None:
        super().__init__()
        self._waits = after_epoch

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """End the training in its first epoch."""
        if self.main_loop.training and not self._waits:
            raise TrainingTerminated("one update is made")

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training after its first epoch."""
        if epoch_id:
            raise TrainingTerminated("one epoch is trained")
