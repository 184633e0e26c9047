"""What a checkpoint holds: all that a training needs to continue exactly from there, and how this comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base import fields
from emrun.base.encoding import Rows, decode, encode, random_state, set_random_state
from emrun.base.types import State
from emrun.base.wording import listed
from emrun.events import changers_of
from emrun.hook import AbstractHook
from emrun.loop.progress import Phase, Progress
from emrun.loop.ranks.states import RankStates
from emrun.loop.run_length import ChangedData, RunLength
from emrun.loop.step_log import StepLog
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks
from emrun.record.metrics_log import MetricsLog
from emrun.storage.checkpoints.manifest import NAMES
from emrun.storage.checkpoints.shards import OF_STATE, taken_out, write_shard
from emrun.storage.checkpoints.state_file import FILE, class_of, keyed, load_state, save_state, short_key
from emrun.storage.class_names import record_classes
from emrun.storage.preparation import copy_preparation
from emrun.stream_context import BeyondEnd
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class Copy(NamedTuple):
    """A copy of the state of a training."""

    write: Callable[[Path], Any]
    """Writes the copy to a directory. Of a sharded model, it writes what this rank has, and returns this."""
    in_background: bool
    """Whether another thread may write the copy."""


class _Loaded(NamedTuple):
    """A checkpoint that is loaded, until `Snapshot.resume`."""

    place: Path
    random: Any  # its random states


@dataclass(eq=False)
class Snapshot:
    """Collects and restores the states of the model, the hooks, the streams and the record.

    A loaded state is given to the hook with the same key; see `keyed`.

    Args:
        model: the model.
        hooks: the hooks.
        dataset: the dataset, whose classes a checkpoint names.
        progress: where the training is.
        streams: the streams, of which the positions in train streams are saved.
        record: the rows of the run, which go back when a state is loaded; without a directory there are no checkpoints.
        steps: the step log, of which the values that are not written yet are saved.
        length: the length of the run.
        changed_data: compares the lengths of streams with those before a resume.
        has_run: whether there is a run directory.
        ranks: the ranks of the run.
        of_ranks: what each rank keeps for itself.
        follows: whether rank 0 has the run of this rank.
    """

    model: AbstractModel
    hooks: list[AbstractHook]
    dataset: Any
    progress: Progress
    streams: DatasetStreams
    record: MetricsLog
    steps: StepLog
    length: RunLength
    changed_data: ChangedData
    has_run: bool
    ranks: Ranks
    of_ranks: RankStates
    follows: bool
    is_before_evaluation: bool = field(default=False, init=False)
    """Whether the evaluations of an epoch have failed, so that only the state before them can be saved."""
    _kept: State | None = field(default=None, init=False)  # for all checkpoints during the evaluations of an epoch
    _ended: _Ended | None = field(default=None, init=False)  # the epoch that has ended last, if it can be gone back to
    _epoch_began: State | None = field(default=None, init=False)  # iterations, updates and random states at that time
    _loaded: _Loaded | None = field(default=None, init=False)

    def begin_epoch(self) -> None:
        """Note the counters and random states at the beginning of a training epoch, for `resume` in its middle."""
        self._kept = None
        self._ended = None
        if self.has_run:
            self._epoch_began = self._now()

    def _now(self) -> State:
        """Return the counters and random states."""
        progress = self.progress
        return {
            "iterations_done": progress.iterations_done,
            "updates_done": progress.updates_done,
            "random": random_state(),
        }

    def end_epoch(self, *, trained: bool) -> None:
        """End an epoch; from now on, checkpoints get the current state again, not the copy of `keep_copy`."""
        self._ended = _Ended(self._kept, self.progress.epochs_done)
        self._kept = None
        self.progress.end_epoch(trained=trained)

    def go_back(self) -> None:
        """Go back to the copy of `keep_copy`, because the epoch failed after its train streams."""
        if self._ended is not None:
            self._kept = self._ended.copy
            self.progress.go_back(self._ended.epochs_done)
        self.is_before_evaluation = self._kept is not None

    def keep_copy(self) -> None:
        """Copy the current state for all checkpoints until the end of the epoch, that is, during the evaluations."""
        if self.has_run:
            self._kept = self._of_all_ranks(self.encoded(copied=True))  # evaluations do not change the model's state

    def encoded(self, *, copied: bool = False) -> State:
        """Return the state without the weights, in types that can be saved; the random states are read last.

        Args:
            copied: whether to copy all tensors except those of the model, which may be large.

        Raises:
            StateError: the state of a part has a value that cannot be saved.
        """
        progress = self.progress
        hooks = {
            key: encode(_state_of(hook, "hook"), f"state of hook {short_key(key)}", copied=copied)
            for key, hook in keyed(self.hooks).items()
        }
        streams = {name: stream.state_dict() for name, stream in self.streams.trained.items()}  # these are copies
        return {
            "loop": {
                "epochs_done": progress.epochs_done,
                "iterations_done": progress.iterations_done,
                "updates_done": progress.updates_done,
                "phase": progress.phase.value,
            },
            "model": encode(_state_of(self.model, "model"), "state of the model", copied=self.model.is_sharded),
            "hooks": hooks,
            "streams": streams,
            "epoch_began": self._epoch_began if progress.is_in_epoch else None,
            "steps": self.steps.state_dict(),
            "horizon": {**self.length.state_dict(), "lengths": self.changed_data.state_dict()},
            "record": self.record.state_dict(),
            "random": random_state(),
        }

    def _of_all_ranks(self, state: State) -> State:
        """Return a state with what the other ranks keep for themselves; all ranks call this."""
        return self.of_ranks.with_parts(state) if self.ranks.several else state

    def take(self, names: Mapping[str, str] | None = None) -> Copy:
        """Copy the current state, or take the copy of `keep_copy`.

        Args:
            names: name -> directory of all checkpoints after this one is committed; saved in the state.
        """
        is_sharded = self.model.is_sharded
        if self.follows and not is_sharded:
            if self._kept is None:
                self._of_all_ranks(self.encoded())
            return Copy(_write_nothing, False)

        # the weights, and all else
        if self._kept is None:
            self._ended = None
        write_weights = self.model.stage()
        in_background = write_weights is not None
        state = self._kept or self.encoded(copied=in_background)
        if in_background and not is_sharded:  # then it is a copy
            state = {**state, "model": encode(state["model"], "state of the model", copied=True)}
        state = self._of_all_ranks(state)
        if names is not None:
            state = {**state, "names": dict(sorted(names.items()))}

        # what writes them
        of_data = partial(record_classes, self.dataset), partial(copy_preparation, self.record.directory)
        if not is_sharded:
            writers = (write_weights or self.model.save, partial(save_state, state), *of_data)
            return Copy(partial(_write, writers, ()), in_background)
        rows: dict[str, Rows] = {}
        state = {**state, "model": taken_out(state["model"], rows)}
        shards = (write_weights or self.model.save, partial(write_shard, {OF_STATE: (rows, {})}, self.ranks.rank))
        whole = () if self.follows else (partial(save_state, state), *of_data)
        return Copy(partial(_write, whole, shards), in_background)

    def load(self, place: Path) -> Mapping[str, str] | None:
        """Load weights, model, hooks, counters and metrics from a checkpoint; `resume` restores the rest.

        Args:
            place: the directory of the checkpoint, which must exist until `resume`.

        Returns:
            Name -> directory of all checkpoints at the time when this one was saved; None if not known.

        Raises:
            StateError: the checkpoint does not fit the model, the hooks or the streams.
            StorageError: the checkpoint cannot be read.
        """
        state = load_state(place)
        file = place / FILE
        hooks = keyed(self.hooks)

        # the counters
        with fields.reading(str(file), fields.ANOTHER_CHECKPOINT):
            fields.optional(NAMES).check(state.get("names"), "names")
            state = self.of_ranks.of_this_rank(decode(state))
            _warn_of_new(hooks, state["hooks"])
            self.length.load_state_dict(state["horizon"])
            self.changed_data.load_state_dict(state["horizon"].get("lengths", {}))
            done = state["loop"]
            self.progress.start_from(
                index(done["epochs_done"]),
                index(done["iterations_done"]),
                index(done["updates_done"]),
                Phase(done["phase"]),
            )

        # the model
        model = self.model
        with fields.reading(f"weights of checkpoint {place}", fields.ANOTHER_CHECKPOINT, model.load):
            model.load(place)
        with fields.reading(f"{file}: model", fields.ANOTHER_CHECKPOINT, model.load_state_dict):
            model.load_state_dict(state["model"])

        # the hooks
        for key, hook in hooks.items():
            if key in state["hooks"]:
                where = f"{file}: state of hook {short_key(key)}"
                with fields.reading(where, fields.ANOTHER_CHECKPOINT, hook.load_state_dict):
                    hook.load_state_dict(state["hooks"][key])
        self.of_ranks.merge()

        # the streams and the record
        with fields.reading(str(file), fields.ANOTHER_CHECKPOINT):
            for name, position in state["streams"].items():
                self.streams.get(name, train=True).load_state_dict(position)
            self.steps.load_state_dict(state["steps"], self.progress.iterations_done)
            self._epoch_began = state["epoch_began"]
            self._loaded = _Loaded(place, state["random"])
            self.record.load_state_dict(state["record"], self.progress.epochs_done, self.progress.iterations_done)
        names: Mapping[str, str] | None = state.get("names")
        return names

    def resume(self, before_epoch: Callable[[int], None]) -> None:
        """Restore the streams and the random states of the loaded checkpoint, if there is one.

        If the checkpoint is in the middle of an epoch, the epoch begins again first, so that hooks set up again what
        they set up in `before_epoch`. Then the checkpoint is loaded a second time, because this may have changed
        states. The second load reads the files again: a copy in memory would share its tensors with the optimizer.

        Args:
            before_epoch: begins the epoch with a given number. The random states are then those at its first beginning.

        Raises:
            StateError: see `load`.
            StorageError: see `load`.
            BaseException: an error of `before_epoch`.
        """
        loaded = self._loaded
        if loaded is None:
            return
        if self.progress.is_in_epoch:
            self._begin_again(before_epoch)
            with _logged_already():
                self.load(loaded.place)
        for stream in self.streams.trained.values():
            self._restore(stream)
        set_random_state(loaded.random)
        self._loaded = None

    def _restore(self, stream: StreamWrapper) -> None:
        """Restore a train stream; tell if its data have changed."""
        changed_data = self.changed_data
        try:
            is_exact = stream.restore(may_be_shorter=changed_data.policy != "error")
        except BeyondEnd:
            changed_data.compare(stream, refuses=True, change=stream.change)
            raise
        is_other = changed_data.compare(stream, refuses=not changed_data.overrides, change=stream.change)
        if not (is_exact or is_other):
            _LOG.warning("this resume is not exact: %s", self._why_different(stream.name, stream.different))

    def _why_different(self, name: str, sources: list[str]) -> str:
        """Return the possible reasons why a stream differs from that before the resume, in these sources."""
        if not sources:
            return f"stream {name!r} draws global random numbers during read-ahead"
        which = listed([repr(source) for source in sources])
        if overrides := self.changed_data.overrides:
            what = f"gives other values of {which} than before"
            return f"stream {name!r} {what}, as this resume changes {listed(overrides)}"
        in_place = "the model or a hook"
        if changers := changers_of(self.hooks, self.model):
            in_place = f"{listed(changers)} (before_batch), the model or another hook"
        return (
            f"stream {name!r} gives other values of {which} than before: {in_place} changes arrays of {which} in place "
            "(make new arrays instead), the stream draws from its own random generator, or its data has changed"
        )

    def _begin_again(self, before_epoch: Callable[[int], None]) -> None:
        """Begin the current epoch again, with the counters and random states of its first beginning."""
        began = self._epoch_began or self._now()
        with self.progress.beginning_again(began["iterations_done"], began["updates_done"]):
            set_random_state(began["random"])
            before_epoch(self.progress.epochs_done + 1)


class _Ended(NamedTuple):
    """The epoch that has ended last: what was kept for its evaluations, and the epochs done before its end."""

    copy: State | None
    epochs_done: int


def _state_of(part: AbstractHook | AbstractModel, who: str) -> State:
    """Return the state of a hook or of the model; an error gets a note that names them."""
    try:
        return part.state_dict()
    except Exception as error:
        error.add_note(f"in {who} {type(part).__name__}, state_dict")
        raise


def _warn_of_new(hooks: Iterable[str], states: Mapping[str, Any]) -> None:
    """Warn of hooks whose class has states in a checkpoint, none of which is theirs; all are keys of `keyed`."""
    kept = {class_of(key) for key, state in states.items() if state}
    if new := [short_key(key) for key in hooks if key not in states and class_of(key) in kept]:
        _LOG.warning(
            "hooks without a state in the checkpoint begin anew: %s; list new hooks after the others of their class",
            listed(new),
        )


@contextmanager
def _logged_already() -> Iterator[None]:
    """Do not log warnings in this block, because the first load has already logged them."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def _write_nothing(directory: Path) -> None:
    """Write nothing, as another rank writes the checkpoint."""


def _write(
    whole: Sequence[Callable[[Path], object]], shards: Sequence[Callable[[Path], Any]], directory: Path
) -> list[Any] | None:
    """Write the files of a checkpoint; return what the writers of the shards of this rank return, if there are any."""
    for write in whole:
        write(directory)
    return [write(directory) for write in shards] or None
