"""What hooks, limits and signals want of the training: its end, and checkpoints. The loop looks after each batch."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from emrun.base.arguments import check_choice, safe_component
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import InsteadOf, InterruptPolicy, Policy
from emrun.hook import TrainingTerminated
from emrun.loop.interrupts import Ending, Interrupted, Interrupts
from emrun.loop.progress import Progress
from emrun.model import AbstractModel
from emrun.storage.checkpoints.manifest import is_directory_name

_LOG = logging.getLogger(__name__)

LATEST = "latest"
"""The name of the checkpoint that every training saves at its end."""
_STRICTNESS: tuple[Policy, ...] = ("ignore", "warn", "error")
_BETWEEN = ("before_training", "before_epoch", "after_epoch", "after_epoch_profile")  # a limit ends the run here
_DEFERRED = ("before_batch", "before_update", "after_update", "after_checkpoint")  # until the batch has been run


class Requested(NamedTuple):
    """The names under which the next checkpoint is saved, each with what happens if it cannot be saved."""

    names: dict[str, Policy]
    instead_of: list[InsteadOf]


class CheckpointRequests:
    """The names that are requested for the next checkpoint.

    Args:
        are_saved: whether there is a run directory.
    """

    def __init__(self, *, are_saved: bool) -> None:
        self.are_saved = are_saved
        self.names: dict[str, Policy] = {}
        self._instead_of: list[InsteadOf] = []
        self._of_latest: Policy = "error"  # the policy of the last request of `latest`

    def add(self, name: str, on_failure: Policy, instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint; see `Loop.request_checkpoint`.

        Raises:
            HookError: there is no run directory.
            ArgumentError: `name` cannot be the name of a checkpoint.
        """
        if not self.are_saved:
            raise HookError(f"checkpoint {name!r} cannot be saved: this main loop has no run directory")
        safe_name = safe_component("checkpoint", name)
        if is_directory_name(safe_name):
            raise ArgumentError("checkpoint", f"{name!r} is reserved for a checkpoint's directory; use another name")
        self._add(safe_name, on_failure)
        self._instead_of.append(instead_of)
        if name == LATEST:
            self._of_latest = on_failure

    def add_latest(self) -> None:
        """Request `latest` as before."""
        self._add(LATEST, self._of_latest)

    def _add(self, name: str, on_failure: Policy) -> None:
        """Request a name; the strictest policy of all requests for the name applies."""
        self.names[name] = max(on_failure, self.names.get(name, on_failure), key=_STRICTNESS.index)

    def take(self) -> Requested:
        """Return what is requested, and forget this."""
        requested = Requested(self.names, self._instead_of)
        self.names = {}
        self._instead_of = []
        return requested


class Requests:
    """Collects what is requested; decides when a signal or a termination ends the training.

    A signal ends the training after the update of the batch, or after the epoch. A termination ends it when all hooks
    have got the event in which a hook raised the termination; after the batch if the event belongs to an update, after
    the update if it is `after_batch`, and after the next batch, or the epoch, if it is `after_checkpoint`. In an
    evaluation, terminations have no effect, and a signal ends the evaluation after the batch. A limit ends the training
    after the epoch if its batch is the last one of the epoch, or if the epoch is being evaluated.

    Args:
        progress: where the training is.
        model: knows whether it is within the batches of an update; then the run must not end yet.
        on_interrupt: whether the first signal ends the training after the current `batch` or `epoch`; see `Interrupts`.
        has_run: whether there is a run directory for checkpoints.
        patience: the seconds in which the same signal again does not count.
    """

    is_alone = False
    """Whether a hook is called on this rank only, of several, so that other ranks have to learn what it requests."""

    def __init__(
        self,
        progress: Progress,
        model: AbstractModel,
        on_interrupt: InterruptPolicy,
        *,
        has_run: bool = False,
        patience: float = 0,
    ) -> None:
        check_choice("on_interrupt", on_interrupt, InterruptPolicy)
        self._progress = progress
        self._model = model
        self.checkpoints = CheckpointRequests(are_saved=has_run)
        """The checkpoints that are requested."""
        self.limit: TrainingTerminated | None = None
        """The limit that has been reached and ends the training."""
        self.ended_by: TrainingTerminated | None = None
        """The limit after which the extra streams are, or were, evaluated once more."""
        self.pending = False
        """Whether the loop has to call `leaves` after the batch."""
        self._interrupts = Interrupts(self._wake, on_interrupt, patience)  # gets the signals
        self._known = self._interrupts  # has the signals that all ranks know
        self._termination: TrainingTerminated | None = None
        self._is_announced = False  # whether the end after this epoch has been logged

    @property
    def ending(self) -> Ending | None:
        """How signals end the run; None if there was none."""
        return self._known.ending

    def begin(self) -> None:
        """Handle signals until `restore`; forget earlier signals and terminations."""
        self._termination = None
        self.limit = None
        self.ended_by = None
        self._is_announced = False
        self._interrupts.install()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._interrupts.restore()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which a hook is called on this rank only."""
        before = self.is_alone
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = before

    def end(self, event: str, terminations: Sequence[TrainingTerminated]) -> None:
        """Handle the terminations that hooks raised in an event.

        Raises:
            TrainingTerminated: the training ends now.
        """
        if not self._progress.hooks_steer or self._progress.at_end:
            return
        is_limit = any(termination.limit for termination in terminations)
        reasons = "; ".join(dict.fromkeys(termination.reason for termination in terminations))
        termination = terminations[0] if len(terminations) == 1 else TrainingTerminated(reasons, limit=is_limit)
        if is_limit:
            waits = event not in _BETWEEN
        else:
            waits = event in _DEFERRED or (event == "after_batch" and self._model.is_accumulating)
        if not waits:
            raise termination
        self.end_later(termination)
        self.pending = True

    def end_later(self, termination: TrainingTerminated) -> None:
        """End the training with this termination at the next call of `raise_if_due`."""
        if termination.limit:
            self.limit = self.limit or termination
        else:
            self._termination = self._termination or termination

    def end_at_limit(self, limit: TrainingTerminated) -> None:
        """Keep the limit that has ended the training, while the extra streams are evaluated once more."""
        self.ended_by = limit

    def checkpoint(self, name: str, on_failure: Policy = "error", instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint; see `Loop.request_checkpoint`."""
        if self._progress.hooks_steer:
            self.checkpoints.add(name, on_failure, instead_of)
            self.pending = True

    def exchange(self) -> None:
        """Let all ranks end the run, and save checkpoints, at the same point; here there is one rank."""

    def notice(self) -> None:
        """Make the loop look after the current batch; a thread may call this."""
        self.pending = True

    def announce_wait(self) -> None:
        """Log once that the run does not end before the end of the update."""
        reason = self._termination or self.limit
        if reason is None and self.ending is not None and self.ending.after_batch:
            reason = Interrupted(self.ending.signal)
        if reason is not None and not self._is_announced:
            self._is_announced = True
            _LOG.info("%s; the run ends with the last batch of this update", reason)

    def leaves(self, is_last: Callable[[], bool]) -> bool:
        """Handle what has happened; return whether the loop leaves the stream after this batch.

        Args:
            is_last: returns whether the batch is the last one, after which a limit does not leave the stream.
        """
        self.pending = False
        if self.is_interrupted() or self._termination is not None:
            return True
        if self.limit is not None and not is_last():
            return True
        if self.ending is not None and not self._is_announced:
            self._is_announced = True
            name = signal.Signals(self.ending.signal).name
            _LOG.info("%s: the training ends after this epoch; SIGTERM or a second signal ends it after a batch", name)
        return False

    def request_by_signal(self) -> None:
        """Request the checkpoint `latest` if a signal has asked for a checkpoint since the last call."""
        if not self._known.wants_checkpoint:
            return
        self._known.forget_checkpoint()
        if not self.checkpoints.are_saved or not self._progress.hooks_steer:
            _LOG.warning("SIGUSR1: no checkpoint is saved, because no training with a run directory is running")
            return
        _LOG.info("SIGUSR1: saving a checkpoint at iteration %d", self._progress.iterations_done)
        self.checkpoints.add_latest()

    def is_interrupted(self) -> bool:
        """Return whether a signal ends the epoch after the current batch."""
        if self.ending is None:
            return False
        if self._progress.evaluating:
            return True
        return self.ending.after_batch and not self._model.is_accumulating

    def raise_if_due(self, *, in_epoch: bool = False, is_left: bool = False) -> None:
        """Raise what ends the training: a signal, or a termination that was deferred.

        Args:
            in_epoch: whether the epoch is not complete.
            is_left: whether the train stream was left before its end; else a limit waits for the end of the epoch.
        """
        if self.ending is not None and (not in_epoch or self.is_interrupted()):
            raise Interrupted(self.ending.signal)
        termination = self.limit or self._termination
        if termination is None or self._progress.evaluating or self._progress.at_end:
            return
        waits = termination.limit and in_epoch and not is_left
        if not waits:
            raise termination

    def _wake(self) -> None:
        """Make the loop notice a signal, also if it waits for a batch; called by the signal handler."""
        self.pending = True
        if self._progress.stream is not None:
            self._progress.stream.wake()
