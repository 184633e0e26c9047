"""When checkpoints are saved: on request, of a state that is copied at once and written in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from emrun.checkpoint import commit, go_back_to, is_directory_name, name_checkpoint
from emrun.errors import ArgumentError, HookError, StorageError
from emrun.files import safe_component
from emrun.types import Policy

_LOG = logging.getLogger(__name__)

State = tuple[int, int, str]
"""What tells the states of a training apart: epochs done, iterations done, phase of the epoch."""


class Checkpointing:
    """Saves the checkpoints that hooks request, at the points where the loop has nothing left to do for an event.

    The loop waits only until the state is copied. One thread writes it, commits it and moves the names; at most one
    checkpoint is in flight: the next one waits for it. What goes wrong in the thread is raised by the next call.

    Args:
        root: the directory of the run's checkpoints, None when there is no run.
        stage: copies the state; returns what writes the copy into a directory, and whether another thread may do so.
        failed: called in that thread when it fails; must not block.
    """

    def __init__(
        self,
        root: Path | None,
        stage: Callable[[], tuple[Callable[[Path], None], bool]],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.requested: dict[str, Policy] = {}
        self._root = root
        self._stage = stage
        self._failed = failed
        self._given_up: set[str] = set()
        self._latest_policy: Policy = "error"
        self._newest: tuple[State, Path] | None = None
        self._in_flight: _Writing | None = None

    def request(self, name: str, on_failure: Policy, instead_of: Iterable[str] = ()) -> None:
        """Ask for a checkpoint of this name at the next opportunity, which gives up other names.

        Raises:
            HookError: there is no run to save it in.
            ArgumentError: it cannot be a name.
        """
        if self._root is None:
            raise HookError(f"checkpoint {name!r} cannot be saved: this main loop has no run directory")
        if is_directory_name(safe_component("checkpoint", name)):
            raise ArgumentError("checkpoint", f"{name!r} is how emrun names the directories themselves")
        self.requested[safe_component("checkpoint", name)] = on_failure
        self._given_up.update(instead_of)
        if name == "latest":
            self._latest_policy = on_failure

    def save_requested(self, epoch: int, iteration: int, phase: str) -> None:
        """Begin to save what was requested: one checkpoint, with all the names.

        Args:
            epoch: training epochs done.
            iteration: batches of the train stream run.
            phase: what tells the states at one iteration apart.

        Raises:
            StorageError: it, or the one before, could not be saved, and a name was requested that way.
        """
        if self._in_flight is not None and (self.requested or self._in_flight.is_over):
            self.wait()
        if not self.requested or self._root is None:
            return
        names, self.requested = self.requested, {}
        given_up, self._given_up = self._given_up - names.keys(), set()
        state = (epoch, iteration, phase)
        place = self._newest[1] if self._newest is not None and self._newest[0] == state else None
        try:
            if place is not None and place.is_dir():
                name_checkpoint(place, names, given_up)
                return
            write, in_background = self._stage()
        except StorageError as error:
            _report(error, names)
            return
        self._in_flight = _Writing(self._root, write, state, names, given_up, self._failed)
        if in_background:
            self._in_flight.start()
        else:
            self._in_flight.run()
            self.wait()

    def request_latest(self) -> None:
        """Ask for the checkpoint `latest`, as whoever asked for it last; without a run, do nothing."""
        if self._root is not None:
            self.requested["latest"] = self._latest_policy

    def save_latest(self, epoch: int, iteration: int, phase: str) -> None:
        """Save what was requested, and the state that the training ends with as `latest`; return when that is done."""
        self.request_latest()
        self.save_requested(epoch, iteration, phase)
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            StorageError: what was could not be saved, and a name was requested that way.
            BaseException: what else the model or its state raised while it was written.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is None:
            return
        writing.join()
        if writing.place is not None:
            self._newest = (writing.state, writing.place)
        if isinstance(writing.error, StorageError):
            _report(writing.error, writing.names)
        elif writing.error is not None:
            raise writing.error

    @property
    def newest(self) -> tuple[str, int] | None:
        """The directory's name and the iteration of the checkpoint that was saved or loaded last."""
        return (self._newest[1].name, self._newest[0][1]) if self._newest is not None else None

    def go_on_from(self, place: Path, epoch: int, iteration: int, phase: str) -> None:
        """Make the checkpoint that was loaded the latest one, under all its names; see `go_back_to`."""
        go_back_to(place)
        self._newest = ((epoch, iteration, phase), place)


class _Writing:
    """One checkpoint that is written, in a thread or not."""

    def __init__(
        self,
        root: Path,
        write: Callable[[Path], None],
        state: State,
        names: dict[str, Policy],
        given_up: Iterable[str],
        failed: Callable[[], None],
    ) -> None:
        self.state = state
        self.names = names
        self.place: Path | None = None
        self.error: BaseException | None = None
        self.is_over = False
        self._arguments: dict[str, Any] = {
            "root": root, "save": write, "epoch": state[0], "iteration": state[1], "names": names, "given_up": given_up,
        }  # fmt: skip
        self._failed = failed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="emrun checkpoint", daemon=True)
        self._thread.start()

    def run(self) -> None:
        try:
            self.place = commit(**self._arguments)
        except BaseException as error:
            self.error = error
            self._failed()
        finally:
            self._arguments.clear()  # the copy of the state
            self.is_over = True

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _report(error: StorageError, names: dict[str, Policy]) -> None:
    if "error" in names.values():
        raise error
    if "warn" in names.values():
        _LOG.warning("no checkpoint was saved: %s", error)
