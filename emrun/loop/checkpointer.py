"""When checkpoints are saved: on request. The state is copied at once, and written by a separate thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from emrun.base.arguments import safe_component
from emrun.base.errors import EmrunError, HookError, RankFailed, RunInUse, reason_of
from emrun.base.types import Policy
from emrun.base.wording import listed
from emrun.epoch_data import declared
from emrun.hook import AbstractHook
from emrun.loop.progress import Point, Progress
from emrun.loop.ranks.shards import LONGEST, write_together
from emrun.loop.requests import LATEST, CheckpointRequests, Requested
from emrun.loop.snapshot import Copy
from emrun.ranks.group import Ranks
from emrun.schedule_plan import BEFORE_COOLDOWN
from emrun.storage.checkpoints.commits import Names, commit, go_back_to
from emrun.storage.checkpoints.manifest import free_place, is_directory_name, share_names
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)

_USED = (
    (LATEST, "the end of every training"),
    (BEFORE_COOLDOWN, "schedules with a cool-down"),
    ("it", "emrun, for the directories,"),
)
"""Names under which no hook may save, and who does."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint that is being written; rank 0 alone knows its directory."""

    point: Point
    names: dict[str, Policy]
    place: Future[Path | None]


@dataclass(frozen=True, slots=True)
class _Saved:
    """The checkpoint that was last saved or loaded."""

    point: Point
    place: Path


@dataclass(eq=False)
class Checkpointer:
    """Saves the checkpoints that are requested, when the current event is complete.

    The loop waits only while the state is copied. A thread writes the copy, commits it and moves the names. At most one
    checkpoint is being written: the next one waits for it. The next call raises an error of the thread.

    Args:
        requests: the names that are requested.
        progress: where the training is; gets the newest checkpoint.
        take: copies the state, and stores in it the names of all checkpoints after this one, name -> directory.
        root: the directory of the checkpoints; None without a run, or if another rank writes them.
        notice: called in the thread when a checkpoint is saved or could not be saved; must not block.
        begin_saving: called in the thread of the loop when the first checkpoint is saved.
        report: called in the thread of the loop with each name and the directory of a saved checkpoint, before the
            next checkpoint is begun.
        ranks: the ranks of the run. Only rank 0 writes, unless the model is sharded.
        is_sharded: whether each rank writes its part of the model, in a thread of its own.
    """

    requests: CheckpointRequests
    progress: Progress
    take: Callable[[Mapping[str, str]], Copy]
    root: Path | None
    notice: Callable[[], None] = lambda: None
    begin_saving: Callable[[], None] = lambda: None
    report: Callable[[str, Path], None] = lambda name, place: None
    ranks: Ranks = field(default_factory=Ranks)
    is_sharded: bool = False
    _unreported: list[tuple[str, Path]] = field(default_factory=list, init=False)  # name, place: saved, but hooks wait
    _newest: _Saved | None = field(default=None, init=False)
    _writing: _Writing | None = field(default=None, init=False)
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)  # one for all, as to start one takes time

    @cached_property
    def _names(self) -> Names | None:
        """The names of all checkpoints; None if this rank does not write."""
        return Names(self.root) if self.root is not None else None

    @cached_property
    def _writers(self) -> Ranks:
        """The ranks, for the threads that write a sharded model; all ranks ask for this at the same point."""
        return self.ranks.apart(LONGEST)

    @property
    def has_work(self) -> bool:
        """Whether a checkpoint is requested, is being written, or has been saved without `after_checkpoint`."""
        return bool(self.requests.names or self._unreported) or self._writing is not None

    def save_requested(self) -> None:
        """Begin to save one checkpoint under all requested names.

        Raises:
            Exception: this or the previous checkpoint could not be saved, and a name was requested with
                `on_failure="error"`: a `StorageError`, or an error of the model or its state.
        """
        if self._writing is not None and (self.requests.names or self._writing.place.done()):
            self.wait()
        try:
            self.report_saved()
        finally:  # a hook that fails in `after_checkpoint` of an earlier checkpoint does not cost this one
            self._begin_requested()
        self.report_saved()

    def _begin_requested(self) -> None:
        """Begin to save the requested checkpoint, if there is one."""
        if not self.requests.names or not self.requests.are_saved:
            return
        requested = self.requests.take()
        if self._names is None:
            self._follow(requested)
            return
        try:
            with ExitStack() as undecided:
                undecided.callback(self._broadcast, False)  # no other rank has to give its part
                self._writing = self._begin(self._names, requested, undecided)
        except Exception as error:  # the model's code may raise anything
            _report(error, requested.names)

    def _follow(self, requested: Requested) -> None:
        """Give rank 0 what this rank has for a checkpoint, if rank 0 saves one."""
        if not self._broadcast(False):
            return
        copy = self.take({})
        if self.is_sharded:
            self._writing = self._started(requested, partial(write_together, self._writers, copy.write))

    def _broadcast(self, begins: bool) -> bool:
        """Tell the other ranks whether rank 0 begins to save a checkpoint, for which they give their parts."""
        return self.ranks.from_first("whether a checkpoint begins", begins)

    def _begin(self, known: Names, requested: Requested, undecided: ExitStack) -> _Writing | None:
        """Begin to save a checkpoint; return None if it is saved already.

        Args:
            known: the names of all checkpoints.
            requested: the names of this one.
            undecided: tells the other ranks that they have nothing to do.
        """
        # the names: which there are, and which are given up
        point = self.progress.point
        epoch, iteration, _ = point
        names = requested.names
        with storing(known.root, "read"):
            before = known.current()
        all_names = {**before, **names}
        given_up = {
            name for instead in requested.instead_of for name in (instead(all_names) if callable(instead) else instead)
        } - names.keys()

        # the same state is saved already
        newest = self._newest
        if newest is not None and newest.point == point and newest.place.is_dir():
            place = newest.place
            keeps_all = self.progress.at_end  # as a resume gives the names back
            known.move(dict.fromkeys(names, place.name), given_up, deletes=not keeps_all)
            self._unreported += [(name, place) for name in sorted(names) if before.get(name) != place.name]
            return None

        # the copy, and what writes it
        left = {name: path for name, path in before.items() if name not in given_up and is_directory_name(path)}
        undecided.pop_all()
        self._broadcast(True)
        copy = self.take({**left, **dict.fromkeys(names, free_place(known.root, iteration).name)})
        committed: Callable[..., Path] = partial(
            commit, known.root, epoch=epoch, iteration=iteration, names=names, known=known, given_up=given_up
        )
        if self.is_sharded:
            return self._started(requested, partial(write_together, self._writers, copy.write, committed))
        if copy.in_background:
            return self._started(requested, partial(committed, copy.write))
        self._note(point, names, committed(copy.write))
        return None

    def _started(self, requested: Requested, save: Callable[[], Path | None]) -> _Writing:
        """Let the thread save a checkpoint."""
        self._thread = self._thread or ThreadPoolExecutor(1, "emrun checkpoint")
        place = self._thread.submit(save)
        place.add_done_callback(lambda _: self.notice())
        return _Writing(self.progress.point, requested.names, place)

    def save_latest(self) -> None:
        """Save the requested checkpoints, and the last state of the training as `latest`; wait until they are saved."""
        if self.requests.are_saved:
            self.requests.add_latest()
        try:
            self.save_requested()
        finally:  # also if a hook has failed in `after_checkpoint` of an earlier checkpoint
            self.wait()
        self.report_saved()

    def save_only_latest(self) -> None:
        """Save a state as `latest` and nothing else, because the training has failed since; other ranks do not help."""
        if self.root is not None:
            self.requests.take()
            self.ranks = Ranks()
            self.save_latest()

    def report_saved(self) -> None:
        """Report the checkpoints that were saved since the last call; see `AbstractHook.after_checkpoint`.

        Raises:
            BaseException: an error of a hook.
        """
        while self._unreported:
            self.report(*self._unreported.pop(0))

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            Exception: the checkpoint could not be saved, and a name was requested with `on_failure="error"`: a
                `StorageError`, or an error of the model or its state.
        """
        writing = self._writing
        self._writing = None
        if writing is None:
            return
        try:
            place = writing.place.result()
        except Exception as error:
            _report(error, writing.names)
            return
        if place is not None:
            self._note(writing.point, writing.names, place)

    def _note(self, point: Point, names: dict[str, Policy], place: Path) -> None:
        """Note that a checkpoint is saved."""
        is_first = self._newest is None
        self._renew(point, place)
        self._unreported += [(name, place) for name in sorted(names)]
        if is_first:
            self.begin_saving()

    def _renew(self, point: Point, place: Path) -> None:
        self._newest = _Saved(point, place)
        self.progress.take_checkpoint(place.name, point[1])

    def close(self) -> None:
        """End the thread after the last write; a later checkpoint starts a new thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    def rewind(self, place: Path, names: Mapping[str, str] | None = None) -> None:
        """Make the loaded checkpoint the newest one, and restore the names that checkpoints had when it was saved.

        Args:
            place: the directory of the checkpoint.
            names: the names of all checkpoints at that time, from the state; see `go_back_to`.
        """
        if self.ranks.is_first:
            go_back_to(place, names, known=self._names)
        self._renew(self.progress.point, place)


def _report(error: Exception, names: dict[str, Policy]) -> None:
    """Raise or log that a checkpoint could not be saved, as its requests say."""
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
