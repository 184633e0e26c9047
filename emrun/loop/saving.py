"""When checkpoints are saved: on request. The state is copied at once, and written by a separate thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, EmrunError, HookError, RankFailed, RunInUse, reason_of
from emrun.base.types import InsteadOf, Policy
from emrun.base.wording import listed
from emrun.epoch_data import declared
from emrun.hook import AbstractHook
from emrun.loop.together import LONGEST, write_together
from emrun.ranks.group import Ranks
from emrun.schedule_plan import BEFORE_COOLDOWN
from emrun.storage.checkpoints.commits import commit
from emrun.storage.checkpoints.manifest import free_place, is_directory_name, share_names
from emrun.storage.checkpoints.names import Names, go_back_to
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)

_LATEST = "latest"  # the name of the checkpoint that every training saves at its end
_USED = (
    (_LATEST, "the end of every training"),
    (BEFORE_COOLDOWN, "schedules with a cool-down"),
    ("it", "emrun, for the directories,"),
)
"""Names under which no hook may save, and who does."""
_STRICTNESS: tuple[Policy, ...] = ("ignore", "warn", "error")
State = tuple[int, int, str]
"""Identifies a state of the training: epochs done, iterations done, phase of the epoch."""


class Saving:
    """Saves the checkpoints that hooks request, when the current event is complete.

    The loop waits only while the state is copied. A thread writes the copy, commits it and moves the names. At most one
    checkpoint is being written: the next one waits for it. The next call raises an error of the thread.

    Args:
        root: the directory of the checkpoints; None without a run.
        snapshot: copies the state and stores in it the names of all checkpoints after this one, name -> directory.
            Returns the function that writes the copy to a directory, and whether another thread may call it; of a
            sharded model, the function for `write_together`.
        noticed: called in the thread when a checkpoint is saved or could not be saved; must not block.
        first_saved: called in the thread of the loop when the first checkpoint is saved.
        told: called in the thread of the loop with each name and the directory of a saved checkpoint, before the next
            checkpoint is begun.
        ranks: the ranks of the run. Only rank 0 writes, unless the model is sharded.
        follows: whether rank 0 has the run of this rank; `snapshot` gives rank 0 the part of this rank then.
        is_sharded: whether each rank writes its part of the model, in a thread of its own.
    """

    def __init__(
        self,
        root: Path | None,
        snapshot: Callable[[Mapping[str, str]], tuple[Callable[[Path], Any], bool]],
        noticed: Callable[[], None] = lambda: None,
        first_saved: Callable[[], None] = lambda: None,
        told: Callable[[str, Path], None] = lambda name, place: None,
        ranks: Ranks | None = None,
        follows: bool = False,
        is_sharded: bool = False,
    ) -> None:
        self._requests = _Requests()
        self._snapshot = snapshot
        self._noticed = noticed
        self._ranks = ranks or Ranks()
        self._writers = cache(partial(self._ranks.apart, LONGEST)) if is_sharded else None  # the ranks, for the threads
        self._saves = root is not None or follows  # whether there are checkpoints, which rank 0 writes
        self.keeps_all = False
        """Whether no checkpoint that loses its name is deleted, because a resume gives the name back."""
        self._known = Names(root) if root is not None else None
        self._newest: tuple[State, Path] | None = None
        self._saved = _Saved(first_saved, told)
        self._in_flight: _Writing | None = None
        self._thread: ThreadPoolExecutor | None = None  # one for all checkpoints, because starting a thread takes time

    def request(self, name: str, on_failure: Policy, instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint; see `Loop.request_checkpoint`.

        Raises:
            HookError: there is no run directory.
            ArgumentError: `name` cannot be the name of a checkpoint.
        """
        if not self._saves:
            raise HookError(f"checkpoint {name!r} cannot be saved: this main loop has no run directory")
        if is_directory_name(safe_component("checkpoint", name)):
            raise ArgumentError("checkpoint", f"{name!r} is reserved for a checkpoint's directory; use another name")
        self._requests.add(safe_component("checkpoint", name), on_failure)
        self._requests.instead_of.append(instead_of)
        if name == _LATEST:
            self._requests.of_latest = on_failure

    @property
    def has_work(self) -> bool:
        """Whether a checkpoint is requested, is being written, or has been saved without `after_checkpoint`."""
        return bool(self._requests.names or self._saved.untold) or self._in_flight is not None

    def save_requested(self, epoch: int, iteration: int, phase: str) -> None:
        """Begin to save one checkpoint under all requested names.

        Args:
            epoch: number of training epochs done.
            iteration: number of training batches done.
            phase: the phase of the epoch, because several states have the same number of batches.

        Raises:
            Exception: this or the previous checkpoint could not be saved, and a name was requested with
                `on_failure="error"`: a `StorageError`, or an error of the model or its state.
        """
        if self._in_flight is not None and (self._requests.names or self._in_flight.saved.done()):
            self.wait()
        try:
            self.tell()
        finally:  # a hook that fails in `after_checkpoint` of an earlier checkpoint does not cost this one
            self._begin_requested((epoch, iteration, phase))
        self.tell()

    def _begin_requested(self, state: State) -> None:
        """Begin to save the requested checkpoint, if there is one."""
        if not self._requests.names or not self._saves:
            return
        names, instead_of = self._requests.take()
        if self._known is None:
            if self._ranks.from_first("checkpoint begins", False):
                write, _ = self._snapshot({})
                if self._writers is not None:
                    self._in_flight = self._started(state, names, partial(write_together, self._writers(), write))
            return
        try:
            with ExitStack() as undecided:
                # no other rank has to give its part
                undecided.callback(self._ranks.from_first, "checkpoint begins", False)
                self._in_flight = self._begin(self._known, state, names, instead_of, undecided)
        except Exception as error:  # the model's code may raise anything
            _report(error, names)

    def _begin(
        self,
        known: Names,
        state: State,
        names: dict[str, Policy],
        instead_of: list[InsteadOf],
        undecided: ExitStack,
    ) -> _Writing | None:
        """Begin to save a checkpoint; return None if it is saved already. `undecided` tells other ranks if it is."""
        (epoch, iteration, _), root = state, known.root
        place = self._newest[1] if self._newest is not None and self._newest[0] == state else None
        with storing(root, "read"):
            before = known.current()
        there = {**before, **names}
        given_up = {name for each in instead_of for name in (each(there) if callable(each) else each)} - names.keys()
        if place is not None and place.is_dir():
            known.move(dict.fromkeys(names, place.name), given_up, deletes=not self.keeps_all)
            self._saved.untold += [(name, place) for name in sorted(names) if before.get(name) != place.name]
            return None
        left = {name: path for name, path in before.items() if name not in given_up and is_directory_name(path)}
        undecided.pop_all()
        self._ranks.from_first("checkpoint begins", True)
        write, in_background = self._snapshot({**left, **dict.fromkeys(names, free_place(root, iteration).name)})
        how: dict[str, Any] = {"epoch": epoch, "iteration": iteration, "names": names, "known": known}
        committed: Callable[..., Path] = partial(commit, root, given_up=given_up, **how)
        if self._writers is not None:
            return self._started(state, names, partial(write_together, self._writers(), write, committed))
        if not in_background:
            self._take_note(state, names, committed(write))
            return None
        return self._started(state, names, partial(committed, write))

    def _started(self, state: State, names: dict[str, Policy], save: Callable[[], Path | None]) -> _Writing:
        self._thread = self._thread or ThreadPoolExecutor(1, "emrun checkpoint")
        saved = self._thread.submit(save)
        saved.add_done_callback(lambda _: self._noticed())
        return _Writing(state, names, saved)

    def request_by_signal(self, iteration: int, *, is_training: bool) -> None:
        """Request the checkpoint `latest` because of a signal."""
        if not self._saves or not is_training:
            _LOG.warning("SIGUSR1: no checkpoint is saved, because no training with a run directory is running")
            return
        _LOG.info("SIGUSR1: saving a checkpoint at iteration %d", iteration)
        self._requests.add_latest()

    def save_only_latest(self, *state: Any) -> None:
        """Save a state as `latest` and nothing else, because the training has failed since; other ranks do not help."""
        if self._known is not None:
            self._requests.take()
            self._ranks = Ranks()
            self.save_latest(*state)

    def save_latest(self, epoch: int, iteration: int, phase: str) -> None:
        """Save the requested checkpoints, and the last state of the training as `latest`; wait until they are saved."""
        if self._saves:
            self._requests.add_latest()
        try:
            self.save_requested(epoch, iteration, phase)
        finally:  # also if a hook has failed in `after_checkpoint` of an earlier checkpoint
            self.wait()
        self.tell()

    def tell(self) -> None:
        """Report the checkpoints that were saved since the last call; see `AbstractHook.after_checkpoint`.

        Raises:
            BaseException: an error of a hook.
        """
        while self._saved.untold:
            self._saved.told(*self._saved.untold.pop(0))

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            Exception: the checkpoint could not be saved, and a name was requested with `on_failure="error"`: a
                `StorageError`, or an error of the model or its state.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is None:
            return
        try:
            place = writing.saved.result()
        except Exception as error:
            _report(error, writing.names)
            return
        if place is not None:
            self._take_note(writing.state, writing.names, place)

    def _take_note(self, state: State, names: dict[str, Policy], place: Path) -> None:
        is_first = self._newest is None
        self._newest = (state, place)
        self._saved.untold += [(name, place) for name in sorted(names)]
        if is_first:
            self._saved.first()

    def close(self) -> None:
        """End the thread after the last write; a later checkpoint starts a new thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    @property
    def newest(self) -> tuple[str, int] | None:
        """The name of the directory and the iteration of the checkpoint that was last saved or loaded."""
        return (self._newest[1].name, self._newest[0][1]) if self._newest is not None else None

    def rewind(
        self, place: Path, epoch: int, iteration: int, phase: str, names: Mapping[str, str] | None = None
    ) -> None:
        """Make the loaded checkpoint the newest one, and restore the names that checkpoints had when it was saved.

        Args:
            place: the directory of the checkpoint.
            epoch: number of training epochs done.
            iteration: number of training batches done.
            phase: see `save_requested`.
            names: the names of all checkpoints at that time, from the state; see `go_back_to`.
        """
        if self._ranks.is_first:
            go_back_to(place, names, known=self._known)
        self._newest = ((epoch, iteration, phase), place)


class _Requests:
    """What is requested until the next checkpoint."""

    def __init__(self) -> None:
        self.names: dict[str, Policy] = {}
        self.instead_of: list[InsteadOf] = []
        self.of_latest: Policy = "error"
        """The policy of the last request of `latest`."""

    def add(self, name: str, on_failure: Policy) -> None:
        """Request a name; the strictest policy of all requests for the name applies."""
        self.names[name] = max(on_failure, self.names.get(name, on_failure), key=_STRICTNESS.index)

    def add_latest(self) -> None:
        """Request `latest` as before."""
        self.add(_LATEST, self.of_latest)

    def take(self) -> tuple[dict[str, Policy], list[InsteadOf]]:
        """Return the names and what is given up for them, and forget both."""
        taken = self.names, self.instead_of
        self.names, self.instead_of = {}, []
        return taken


@dataclass(eq=False)
class _Saved:
    """The checkpoints that are saved: what to call for the first and for each, and those not reported yet."""

    first: Callable[[], None]
    told: Callable[[str, Path], None]
    untold: list[tuple[str, Path]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint that is being written: its state, its names, and its future directory, which rank 0 alone knows."""

    state: State
    names: dict[str, Policy]
    saved: Future[Path | None]


def _report(error: Exception, names: dict[str, Policy]) -> None:
    if "error" in names.values() or isinstance(error, RunInUse | RankFailed):
        raise error
    if "warn" in names.values():
        kind = "" if isinstance(error, EmrunError) else f"{type(error).__name__}: "
        _LOG.warning("no checkpoint was saved: %s%s", kind, reason_of(error))


def check_saved_names(hooks: Sequence[AbstractHook]) -> None:
    """Check that no two hooks can save under the same name: each would take the name from the other's checkpoint.

    Raises:
        HookError: two hooks save under the same name, or a hook saves under a name that the loop itself uses.
    """
    saved = list(_USED)
    for index, hook in enumerate(hooks):
        who = f"{type(hook).__name__} (hooks[{index}])"
        for name in (safe_component("saves", each) for each in declared(hook, "saves") or ()):
            for other, owner in saved:
                if owner != who and share_names(name, other):
                    names = listed(sorted({repr(name), repr(other)}))
                    raise HookError(
                        f"{who} and {owner} may save checkpoints of the same name: {names}; give {who} another "
                        "model_name",
                        index,
                    )
            saved.append((name, who))
