"""The state of a training: where it is, and all that a checkpoint keeps so that it goes on from there exactly."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from emrun import fields
from emrun.encoding import RANDOM, encode, random_state, set_random_state
from emrun.events import may_change_batches
from emrun.hook import AbstractHook
from emrun.model import AbstractModel
from emrun.storage.manifest import NAMES
from emrun.storage.run import Run
from emrun.storage.state_file import FILE, load_state, save_state
from emrun.streams.dataset_streams import DatasetStreams
from emrun.wording import listed

_LOG = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where in an epoch a training is."""

    BEFORE = "before"  # the zeroth epoch is not complete
    TRAIN = "train"  # in the train stream
    EVALUATE = "evaluate"  # behind the train stream, the extra streams not complete
    BETWEEN = "between"  # between two epochs


_LAST = {"began": fields.optional(RANDOM), "digest": fields.optional(fields.TEXT), "before_last": fields.ANYTHING}
_BETWEEN_PASSES = {
    "end_of_pass": fields.optional(fields.record({"pass": fields.whole(), "batch": fields.whole(1), **_LAST}))
}
_POSITION = {"pass": fields.whole(), "batch": fields.whole(), "epoch_batches": fields.whole()}


def _check_position(value: Any, key: str) -> None:
    """Check the position in a stream, and what is kept of the last batch: of this pass, or of the one before."""
    fields.record(_POSITION).check(value, key)
    fields.record(_LAST if value["batch"] else _BETWEEN_PASSES).check(value, key)


STATE = {
    "loop": fields.record(
        {
            "epochs_done": fields.whole(),
            "iterations_done": fields.whole(),
            "phase": fields.choice(*(phase.value for phase in Phase)),
        }
    ),
    "model": fields.ANYTHING,  # the model looks at it, the hooks at theirs
    "hooks": fields.sequence_of(
        fields.record({"class": fields.TEXT, "occurrence": fields.whole(), "state": fields.ANYTHING})
    ),
    "streams": fields.mapping_of(fields.Kind("a mapping", lambda value: isinstance(value, Mapping), _check_position)),
    "epoch_began": fields.optional(fields.record({"iterations_done": fields.whole(), "random": RANDOM})),
    "names": fields.optional(NAMES),
    "metrics": fields.whole(),
    "metrics_digest": fields.SHA256,
    "metrics_first": fields.optional(fields.whole()),
    "random": RANDOM,
}
"""Field of `state.pt` -> what it may hold."""
_SINCE = ("epoch_began", "names", "metrics_digest", "metrics_first")  # what the first checkpoints did not have


class TrainingState:
    """Counts epochs and iterations, and collects and brings back what the parts of a training say of their states.

    Only this class moves where the training is, but for `iterations_done`, which the loop counts by hand.

    Args:
        model: its weights, and the rest of its state.
        hooks: their states are matched by class and order.
        streams: the positions of those that are trained on.
        run: whose metrics end with the state; None when there is none, and so no checkpoint.
    """

    def __init__(
        self, model: AbstractModel, hooks: Sequence[AbstractHook], streams: DatasetStreams, run: Run | None
    ) -> None:
        self.epochs_done = 0
        self.iterations_done = 0
        self.phase = Phase.BEFORE
        self._hooks = hooks
        self._model = model
        self._streams = streams
        self._run = run
        self.names: Mapping[str, str] | None = None
        """The names of checkpoints, name -> directory, when the one was saved that was loaded; None when none knows."""
        self._copy: dict[str, Any] | None = None
        self._epoch_began: dict[str, Any] | None = None  # iterations done and random states then
        self._loaded: tuple[Path, dict[str, Any]] | None = None  # until `resume`: the checkpoint, its random states

    @property
    def point(self) -> tuple[int, int, str]:
        """What tells the states of a training apart: epochs done, iterations done, phase of the epoch."""
        return self.epochs_done, self.iterations_done, self.phase.value

    @property
    def is_in_epoch(self) -> bool:
        """Whether a training epoch has begun that is not complete."""
        return self.phase in (Phase.TRAIN, Phase.EVALUATE)

    def begin_epoch(self) -> None:
        """Take note of what a training epoch begins with, for a resume in its middle; see `resume`."""
        if self._run is not None:
            self._epoch_began = {"iterations_done": self.iterations_done, "random": random_state()}

    def begin_train_streams(self) -> bool:
        """Come to the train stream of an epoch; return False in one that is resumed behind the stream."""
        if self.phase is Phase.EVALUATE:
            return False
        self.phase = Phase.TRAIN
        return True

    def end_train_streams(self) -> None:
        """Come to the end of the last train stream of an epoch."""
        self.phase = Phase.EVALUATE

    def end_epoch(self, *, trained: bool) -> None:
        """Come to the end of an epoch, in which checkpoints get the state of their moment again."""
        self.epochs_done += trained
        self.phase = Phase.BETWEEN
        self._copy = None

    def start_from(self, epochs_done: int, iterations_done: int) -> None:
        """Count on from where a model that was loaded has come to."""
        self.epochs_done, self.iterations_done = epochs_done, iterations_done
        self.phase = Phase.BETWEEN if epochs_done or iterations_done else Phase.BEFORE

    def encoded(self, *, copied: bool = False) -> dict[str, Any]:
        """Return the state beside the weights in types that can be saved, the random states last.

        Args:
            copied: whatever happens to the tensors afterwards, but for those of the model, which may be large.

        Raises:
            StateError: a part has something in its state that cannot be saved.
        """
        hooks = [
            {
                "class": name,
                "occurrence": occurrence,
                "state": encode(hook.state_dict(), f"state of hook {name}", copied=copied),
            }
            for (name, occurrence), hook in _occurrences(self._hooks).items()
        ]
        streams = {name: stream.state_dict() for name, stream in self._streams.trained.items()}  # has its own copies
        return {
            "loop": {
                "epochs_done": self.epochs_done,
                "iterations_done": self.iterations_done,
                "phase": self.phase.value,
            },
            "model": encode(self._model.state_dict(), "state of the model"),
            "hooks": hooks,
            "streams": streams,
            "epoch_began": self._epoch_began if self.is_in_epoch else None,
            **(self._run.metrics_position if self._run is not None else {"metrics": 0}),
            "random": random_state(),
        }

    def keep_copy(self) -> None:
        """Keep the state as it is now for checkpoints of the evaluations that follow, until the end of the epoch."""
        if self._run is not None:
            self._copy = self.encoded(copied=True)  # evaluations do not change the model's part

    def snapshot(self, names: Mapping[str, str] | None = None) -> tuple[Callable[[Path], None], bool]:
        """Return what writes the state as it is now, or as it was kept, and whether another thread may do so.

        Args:
            names: name -> directory, of the checkpoints that have one when this is committed; kept with the state.
        """
        write_weights = self._model.stage()
        in_background = write_weights is not None
        state = self._copy if self._copy is not None else self.encoded(copied=in_background)
        if in_background:
            state = {**state, "model": encode(state["model"], "state of the model", copied=True)}
        if names is not None:
            state = {**state, "names": dict(sorted(names.items()))}
        writers = (write_weights or self._model.save, partial(save_state, state))

        def write(directory: Path) -> None:
            for each in writers:
                each(directory)

        return write, in_background

    def load(self, place: Path) -> None:
        """Bring weights, model, hooks, counters and metrics to a checkpoint; the rest follows in `resume`.

        Args:
            place: the directory of the checkpoint, which must be there until `resume`.

        Raises:
            StateError: it does not fit the model, the hooks or the streams.
            StorageError: it cannot be read.
        """
        state, file = load_state(place), place / FILE
        with fields.reading(str(file), fields.ANOTHER_CHECKPOINT):
            fields.record(STATE, may_lack=_SINCE).check(state)
        model = self._model
        with fields.reading(f"weights of checkpoint {place}", fields.ANOTHER_CHECKPOINT, model.load):
            model.load(place)
        with fields.reading(f"{file}: model", fields.ANOTHER_CHECKPOINT, model.load_state_dict):
            model.load_state_dict(state["model"])
        loop = state["loop"]
        self.epochs_done, self.iterations_done = loop["epochs_done"], loop["iterations_done"]
        self.phase = Phase(loop["phase"])
        for (name, occurrence), hook in _occurrences(self._hooks).items():
            found = [each for each in state["hooks"] if (each["class"], each["occurrence"]) == (name, occurrence)]
            if found:
                with fields.reading(f"{file}: state of hook {name}", fields.ANOTHER_CHECKPOINT, hook.load_state_dict):
                    hook.load_state_dict(found[0]["state"])
        for name, position in state["streams"].items():
            with fields.reading(f"{file}: streams.{name}", fields.ANOTHER_CHECKPOINT):
                self._streams.get(name, train=True).load_state_dict(position)
        self._epoch_began = state.get("epoch_began")
        self.names = state.get("names")
        self._loaded = place, state["random"]
        if self._run is not None:
            first = state.get("metrics_first")
            expected = range(1 if first is None else first, self.epochs_done + 1)
            self._run.rewind(state["metrics"], state.get("metrics_digest"), expected)

    def is_now_in(self, place: Path) -> None:
        """Take note that the checkpoint that was loaded lies in another directory."""
        if self._loaded is not None:
            self._loaded = place, self._loaded[1]

    def resume(self, before_epoch: Callable[[int], None]) -> None:
        """Bring streams and random states to where the checkpoint that was loaded had them, if there was one.

        When the checkpoint lies in the middle of an epoch, that epoch begins once more, so that what was set up at its
        beginning is in force again; then the checkpoint is loaded a second time, over what that changed. The second
        load reads the files again: a copy in memory would share its tensors with the optimizer.

        Args:
            before_epoch: begins an epoch, whose number it gets, under the random states with which that epoch began.

        Raises:
            StateError: see `load`.
            StorageError: see `load`.
            BaseException: what `before_epoch` raises.
        """
        if self._loaded is None:
            return
        place, random_to_restore = self._loaded
        if self.is_in_epoch:
            self._begin_again(before_epoch)
            with _logged_already():
                self.load(place)
        for name, stream in self._streams.trained.items():
            if not stream.restore():
                _LOG.warning("this resume is not exact: %s", self._why_different(name, stream.different))
        set_random_state(random_to_restore)
        self._loaded = None

    def _why_different(self, name: str, sources: list[str]) -> str:
        """Return what is known of a stream that did not come back as it was."""
        if not sources:
            return f"stream {name!r} has another length, or draws from global random states while it is read ahead"
        changers = [type(each).__name__ for each in (*self._hooks, self._model) if may_change_batches(each)]
        in_place = (
            f"{listed(changers)} (before_batch), the model or another hook" if changers else "the model or a hook"
        )
        which = listed([repr(source) for source in sources])
        return (
            f"stream {name!r} gave another {which} before the position than was trained on; {in_place} changes arrays "
            f"of {which} in place (make new ones), the stream draws random numbers of its own, or its data changed"
        )

    def _begin_again(self, before_epoch: Callable[[int], None]) -> None:
        """Begin the epoch that the state lies in once more, with the counters and random states of its beginning."""
        iterations_done = self.iterations_done
        if self._epoch_began is not None:  # it was saved by a loop that takes note of them
            self.iterations_done = self._epoch_began["iterations_done"]
            set_random_state(self._epoch_began["random"])
        try:
            before_epoch(self.epochs_done + 1)
        finally:
            self.iterations_done = iterations_done


@contextmanager
def _logged_already() -> Iterator[None]:
    """Leave warnings out of the log, which has them from the first time that the same was done."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def _occurrences(hooks: Sequence[AbstractHook]) -> dict[tuple[str, int], AbstractHook]:
    """Return (class, how many of it came before) -> hook: by this their states are matched."""
    found: dict[tuple[str, int], AbstractHook] = {}
    for hook in hooks:
        name = f"{type(hook).__module__}.{type(hook).__qualname__}"
        occurrence = sum(each == name for each, _ in found)
        found[name, occurrence] = hook
    return found
