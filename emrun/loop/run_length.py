"""How long the run will be: the limits of the hooks, and the lengths of streams, also beside those before a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from emrun.base.arguments import check_choice
from emrun.base.errors import DataChanged, HookError
from emrun.base.types import TICKS, EpochData, Horizon, Policy
from emrun.base.wording import counted, listed
from emrun.events import changers_of
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.loop.progress import Progress
from emrun.model import AbstractModel
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)

UNITS = ("epochs", "passes", "updates", "iterations")
"""The units in which hooks declare limits."""
_SINGULAR = {"epochs": "epoch", "passes": "pass", "updates": "update", "iterations": "iteration"}

_WHY_SAME = {
    "updates": ", as every iteration makes an update",
    "epochs": ", as every epoch is a pass without main_loop.fixed_epoch_size",
}
_OTHER_WAYS = "give StopAfter a number of updates, set main_loop.fixed_epoch_size, or "
_ADD_LENGTH = "add num_batches to the dataset"


class RunLength:
    """Knows how many updates the run will make, its horizon, and ends the training there.

    Schedules of learning rates depend on the horizon, the smallest of the limits that hooks declare. An epoch has
    `fixed_epoch_size` batches, or is a pass. A pass has the number of batches in `num_batches` of the dataset, or that
    it asks of `ctx.batches`, or else as many as the model got in the zeroth epoch. Batches that `fixed_batch_size`
    drops do not count. This number is fixed when the training begins, and kept in the checkpoints. A window of batches
    makes an update; the last window of an epoch may be shorter.

    Args:
        model: says how many batches make an update.
        hooks: the hooks, which declare limits.
        progress: where the training is.
        streams: the streams, which know the size of an epoch, and the length of a pass if the dataset does.
        fixed_batch_size: batches of another length are dropped; None to drop none.
        has_zeroth_epoch: whether the train stream is evaluated before the training.
    """

    def __init__(
        self,
        model: AbstractModel,
        hooks: list[AbstractHook],
        progress: Progress,
        streams: DatasetStreams,
        fixed_batch_size: int | None,
        has_zeroth_epoch: bool,
    ) -> None:
        self._model = model
        self._hooks = hooks
        self._progress = progress
        self._streams = streams
        self._fixed_batch_size = fixed_batch_size
        self.has_zeroth_epoch = has_zeroth_epoch
        self._epoch = streams.fixed_epoch_size  # as in the config; `emrun check` shortens the streams
        self._pass = streams.pass_length if fixed_batch_size is None else None  # those that are dropped would count
        self._has_asked = False
        self._source = "num_batches of the dataset"
        self._is_fixed = False
        self._is_used = False  # whether anything depends on the horizon
        self._has_warned = False
        self._ends = True  # whether the training ends at a limit

    @property
    def limits(self) -> dict[str, int]:
        """The smallest of the limits that hooks declare, in each unit."""
        least: dict[str, int] = {}
        for _, unit, limit in self._declared():
            least[unit] = min(limit, least.get(unit, limit))
        return least

    @property
    def passes_done(self) -> int:
        """Number of complete passes of the train stream."""
        if self._epoch is None:
            return self._progress.epochs_done
        number, batch = self._streams.get(self._streams.train_stream_name, train=True).position
        return number - 1 + (batch == self._pass)

    def reached(self, *units: str) -> TrainingTerminated | None:
        """Return the end of the training at the first limit that is reached; None if there is none.

        Args:
            units: the units that are compared; all by default.
        """
        if not self._ends:
            return None
        for index, unit, limit in self._declared():
            if unit not in (units or UNITS):
                continue
            done = self._done(unit)
            if done >= limit:
                what = counted(done, _SINGULAR[unit], "es" if unit == "passes" else "s")
                return TrainingTerminated(
                    f"{what} done ({type(self._hooks[index]).__name__} {unit}: {limit})", limit=True
                )
        return None

    def _done(self, unit: str) -> int:
        """Return how many epochs, passes, updates or iterations are done."""
        if unit == "passes":
            return self.passes_done
        return {
            "epochs": self._progress.epochs_done,
            "updates": self._progress.updates_done,
            "iterations": self._progress.iterations_done,
        }[unit]

    def _earliest(self) -> float:
        """Return the least number of iterations with which the training may reach a limit in the train stream."""
        done = self._progress.iterations_done
        limits = self.limits
        ends = [limits["iterations"]] if "iterations" in limits else []
        ends += [done + limits["updates"] - self._progress.updates_done] if "updates" in limits else []
        ends += [done] if "passes" in limits else []
        return max(done + 1, min(ends, default=inf))

    def before_training(self) -> None:
        """End a resumed training that is at a limit already."""
        if self._progress.iterations_done:
            self._end()

    def before_epoch(self, epoch_id: int) -> None:
        """End a training that is at a limit before its first batch, as with 0 epochs and no zeroth epoch."""
        if epoch_id > self._progress.epochs_done:
            self._end()

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """End the training if it is at the limit of epochs or passes."""
        self._end("epochs", "passes")

    def _end(self, *units: str) -> None:
        ends = self.reached(*units)
        if ends is not None:
            raise ends

    @property
    def horizon(self) -> Horizon:
        """How many updates the run will make."""
        self._is_used = True
        self._ask()

        # the limits in updates, as far as they are known
        limits = self.limits
        epoch = self._epoch or self._pass
        sizes = {
            "epochs": epoch,
            "passes": self._pass,
            "iterations": 1 if self._model.iterations_per_update == 1 or epoch else None,
        }
        ends = [self._updates(limit * size) for unit, limit in limits.items() if (size := sizes.get(unit)) is not None]
        ends += [limits["updates"]] if "updates" in limits else []
        of_pass = None if self._pass is None else self._updates(self._pass)
        is_awaited = self._pass is None and self._epoch is None and self.has_zeroth_epoch and not self._is_fixed

        # what this says of the end
        if budgets := self.budgets:
            end = min(ends, default=inf)
            return Horizon(TICKS, of_pass, share=lambda done: max(done / end, *(share() for share in budgets)))
        if not limits:
            missing = "no hook limits the updates of the run; add for example StopAfter: {updates: 1000}"
            return Horizon(None, of_pass, missing, is_awaited)
        if len(ends) == len(limits):
            return Horizon(min(ends), of_pass, "", is_awaited)

        # why the end is not known
        stream_name = self._streams.train_stream_name
        missing = f"the number of batches of a pass of stream {stream_name!r} is not known; {_OTHER_WAYS}"
        if self._fixed_batch_size is None:
            missing += _ADD_LENGTH
        else:
            missing += f"make the batches of {self._fixed_batch_size} with ctx.batches"
        if not (self.has_zeroth_epoch or self._epoch):
            missing += ", or do not skip the zeroth epoch"
        return Horizon(None, of_pass, "" if is_awaited else missing, is_awaited)

    @property
    def budgets(self) -> list[Callable[[], float]]:
        """What returns the used shares of budgets of time; see `AbstractHook.progress`."""
        return [each for hook in self._hooks if (each := getattr(hook, "progress", None)) is not None]

    def check(self) -> None:
        """Check that the limits are numbers that do not contradict each other, and that passes can be counted.

        Raises:
            HookError: a limit is not a number of a known unit, or has no effect, because another one ends the run
                earlier in the same unit, or passes cannot be counted.
        """
        same = {"iterations": "updates"} if self._model.iterations_per_update == 1 else {}
        if self._epoch is None:
            same["passes"] = "epochs"
        for index, hook in enumerate(self._hooks):
            for unit, limit in getattr(hook, "limits", {}).items():
                if unit not in UNITS or type(limit) is not int or limit < 0:
                    message = f"limits: {unit!r}: {limit!r} is not a whole number of {listed(UNITS)}"
                    raise HookError(message, index)
        first: dict[str, tuple[int, str, int]] = {}
        for index, unit, limit in self._declared():
            before, other, earlier = first.setdefault(same.get(unit, unit), (index, unit, limit))
            if limit != earlier:
                whose = f" of {type(self._hooks[before]).__name__}" if before != index else ""
                reason = "" if unit == other else _WHY_SAME[same.get(unit, unit)]
                message = f"{unit}: {limit} contradicts {other}: {earlier}{whose}{reason}"
                raise HookError(f"{message}; the larger limit is never reached, remove it", index)
            if unit == "passes" and self._epoch is not None:
                self._ask()
            if unit == "passes" and self._epoch is not None and self._pass is None:
                raise HookError(
                    "passes: with main_loop.fixed_epoch_size, an epoch is not a pass, and the number of batches of a "
                    f"pass of stream {self._streams.train_stream_name!r} is not known; give updates instead, or add "
                    "num_batches to the dataset",
                    index,
                )

    def _ask(self) -> None:
        """Find the length of a pass that is not known in what the stream asks of `ctx.batches`, once."""
        drops = bool(changers_of(self._hooks, self._model)) and (
            self.has_zeroth_epoch or self._fixed_batch_size is not None
        )
        if self._pass is None and not (self._has_asked or self._is_fixed or drops):
            self._has_asked = True
            self._pass = self._streams.asked_length(self._fixed_batch_size)
            self._source = "ctx.batches"

    def begin_stream(self, *, train: bool) -> float:
        """Begin a stream; return the least number of iterations with which the training may reach a limit."""
        if not train:
            return inf
        self._is_fixed = True
        return self._earliest()

    def end_train_stream(self, stream: StreamWrapper, began: int | None) -> None:
        """Check the length of the pass that the model was trained on.

        Args:
            stream: the stream.
            began: the number of iterations before the epoch of the stream; None if a part of it was run earlier.
        """
        if stream.name != self._streams.train_stream_name:
            return
        if stream.epoch_size > 0:
            if stream.last_pass is not None:
                self._check_pass(stream.last_pass.pass_number, stream.last_pass.batch)
        elif began is not None and stream.epoch_ended:
            self._check_pass(self._progress.epochs_done + 1, self._progress.iterations_done - began)

    def awaits(self, stream: StreamWrapper) -> bool:
        """Return whether the zeroth epoch of a stream will tell the length of a pass."""
        is_known = self._is_fixed or self._pass is not None or self._epoch is not None
        return stream.name == self._streams.train_stream_name and not (self._progress.evaluating or is_known)

    def end_evaluation(self, stream: StreamWrapper, batches: int) -> None:
        """Take the number of batches that the model got in the zeroth epoch for the length of a pass."""
        if batches and stream.epoch_ended:
            self._pass = batches
            self._source = "the zeroth epoch"

    def _check_pass(self, number: int, batches: int) -> None:
        """Warn if a pass had another length than the horizon was made from.

        Args:
            number: the number of the pass.
            batches: its number of batches.
        """
        counts = "passes" in self.limits or ("epochs" in self.limits and self._epoch is None)
        if self._pass in (None, batches) or not (self._is_used and counts) or self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "pass %d of stream %r had %d batches, but the schedule was made for %d (from %s); the schedule does not "
            "end with the run: give StopAfter a number of updates",
            number,
            self._streams.train_stream_name,
            batches,
            self._pass,
            self._source,
        )

    def never_end(self) -> None:
        """Let the training go on at limits, which then only say how long it would be."""
        self._ends = False

    def state_dict(self) -> dict[str, Any]:
        """Return the length of a pass."""
        return {"batches_per_pass": self._pass}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state["batches_per_pass"]:
            self._pass = state["batches_per_pass"]
            self._source = "the beginning of the run"

    def _updates(self, batches: int) -> int:
        """Return the number of updates that the first batches of a run make; a window ends with its epoch."""
        epochs, rest = divmod(batches, self._epoch or self._pass or max(batches, 1))
        of_epoch = -(-(self._epoch or self._pass or batches) // self._model.iterations_per_update)
        return epochs * of_epoch + -(-rest // self._model.iterations_per_update)

    def _declared(self) -> Iterator[tuple[int, str, int]]:
        """Yield (index of the hook, unit, limit) for all limits that hooks declare; `check` reports others."""
        for index, hook in enumerate(self._hooks):
            for unit, limit in getattr(hook, "limits", {}).items():
                if unit in UNITS and type(limit) is int:
                    yield index, unit, limit


class ChangedData:
    """Knows the length of a pass of each stream; after a resume, compares the first one that is known with that before.

    Args:
        streams: the streams.
        on_changed_data: what to do if a resume finds data of another length than before.
    """

    def __init__(self, streams: DatasetStreams, on_changed_data: Policy = "error") -> None:
        check_choice("on_changed_data", on_changed_data, Policy)
        self.policy = on_changed_data
        """What to do if a resume finds data of another length than before."""
        self.overrides: Sequence[str] = ()
        """The overrides of a resume that change the data, for messages."""
        self._streams = streams
        self._lengths: dict[str, str] = {}  # stream -> its length; empty if passes have different lengths
        self._before: dict[str, str] = {}  # those of a loaded state that were not compared yet

    def expect(self, overrides: Sequence[str]) -> None:
        """Expect other data, because of overrides of a resume."""
        self.overrides = overrides

    def end_stream(self, stream: StreamWrapper, *, train: bool) -> None:
        """Compare a stream at the end of its pass; a training has compared the data at its resume."""
        self.compare(stream, refuses=not (train or self.overrides))

    def compare(self, stream: StreamWrapper, *, refuses: bool, change: str = "") -> bool:
        """Keep the length of a pass; after a resume, compare the first one that is known with that before.

        Args:
            stream: the stream.
            refuses: whether `on_changed_data: error` ends the training here.
            change: how the length has changed, if this is known, such as `has 2 batches, and had 4 or more`.

        Returns:
            Whether the length has changed.

        Raises:
            DataChanged: it ends the training.
        """
        # what the length is now, and what it was
        length = self._known_length(stream)
        if not length and stream.last_pass is not None:
            length = f"{stream.last_pass.batch} batches"
        before = self._before.get(stream.name) or length
        is_comparable = length.split()[1:] == before.split()[1:]  # examples or batches
        if length != before and is_comparable:
            change = change or f"has {length}, and had {before}"

        # what to do if it has changed
        if change:
            why = f", as this resume changes {listed(self.overrides)}" if self.overrides else ""
            message = f"stream {stream.name!r} {change} before the resume{why}"
            if self.policy == "error" and refuses:
                advice = (
                    f"go back to the data of before, or resume with {DataChanged.key} to train on with those of now"
                )
                raise DataChanged(f"{message}; {advice}")
            if self.policy != "ignore":
                _LOG.warning("this resume is not exact: %s", message)
            self._lengths.pop(stream.name, None)

        # keep it
        if change or length:
            self._before.pop(stream.name, None)
        if length and self._lengths.setdefault(stream.name, length) != length:
            self._lengths[stream.name] = ""
        return bool(change)

    def _known_length(self, stream: StreamWrapper) -> str:
        """Return the length of the current pass of a stream; empty if it is only known at the end."""
        if stream.rows:
            return f"{stream.rows} examples"
        batches = self._streams.pass_length
        if batches is None or stream.name != self._streams.train_stream_name:
            return ""
        return f"{batches} batches"

    def state_dict(self) -> dict[str, str]:
        """Return stream -> the length of a pass."""
        known = {name: self._known_length(stream) for name, stream in self._streams.trained.items()}
        return self._lengths | {name: length for name, length in known.items() if length}

    def load_state_dict(self, lengths: Mapping[str, str]) -> None:
        """Restore what `state_dict` returned."""
        self._lengths = dict(lengths)
        self._before = dict(lengths)
