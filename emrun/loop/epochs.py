"""The training loop: an epoch, its streams, the batches of a stream."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.terminal import restore_logging
from emrun.base.types import EpochData
from emrun.epoch_data import ByStream, check_numbers, learning_rates
from emrun.hook import Loop, TrainingAborted, TrainingTerminated
from emrun.loop.batch_calls import Calls, Handled
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings
from emrun.loop.saving import Saving
from emrun.loop.state import TrainingState
from emrun.streams.dataset_streams import DatasetStreams, different_names
from emrun.streams.stream import StreamWrapper


@dataclass(eq=False)
class Epochs:
    """Runs epochs: trains the model on the train streams, then evaluates it on the evaluation streams.

    Args:
        loop: has the model, and counts; hooks ask it.
        streams: the streams, and which of them read ahead beyond the end of an epoch.
        state: the state of the training, which each epoch advances.
        events: calls the hooks and the other parts of the loop.
        endings: decides whether the training ends.
        saving: saves the requested checkpoints.
    """

    loop: Loop
    streams: DatasetStreams
    state: TrainingState
    events: Events
    endings: Endings
    saving: Saving
    current: StreamWrapper | None = field(default=None, init=False)
    """The current stream; None between streams."""
    trained: EpochData = field(default_factory=dict, init=False)
    """The data of the last training epoch in this process."""
    measured_at_end: tuple[int, int, str] | None = field(default=None, init=False)
    """The state that was evaluated once more at the end of the training."""

    def wake(self) -> None:
        """End the wait for a batch; called by a signal handler."""
        if self.current is not None:
            self.current.wake()

    def run_epoch(self, train: list[StreamWrapper], evaluated: list[StreamWrapper], epoch_id: int) -> EpochData:
        """Run one epoch.

        Args:
            train: the streams to train on; empty for the zeroth epoch and for an evaluation.
            evaluated: the streams to evaluate afterwards.
            epoch_id: the number of the epoch for the hooks.

        Returns:
            What the model and hooks wrote: stream -> variable -> a number or a mapping aggregation -> number.

        Raises:
            UsageError: two streams have the same name.
            TrainingTerminated: a hook or a signal ends the training.
        """
        state, loop = self.state, self.loop
        epoch_data: EpochData = ByStream((name, {}) for name in different_names([*train, *evaluated]))
        loop.epoch_began = perf_counter()
        loop.shown.clear()
        if self.events.profiling is not None:
            self.events.profiling.begin_epoch()
        is_resumed = loop.epoch_is_resumed = bool(train) and state.is_in_epoch
        if not is_resumed:
            if train:
                state.begin_epoch()
            elif not loop.evaluating:
                state.keep_copy()
            self.events.notify("before_epoch", epoch_id=epoch_id)
        if train:
            if state.begin_train_streams():
                for stream in train:
                    self._run_stream(stream, train=True, is_last=stream is train[-1], is_resumed=is_resumed)
            state.end_train_streams()  # again: a hook may have run an epoch by hand in `after_stream`
            state.keep_copy()
            self.endings.raise_if_due(in_epoch=True)
        try:
            self.trained = epoch_data if train else self.trained
            ended = self.end_epoch(epoch_data, [stream.name for stream in train], evaluated, epoch_id)
            self.endings.agree()
        except (TrainingTerminated, TrainingAborted):
            raise
        except BaseException:
            if train:
                state.go_back()
            raise
        self.save_requested()
        for termination in ended:
            raise termination
        self.endings.raise_if_due()
        return epoch_data

    def end_epoch(
        self, epoch_data: EpochData, trained: list[str], evaluated: list[StreamWrapper], epoch_id: int
    ) -> list[TrainingTerminated]:
        """Evaluate streams, call the hooks, and record the epoch; return the terminations of the last events.

        Args:
            epoch_data: gets what the model and hooks write about its streams.
            trained: the streams that the model was trained on in the whole epoch.
            evaluated: the streams to evaluate.
            epoch_id: the number of the epoch for the hooks.
        """
        loop, events, names = self.loop, self.events, list(epoch_data)
        restore_logging()
        events.notify("before_evaluation")
        for stream in evaluated:
            with preserved_randomness():
                seed_everything(loop.seed, "evaluation", stream.name)
                self._run_stream(stream, train=False)
        for name in names:
            epoch_data[name].update(loop.model.stream_values(name))
        check_numbers(epoch_data, f"model {type(loop.model).__name__}")
        if not (loop.evaluating or loop.at_end):
            self.state.end_epoch(trained=bool(trained))
        if not loop.evaluating:  # the rates of the last update, or of the first one if there is none yet
            for name in {*(trained or [self.streams.train_stream_name])} & {*names}:
                epoch_data[name].update(learning_rates(loop.model))
        began = perf_counter()
        if events.of_ranks is not None:
            events.of_ranks.merge(loop.hooks)
        ended = [self._terminated_in("after_epoch", epoch_id=epoch_id, epoch_data=epoch_data)]
        if events.profiling is not None:
            profile = events.profiling.end_epoch(perf_counter() - began)
            ended += [self._terminated_in("after_epoch_profile", epoch_id=epoch_id, profile=profile, streams=names)]
        events.end_epoch(epoch_id, epoch_data, trained)
        return [*filter(None, ended)]

    def _terminated_in(self, event: str, **arguments: Any) -> TrainingTerminated | None:
        """Call an event; return the termination with which hooks end the training, if any."""
        try:
            self.events.notify(event, **arguments)
        except TrainingTerminated as error:
            return error
        return None

    def enter(self, stream: StreamWrapper | None, *, train: bool) -> None:
        """Make a stream the current one, on which the model is trained or evaluated."""
        self.current = stream
        self.loop.training, self.loop.stream_name = train, None if stream is None else stream.name

    def _run_stream(
        self, stream: StreamWrapper, *, train: bool, is_last: bool = False, is_resumed: bool = False
    ) -> None:
        """Run the model on the batches of one epoch of a stream, between `before_stream` and `after_stream`.

        Args:
            stream: the stream.
            train: whether the model is trained on it.
            is_last: whether it is the last train stream of the epoch.
            is_resumed: whether the epoch is resumed in its middle, so that the stream may have begun, or have no batch.
        """
        loop, events = self.loop, self.events
        before, was_training = self.current, loop.training  # a hook may evaluate another stream between two batches
        loop.training = train
        try:
            if not (is_resumed and (is_last or stream.has_begun)):
                events.notify("before_stream", stream_name=stream.name)
            self.enter(stream.__enter__(), train=train)  # a train stream reads ahead during evaluations too
            calls = events.begin_batches(stream, train=train)
            with loop.time.counting(train), calls.handled.told():
                self._run_batches(stream, train, calls)
                if train and self.loop.model.is_accumulating:
                    self._close_window(calls.handled)
        finally:
            self.enter(before, train=was_training)
            if not (train and stream is self.streams.trained.get(stream.name)):  # `Session.end` ends train streams
                stream.__exit__(None, None, None)
        self.endings.agree()
        for end in calls.end:
            end()
        if not (train and stream.epoch_ended):
            self.endings.raise_if_due(in_epoch=True, is_left=train)  # a resume would begin another pass after its end
        if calls.first and not is_resumed:
            self.events.checks.report_empty_stream(stream.name)
        if train and is_last:
            self.state.end_train_streams()
        events.notify("after_stream", stream_name=stream.name)

    def _run_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Run the model on the batches of a stream. Each line of the loop costs time per batch."""
        loop, model, endings, name = self.loop, self.loop.model, self.endings, stream.name
        check, announce, before, run = calls.intake.check, calls.intake.announce, calls.before, calls.run
        report, after, first, ends_at = calls.report, calls.after, calls.first, calls.ends_at
        handled, has_windows = calls.handled, train and model.iterations_per_update > 1
        for batch in calls.batches:
            if not check(batch):
                continue
            handled.batch = batch
            for note in before:
                note(batch)
            if announce is not None and (changed := announce(stream_name=name, batch=batch)) is not None:
                handled.batch = None
                if (accepted := calls.intake.accept(changed)) is None:
                    continue
                handled.batch = batch = accepted  # noqa: PLW2901 - the stream has its own variable
            outputs = run(batch, train, name)
            if first:
                calls.end_first(outputs)
            if train:
                loop.iterations_done += 1  # here, because a call would cost as much as a hook
                if has_windows and model.is_accumulating:
                    handled.last = batch, stream.position
                else:
                    loop.updates_done += 1
                if loop.iterations_done >= ends_at:
                    report = calls.report_last
            try:
                if report is not None:
                    report(stream_name=name, batch_data={**batch, **outputs})
            finally:  # also if a hook ends the training
                for listen in after:
                    listen(outputs)
            handled.batch = None
            if endings.must_look and self._leaves(stream, train=train):
                break

    def _leaves(self, stream: StreamWrapper, *, train: bool) -> bool:
        """After a batch, save what is requested; return whether the loop leaves the stream."""
        if train and self.loop.model.is_accumulating:
            self.endings.announce_wait()
        elif self.endings.look(stream.is_at_end if train else lambda: True):  # an evaluation completes its epoch
            return True
        else:
            self.save_requested()
        return False

    def _close_window(self, handled: Handled) -> None:
        """Make the update of a window that the end of the epoch has left open."""
        handled.is_closing = True
        self.finish_update()
        self.events.end_training()

    def finish_update(self) -> None:
        """Make the update of the last window of an epoch, which has fewer batches than the others."""
        loop = self.loop
        loop.iterations_done -= 1  # for hooks, as in any other update
        try:
            loop.model.finish_update()
        finally:
            loop.iterations_done += 1
        loop.updates_done += 1

    def save_requested(self) -> None:
        """Save the checkpoints that hooks or a signal requested."""
        if self.endings.wants_checkpoint():
            self.saving.request_by_signal(self.loop.iterations_done, is_training=self.endings.have_effect)
        if self.saving.has_work:
            self.events.before_saving()
            profiling = self.events.profiling
            with self.loop.time.counting(train=False), nullcontext() if profiling is None else profiling.saving():
                self.saving.save_requested(*self.state.point)
