"""The state of a run: its progress, and all that a checkpoint stores to continue exactly from there."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

from emrun.base import fields
from emrun.base.encoding import Rows, decode, encode, random_state, set_random_state
from emrun.base.wording import listed
from emrun.events import may_change_batches
from emrun.hook import Loop
from emrun.loop.endings import switched_on
from emrun.loop.horizon import RunLength
from emrun.loop.rank_states import RankStates, class_of, keyed, short_key
from emrun.loop.steps import StepRecord
from emrun.ranks.group import Ranks
from emrun.record.record import Record
from emrun.storage.checkpoints.manifest import NAMES
from emrun.storage.checkpoints.shards import OF_STATE, taken_out, write_shard
from emrun.storage.checkpoints.state_file import FILE, load_state, save_state
from emrun.storage.class_names import record_classes
from emrun.stream_context import BeyondEnd
from emrun.streams.dataset_streams import DatasetStreams

_LOG = logging.getLogger(__name__)


class Phase(enum.Enum):
    """The part of an epoch in which the loop is."""

    BEFORE = "before"  # the zeroth epoch is not complete
    TRAIN = "train"  # in the train stream
    EVALUATE = "evaluate"  # after the train stream, before the end of the extra streams
    BETWEEN = "between"  # between two epochs


class TrainingState:
    """Counts epochs and iterations, and collects and restores the states of the model, the hooks and the streams.

    Only this class changes the counters and the phase, except for `iterations_done` and `updates_done`, which the loop
    also counts up. A loaded state is given to the hook with the same key; see `keyed`.

    Args:
        loop: has the model, the hooks, the seed and the counters.
        streams: the streams, of which the positions in train streams are saved.
        record: the rows of the run, which go back when a state is loaded; without a directory there are no checkpoints.
        steps: the step record, of which the values that are not written yet are saved.
        length: the length of the run.
        ranks: the ranks of the run.
        follows: whether rank 0 has the run of this rank.
    """

    def __init__(
        self,
        loop: Loop,
        streams: DatasetStreams,
        record: Record,
        steps: StepRecord,
        length: RunLength,
        ranks: Ranks | None = None,
        follows: bool = False,
    ) -> None:
        self.phase = Phase.BEFORE
        self._loop = loop
        self._streams = streams
        self._record = record
        self._steps = steps
        self._length = length
        self._of_ranks = RankStates(loop, ranks or Ranks())
        self._follows = follows
        self.kept = _Kept()
        """The state before the evaluations of an epoch, to which the training goes back if they fail."""
        self._epoch_began: dict[str, Any] | None = None  # iterations done and random states at that time
        self._loaded: tuple[Path, dict[str, Any]] | None = None  # until `resume`: the checkpoint, its random states

    @property
    def point(self) -> tuple[int, int, str]:
        """Identifies a state of the training: epochs done, iterations done, phase of the epoch."""
        return self._loop.training_epochs_done, self._loop.iterations_done, self.phase.value

    @property
    def is_in_epoch(self) -> bool:
        """Whether a training epoch has begun but is not complete."""
        return self.phase in (Phase.TRAIN, Phase.EVALUATE)

    def begin_epoch(self) -> None:
        """Record the counters and random states at the beginning of a training epoch, for `resume` in its middle."""
        self.kept.copy = self.kept.before_end = None
        if self._loop.has_run:
            self._epoch_began = self._now()

    def _now(self) -> dict[str, Any]:
        """Return the counters and random states."""
        done = {"iterations_done": self._loop.iterations_done, "updates_done": self._loop.updates_done}
        return {**done, "random": random_state()}

    def begin_train_streams(self) -> bool:
        """Enter the train stream of an epoch; return False if the epoch is resumed after the train stream."""
        if self.phase is Phase.EVALUATE:
            return False
        self.phase = Phase.TRAIN
        return True

    def end_train_streams(self) -> None:
        """Leave the last train stream of an epoch."""
        self.phase = Phase.EVALUATE

    def end_epoch(self, *, trained: bool) -> None:
        """End an epoch; from now on, checkpoints get the current state again, not the copy of `keep_copy`."""
        self.kept.before_end = self.kept.copy, self._loop.training_epochs_done
        self._loop.training_epochs_done += trained
        self.phase = Phase.BETWEEN
        self.kept.copy = None

    def go_back(self) -> None:
        """Go back to the copy of `keep_copy`, because the epoch failed after its train streams."""
        if self.kept.before_end is not None:
            self.kept.copy, self._loop.training_epochs_done = self.kept.before_end
            self.phase = Phase.EVALUATE
        self.kept.is_used = self.kept.copy is not None

    def start_from(self, epochs_done: int, iterations_done: int) -> None:
        """Set the counters to those of a loaded model; the updates are about right."""
        loop = self._loop
        loop.training_epochs_done, loop.iterations_done = epochs_done, iterations_done
        loop.updates_done = iterations_done // loop.model.iterations_per_update
        self.phase = Phase.BETWEEN if epochs_done or iterations_done else Phase.BEFORE

    def encoded(self, *, copied: bool = False) -> dict[str, Any]:
        """Return the state without the weights, in types that can be saved; the random states are read last.

        Args:
            copied: whether to copy all tensors except those of the model, which may be large.

        Raises:
            StateError: the state of a part has a value that cannot be saved.
        """
        hooks = {
            key: encode(hook.state_dict(), f"state of hook {short_key(key)}", copied=copied)
            for key, hook in keyed(self._loop.hooks).items()
        }
        streams = {name: stream.state_dict() for name, stream in self._streams.trained.items()}  # these are copies
        return {
            "loop": {
                "epochs_done": self._loop.training_epochs_done,
                "iterations_done": self._loop.iterations_done,
                "updates_done": self._loop.updates_done,
                "phase": self.phase.value,
            },
            "model": encode(self._loop.model.state_dict(), "state of the model", copied=self._loop.model.is_sharded),
            "hooks": hooks,
            "streams": streams,
            "epoch_began": self._epoch_began if self.is_in_epoch else None,
            "steps": self._steps.state_dict(),
            "horizon": self._length.state_dict(),
            "record": self._record.state_dict(),
            "random": random_state(),
        }

    def keep_copy(self) -> None:
        """Copy the current state for all checkpoints until the end of the epoch, that is, during the evaluations."""
        if self._loop.has_run:
            copy = self.encoded(copied=True)  # evaluations do not change the state of the model
            self.kept.copy = self._of_ranks.with_parts(copy)

    def snapshot(self, names: Mapping[str, str] | None = None) -> tuple[Callable[[Path], Any], bool]:
        """Return a function that writes the state to a directory, and whether another thread may call the function.

        The state is the current one, or the copy of `keep_copy`. Of a sharded model, the function writes what this rank
        has, and returns it; see `write_together`.

        Args:
            names: name -> directory of all checkpoints after this one is committed; saved in the state.
        """
        is_sharded = self._loop.model.is_sharded
        if self._follows and not is_sharded:
            if self.kept.copy is None:
                self._of_ranks.with_parts(self.encoded())
            return lambda directory: None, False
        if self.kept.copy is None:
            self.kept.before_end = None
        write_weights = self._loop.model.stage()
        in_background = write_weights is not None
        state = self.kept.copy or self.encoded(copied=in_background)
        if in_background and not is_sharded:  # then it is a copy
            state = {**state, "model": encode(state["model"], "state of the model", copied=True)}
        state = self._of_ranks.with_parts(state)
        if names is not None:
            state = {**state, "names": dict(sorted(names.items()))}
        classes = partial(record_classes, self._loop.dataset)
        if not is_sharded:
            writers = (write_weights or self._loop.model.save, partial(save_state, state), classes)
            return partial(_write, (), writers), in_background
        rows: dict[str, Rows] = {}
        state = {**state, "model": taken_out(state["model"], rows)}
        parts = (write_weights, partial(write_shard, {OF_STATE: (rows, {})}, self._of_ranks.rank))
        return partial(_write, parts, () if self._follows else (partial(save_state, state), classes)), in_background

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
        state, file = load_state(place), place / FILE
        hooks = keyed(self._loop.hooks)
        with fields.reading(str(file), fields.ANOTHER_CHECKPOINT):
            fields.optional(NAMES).check(state.get("names"), "names")
            state = self._of_ranks.of_this_rank(decode(state))
            _warn_of_new(hooks, state["hooks"])
            self._length.load_state_dict(state["horizon"])
            loop, done = self._loop, state["loop"]
            loop.training_epochs_done, loop.iterations_done = index(done["epochs_done"]), index(done["iterations_done"])
            loop.updates_done = index(done["updates_done"])
            self.phase = Phase(done["phase"])
        model = loop.model
        with fields.reading(f"weights of checkpoint {place}", fields.ANOTHER_CHECKPOINT, model.load):
            model.load(place)
        with fields.reading(f"{file}: model", fields.ANOTHER_CHECKPOINT, model.load_state_dict):
            model.load_state_dict(state["model"])
        for key, hook in hooks.items():
            if key in state["hooks"]:
                where = f"{file}: state of hook {short_key(key)}"
                with fields.reading(where, fields.ANOTHER_CHECKPOINT, hook.load_state_dict):
                    hook.load_state_dict(state["hooks"][key])
        self._of_ranks.merge()
        with fields.reading(str(file), fields.ANOTHER_CHECKPOINT):
            for name, position in state["streams"].items():
                self._streams.get(name, train=True).load_state_dict(position)
            self._steps.load_state_dict(state["steps"], loop.iterations_done)
            self._epoch_began = state["epoch_began"]
            self._loaded = place, state["random"]
            self._record.load_state_dict(state["record"], loop.training_epochs_done, loop.iterations_done)
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
        if self._loaded is None:
            return
        place, random_to_restore = self._loaded
        if self.is_in_epoch:
            self._begin_again(before_epoch)
            with _logged_already():
                self.load(place)
        for name, stream in self._streams.trained.items():
            try:
                is_exact = stream.restore(may_be_shorter=self._length.on_changed_data != "error")
            except BeyondEnd:
                self._length.compare(stream, refuses=True, change=stream.change)
                raise
            is_other = self._length.compare(stream, refuses=not self._length.changed, change=stream.change)
            if not (is_exact or is_other):
                _LOG.warning("this resume is not exact: %s", self._why_different(name, stream.different))
        set_random_state(random_to_restore)
        self._loaded = None

    def _why_different(self, name: str, sources: list[str]) -> str:
        """Return the possible reasons why a stream differs from that before the resume, in these sources."""
        if not sources:
            return f"stream {name!r} draws global random numbers during read-ahead"
        if changed := self._length.changed:
            what = f"gives other values of {listed(list(map(repr, sources)))}"
            return f"stream {name!r} {what} than before, as this resume changes {listed(changed)}"
        changers = [type(each).__name__ for each in (*self._loop.hooks, self._loop.model) if may_change_batches(each)]
        in_place = (
            f"{listed(changers)} (before_batch), the model or another hook" if changers else "the model or a hook"
        )
        which = listed([repr(source) for source in sources])
        return (
            f"stream {name!r} gives other values of {which} than before: {in_place} changes arrays of {which} in place "
            "(make new arrays instead), the stream draws from its own random generator, or its data has changed"
        )

    def _begin_again(self, before_epoch: Callable[[int], None]) -> None:
        """Begin the current epoch again, with the counters and random states of its first beginning."""
        began = self._epoch_began or self._now()
        iterations, updates = (switched_on(self._loop, key, began[key]) for key in ("iterations_done", "updates_done"))
        with iterations, updates:
            set_random_state(began["random"])
            before_epoch(self._loop.training_epochs_done + 1)


@dataclass(eq=False)
class _Kept:
    """A copy of the state, for all checkpoints during the evaluations of an epoch."""

    copy: dict[str, Any] | None = None
    before_end: tuple[dict[str, Any] | None, int] | None = None
    """The copy, and the number of epochs, before the end of the last epoch."""
    is_used: bool = False
    """Whether the training has gone back to it."""


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


def _write(parts: Sequence[Any], rest: Sequence[Callable[[Path], None]], directory: Path) -> list[Any] | None:
    """Write the files of a checkpoint; return what the `parts` of a sharded model return, if there are any."""
    for each in rest:
        each(directory)
    return [each(directory) for each in parts] or None
