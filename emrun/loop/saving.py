"""When checkpoints are saved: on request, of a state that is copied at once and written in a thread of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from emrun.arguments import safe_component
from emrun.epoch_data import declared
from emrun.errors import ArgumentError, EmrunError, HookError, RunInUse, reason_of
from emrun.hook import AbstractHook
from emrun.storage.checkpoint_names import Names, go_back_to
from emrun.storage.checkpoints import commit
from emrun.storage.files import storing
from emrun.storage.manifest import free_place, is_directory_name
from emrun.types import InsteadOf, Policy

_LOG = logging.getLogger(__name__)

_LATEST = "latest"  # the name that every training gives
_STRICTNESS: tuple[Policy, ...] = ("ignore", "warn", "error")
State = tuple[int, int, str]
"""What tells the states of a training apart: epochs done, iterations done, phase of the epoch."""


class Saving:
    """Saves the checkpoints that hooks request, at the points where the loop has nothing left to do for an event.

    The loop waits only until the state is copied. One thread writes it, commits it and moves the names; at most one
    checkpoint is in flight: the next one waits for it. What goes wrong in the thread is raised by the next call.

    Args:
        root: the directory of the run's checkpoints, None when there is no run.
        snapshot: copies the state, with the names of the checkpoints that there will be, name -> directory; returns
            what writes the copy into a directory, and whether another thread may do so.
        noticed: called in that thread when it fails, and when the first checkpoint is saved; must not block.
        first_saved: called when the first checkpoint is saved, by the thread of the loop.
    """

    def __init__(
        self,
        root: Path | None,
        snapshot: Callable[[Mapping[str, str]], tuple[Callable[[Path], None], bool]],
        noticed: Callable[[], None] = lambda: None,
        first_saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.requested: dict[str, Policy] = {}
        self._root = root
        self._snapshot = snapshot
        self._noticed = noticed
        self._first_saved = first_saved
        self._known = Names(root) if root is not None else None
        self._given_up: list[InsteadOf] = []
        self._latest_policy: Policy = "error"
        self._newest: tuple[State, Path] | None = None
        self._in_flight: _Writing | None = None
        self._thread: ThreadPoolExecutor | None = None  # kept: the loop would wait until a new one runs

    def request(self, name: str, on_failure: Policy, instead_of: InsteadOf = ()) -> None:
        """Ask for a checkpoint of this name at the next opportunity, which gives up other names.

        Raises:
            HookError: there is no run to save it in.
            ArgumentError: it cannot be a name.
        """
        if self._root is None:
            raise HookError(f"checkpoint {name!r} cannot be saved: this main loop has no run directory")
        if is_directory_name(safe_component("checkpoint", name)):
            raise ArgumentError("checkpoint", f"{name!r} is how emrun names the directories themselves")
        self._add(safe_component("checkpoint", name), on_failure)
        self._given_up.append(instead_of)
        if name == _LATEST:
            self._latest_policy = on_failure

    def save_requested(self, epoch: int, iteration: int, phase: str) -> None:
        """Begin to save what was requested: one checkpoint, with all the names.

        Args:
            epoch: training epochs done.
            iteration: batches of the train stream run.
            phase: what tells the states at one iteration apart.

        Raises:
            Exception: why it, or the one before, could not be saved, when a name was requested that way: a
                `StorageError`, or what the model or its state raised.
        """
        if self._in_flight is not None and (self.requested or self._in_flight.saved.done()):
            self.wait()
        if not self.requested or self._root is None or self._known is None:
            return
        names, self.requested = self.requested, {}
        instead_of, self._given_up = self._given_up, []
        state = (epoch, iteration, phase)
        place = self._newest[1] if self._newest is not None and self._newest[0] == state else None
        try:
            with storing(self._root, "read"):
                before = self._known.current()
            there = {**before, **names}
            given_up = {
                name for each in instead_of for name in (each(there) if callable(each) else each)
            } - names.keys()
            if place is not None and place.is_dir():
                self._known.move(dict.fromkeys(names, place.name), given_up)
                return
            left = {name: path for name, path in before.items() if name not in given_up and is_directory_name(path)}
            write, in_background = self._snapshot(
                {**left, **dict.fromkeys(names, free_place(self._root, iteration).name)}
            )
            save = partial(
                commit, self._root, write, epoch=epoch, iteration=iteration, names=names, given_up=given_up,
                known=self._known,
            )  # fmt: skip
            if not in_background:
                self._take_note(state, save())
                return
        except Exception as error:  # a model may save in its own way
            _report(error, names)
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "emrun checkpoint")
        saved = self._thread.submit(save)
        saved.add_done_callback(lambda found: (found.exception() or self._newest is None) and self._noticed())
        self._in_flight = _Writing(state, names, saved)

    def request_by_signal(self, iteration: int, *, is_training: bool) -> None:
        """Ask for the checkpoint `latest` because a signal wants that."""
        if self._root is None or not is_training:
            _LOG.warning("SIGUSR1: there is no training to save a checkpoint of")
            return
        _LOG.info("SIGUSR1: saving a checkpoint at iteration %d", iteration)
        self._add(_LATEST, self._latest_policy)

    def _add(self, name: str, on_failure: Policy) -> None:
        """Ask for a name; the strictest of those who ask for it decides."""
        self.requested[name] = max(on_failure, self.requested.get(name, on_failure), key=_STRICTNESS.index)

    def save_latest(self, epoch: int, iteration: int, phase: str) -> None:
        """Save what was requested, and the state that the training ends with as `latest`; return when that is done."""
        if self._root is not None:
            self._add(_LATEST, self._latest_policy)  # as whoever asked for it last
        self.save_requested(epoch, iteration, phase)
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            Exception: why what was in flight could not be saved, when a name was requested that way: a `StorageError`,
                or what the model or its state raised.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is None:
            return
        try:
            place = writing.saved.result()
        except Exception as error:
            _report(error, writing.names)
            return
        self._take_note(writing.state, place)

    def _take_note(self, state: State, place: Path) -> None:
        is_first = self._newest is None
        self._newest = (state, place)
        if is_first:
            self._first_saved()

    def close(self) -> None:
        """End the thread when nothing is left to be written; another checkpoint gets a new one."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    @property
    def newest(self) -> tuple[str, int] | None:
        """The directory's name and the iteration of the checkpoint that was saved or loaded last."""
        return (self._newest[1].name, self._newest[0][1]) if self._newest is not None else None

    def rewind(
        self, place: Path, epoch: int, iteration: int, phase: str, names: Mapping[str, str] | None = None
    ) -> Path:
        """Make the checkpoint that was loaded the latest one, under all its names, and restore those of its time.

        Args:
            place: its directory.
            epoch: training epochs done.
            iteration: batches of the train stream run.
            phase: see `save_requested`.
            names: the names of its time, as its state has them; see `go_back_to`.

        Returns:
            Where it lies now: a directory under a name is put where checkpoints lie.
        """
        place = go_back_to(place, names, known=self._known)
        self._newest = ((epoch, iteration, phase), place)
        return place


@dataclass(frozen=True, slots=True)
class _Writing:
    """One checkpoint that is written: of which state, under which names, and where."""

    state: State
    names: dict[str, Policy]
    saved: Future[Path]


def _report(error: Exception, names: dict[str, Policy]) -> None:
    if "error" in names.values() or isinstance(error, RunInUse):
        raise error
    if "warn" in names.values():
        kind = "" if isinstance(error, EmrunError) else f"{type(error).__name__}: "
        _LOG.warning("no checkpoint was saved: %s%s", kind, reason_of(error))


def check_saved_names(hooks: Sequence[AbstractHook]) -> None:
    """Check that no two hooks save under one name: each would take it from the other's checkpoint.

    Raises:
        HookError: two do, or one does so under the name that the loop itself gives.
    """
    saved = [(index, name) for index, hook in enumerate(hooks) for name in declared(hook, "saves") or ()]
    for number, (index, name) in enumerate(saved):
        kind = type(hooks[index]).__name__
        if _as_saved(name) == _LATEST:
            raise HookError(
                f"{kind} (hooks[{index}]) saves under the name {name!r}, as SaveLatest and the end of every training "
                "do; give it a model_name of its own",
                index,
            )
        for earlier, other in saved[:number]:
            if earlier != index and _may_be_one(_as_saved(name), _as_saved(other)):
                who = f"{type(hooks[earlier]).__name__} (hooks[{earlier}]) and {kind} (hooks[{index}])"
                if name == other:
                    what = f"save under the name {name!r}"
                else:
                    what = f"save under one name, {other!r} and {name!r}"
                    what += " (which are the same in a path)" if _as_saved(name) == _as_saved(other) else ""
                raise HookError(f"{who} {what}; give one of them a model_name of its own", index)


def _as_saved(name: str) -> str:
    """Return a name as the checkpoint gets it, `-*` at its end as it is."""
    is_numbered = name.endswith("-*")
    return safe_component("saves", name.removesuffix("-*")) + ("-*" if is_numbered else "")


def _may_be_one(one: str, other: str) -> bool:
    """Tell whether two names, of which `-*` at the end stands for any number, can be the same."""
    if one.endswith("-*"):
        one, other = other, one
    numbered = other.endswith("-*") and re.fullmatch(re.escape(other.removesuffix("*")) + r"\d+", one) is not None
    return one == other or numbered
