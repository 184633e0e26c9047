"""What hooks may ask of the main loop: the part of it that `emrun.hook.Loop` describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from emrun.base.errors import HookError
from emrun.base.types import Horizon, InsteadOf, Policy
from emrun.hook import AbstractHook
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings
from emrun.loop.epochs import Epochs
from emrun.loop.failures import Failures
from emrun.loop.horizon import RunLength
from emrun.loop.outcome import Outcome
from emrun.loop.saving import Saving
from emrun.loop.session import Session
from emrun.loop.state import TrainingState
from emrun.loop.steps import StepRecord
from emrun.ranks.group import Ranks
from emrun.shown import Shown, Text
from emrun.storage.run import Run
from emrun.streams.dataset_streams import DatasetStreams


class Answers:
    """Answers what hooks ask, from the parts of the main loop, which the main loop makes."""

    run: Run | None
    ranks: Ranks
    train_stream_name: str
    streams: DatasetStreams
    checks: BatchChecks
    epochs: Epochs
    _events: Events
    _endings: Endings
    _state: TrainingState
    _steps: StepRecord
    _length: RunLength
    _saving: Saving
    _failures: Failures
    _session: Session

    @property
    def hooks(self) -> tuple[AbstractHook, ...]:
        """The hooks, in the order in which they are called."""
        return tuple(self._events.hooks)

    @property
    def training(self) -> bool:
        """Whether the model is trained on the current batches, rather than evaluated."""
        return self.epochs.training

    @property
    def evaluating(self) -> bool:
        """Whether the loop only evaluates."""
        return self._endings.evaluating

    @property
    def at_end(self) -> bool:
        """Whether the extra streams are evaluated once more, because a limit has ended the training since."""
        return self._endings.at_end

    @property
    def training_epochs_done(self) -> int:
        """Number of complete training epochs."""
        return self._state.epochs_done

    @property
    def iterations_done(self) -> int:
        """Number of batches that the model was trained on."""
        return self._state.iterations_done

    @property
    def updates_done(self) -> int:
        """Number of updates of the weights: windows of batches, see `AbstractModel.iterations_per_update`."""
        return self._state.updates_done

    @property
    def extra_streams(self) -> list[str]:
        """Names of the streams that are evaluated after the train stream. The train stream is `train_eval` here."""
        return list(self.streams.extra)

    @property
    def fixed_epoch_size(self) -> int | None:
        """Number of batches of the train stream in an epoch; None for a whole pass."""
        return self.streams.fixed_epoch_size

    @property
    def reading_ahead(self) -> Mapping[str, int]:
        """The settings `buffer` and `workers`."""
        return {"buffer": self.streams.reading.buffer, "workers": self.streams.reading.workers}

    @property
    def stream_sizes(self) -> Mapping[str, int]:
        """Stream -> how many batches of it an epoch has at most, for streams that the config limits."""
        return self.streams.sizes

    @property
    def limits(self) -> Mapping[str, int]:
        """What hooks end the training at, see `AbstractHook.limits`; the smallest one of each unit."""
        return self._length.limits

    @property
    def horizon(self) -> Horizon:
        """How many updates the run will make, as far as this is known."""
        return self._length.horizon

    @property
    def passes_done(self) -> int:
        """Number of complete passes of the train stream."""
        if self.fixed_epoch_size is None:
            return self.training_epochs_done
        number, batch = self.streams.get(self.train_stream_name, train=True).position
        return number - 1 + (batch == self._length.batches_per_pass)

    @property
    def has_run(self) -> bool:
        """Whether there is a run directory for checkpoints and metrics."""
        return self.run is not None or self._session.log is not None

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` so far, one for each epoch; empty without a run directory."""
        return self.run.metrics if self.run is not None else ()

    @property
    def stream_name(self) -> str | None:
        """The name of the current stream; None between streams."""
        return self.epochs.current.name if self.epochs.current is not None else None

    @property
    def batch_length(self) -> int:
        """Number of examples in the current batch."""
        return self.checks.batch_length

    @property
    def epoch_seconds(self) -> float:
        """Seconds since the current epoch began in this process, evaluations included."""
        return perf_counter() - self.epochs.began

    @property
    def outcome(self) -> Outcome | None:
        """How the training ended; set before `on_error` and `after_training`."""
        return self._session.outcome

    @property
    def capsule(self) -> Path | None:
        """The directory with the batch that made the training fail; None if there is none."""
        return self._failures.capsule

    def request_checkpoint(self, name: str, on_failure: Policy = "error", instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint; see `Loop.request_checkpoint`."""
        if self._endings.have_effect:
            self._endings.request(name, on_failure, instead_of)
            self._endings.take_notice()

    @property
    def records_steps(self) -> bool:
        """Whether there is a step record."""
        return self._steps.is_on

    @property
    def last_step(self) -> tuple[int, Mapping[str, float]] | None:
        """The last iteration in the step record, and its values; see `Loop.last_step`."""
        return self._steps.last

    def record(self, name: str, value: Any) -> None:
        """Add a value of the current iteration to the step record; see `Loop.record`."""
        if self.epochs.current is not None:
            if self.epochs.training:
                self._steps.add(name, value, self._state.iterations_done)
        elif not self._endings.evaluating:
            raise HookError(
                f"record({name!r}, ...) was called outside of the batches of a stream, so that the value belongs to no "
                "iteration; call it in before_batch, before_update, after_update or after_batch of the train stream"
            )

    @property
    def shown(self) -> Mapping[str, Shown]:
        """What hooks have shown since the epoch began."""
        return self.epochs.shown

    def show(self, name: str, value: Shown) -> None:
        """Show a picture, a text or a histogram; see `Loop.show`."""
        if not isinstance(value, Shown):
            raise TypeError(f"show({name!r}, ...): {value!r} is not a Picture, a Text or a Histogram of emrun.shown")
        if isinstance(value, Text) and self.run is not None:
            value = replace(value, text=self.run.censor(value.text))
        self.epochs.shown[name] = value

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream; see `Loop.check_outputs`."""
        self.checks.check_outputs(outputs)
