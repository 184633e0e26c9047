"""The training loop: an epoch, its streams, the batches of a stream."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from emrun.base.errors import UsageError
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.types import Batch, EpochData, Profile
from emrun.epoch_data import ByStream, learning_rates
from emrun.hook import TrainingAborted, TrainingTerminated, UpdateSkipped
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.beginnings import Beginnings
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings
from emrun.loop.failures import Failures
from emrun.loop.horizon import RunLength
from emrun.loop.loss_watch import LossWatch
from emrun.loop.profiling import counted
from emrun.loop.saving import Saving
from emrun.loop.state import Phase, TrainingState
from emrun.loop.steps import StepRecord
from emrun.model import AbstractModel
from emrun.ranks.shares import rows_in
from emrun.shown import Shown
from emrun.storage.run import Run
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.stream import StreamPosition, StreamWrapper

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Epochs:
    """Runs epochs: trains the model on the train streams, then evaluates it on the evaluation streams.

    Args:
        model: the model.
        seed: the seed of the run, from which each evaluation gets its own random numbers.
        run: the run, which gets a line of metrics for each epoch; None without a run directory.
        streams: the streams, and which of them read ahead beyond the end of an epoch.
        state: the counters and the phase of the training, which each epoch advances.
        events: calls the hooks.
        endings: decides whether the training ends.
        saving: saves the requested checkpoints.
        checks: checks each batch.
        failures: saves the batch that makes the training fail.
        loss: checks that the loss is finite, at the end of a train stream and of an epoch.
        steps: records the values of each iteration.
        beginnings: takes the checksums of the first batch of each stream.
        length: the length of the run, which the zeroth epoch may tell.
    """

    model: AbstractModel
    seed: int
    run: Run | None
    streams: DatasetStreams
    state: TrainingState
    events: Events
    endings: Endings
    saving: Saving
    checks: BatchChecks
    failures: Failures
    loss: LossWatch
    steps: StepRecord
    beginnings: Beginnings
    length: RunLength
    training: bool = field(default=False, init=False)
    """Whether the model is trained on the current stream."""
    current: StreamWrapper | None = field(default=None, init=False)
    """The current stream; None between streams."""
    began: float = field(default=0.0, init=False)
    """When the epoch began, in seconds of `perf_counter`."""
    shown: dict[str, Shown] = field(default_factory=dict, init=False)
    """What hooks have shown since the epoch began."""
    ended_by: TrainingTerminated | None = field(default=None, init=False)
    """The limit after which the extra streams are, or were, evaluated once more."""
    _measured: tuple[int, int, str] | None = field(default=None, init=False)  # the state that was evaluated once more
    _profile: Profile = field(default_factory=dict, init=False)
    _saving_seconds: array[float] = field(default_factory=lambda: array("d"), init=False)  # since the last profile
    _silence: NamedWhenSlow | None = field(default=None, init=False)  # until the first batch of a session
    _closing: tuple[Batch, StreamPosition] | None = field(default=None, init=False)  # the batch that ends a window late

    def begin_session(self) -> None:
        """Log a line if the first batch of the session takes long."""
        self.ended_by = None
        self._silence = NamedWhenSlow("reading and running the first batch")

    def wake(self) -> None:
        """End the wait for a batch; called by a signal handler."""
        if self.current is not None:
            self.current.wake()

    def resume(self) -> None:
        """Complete the restore of a checkpoint, if one was restored; see `TrainingState.resume`."""

        def begin_again(epoch_id: int) -> None:
            with self.endings.beginning_again():
                self.events.notify("before_epoch", epoch_id=epoch_id)

        self.state.resume(begin_again)

    def run_training(self, train_stream: str, *, skip_zeroth_epoch: bool) -> NoReturn:
        """Run epoch after epoch, from the start or from the restored checkpoint.

        Raises:
            TrainingTerminated: a hook or a signal ends the training.
        """
        state, streams = self.state, self.streams
        try:
            self.endings.agree()
            if not state.is_in_epoch:
                self.endings.raise_if_due()
            if self.run is not None:
                state.encoded()  # a state that cannot be saved is found before the first batch
            self.resume()
            if state.is_in_epoch:
                with streams.get(train_stream, train=True) as stream:
                    is_left = state.phase is Phase.TRAIN and not stream.is_at_end()
                self.endings.raise_if_due(in_epoch=True, is_left=is_left)
            if state.phase is Phase.BEFORE and not skip_zeroth_epoch:
                self.run_epoch([], [streams.get(train_stream, train=False), *streams.due(0)], 0)
            while True:
                number = state.epochs_done + 1
                self.run_epoch([streams.get(train_stream, train=True)], streams.due(number), number)
        except TrainingTerminated as error:
            if error.limit:
                self._evaluate_at_end(error, train_stream)
            raise

    def _evaluate_at_end(self, limit: TrainingTerminated, train_stream: str) -> None:
        """Evaluate the extra streams once more, if a limit has ended the training since one of them was evaluated.

        Nothing of this counts for a longer run: the checkpoint `latest` is saved before.

        Raises:
            Interrupted: a signal ends the evaluation.
        """
        state, events, endings, epoch_id = self.state, self.events, self.endings, self.state.epochs_done
        epoch_id += state.is_in_epoch
        due = [] if state.is_in_epoch else self.streams.due(epoch_id)
        evaluated = self.streams.all_extra()
        if not state.iterations_done or len(due) == len(evaluated) or self._measured == state.point:
            return
        self.streams.stop()
        self.saving.save_latest(*state.point)
        self.loss.look(epoch_id, state.iterations_done)
        where = f"in epoch {epoch_id}" if state.is_in_epoch else f"after epoch {epoch_id}"
        _LOG.info("the training ends %s: evaluating all extra streams once more", where)
        self.ended_by = limit
        names, began = _different_names(evaluated), self.began if state.is_in_epoch else perf_counter()
        with endings.closing(), self.saving.keeping_all(), events.without_model("after_epoch"):
            try:
                state.keep_copy()
                if state.is_in_epoch:
                    names.insert(0, train_stream)
                else:
                    events.notify("before_epoch", epoch_id=epoch_id)
                self._end_epoch({name: {} for name in names}, [], evaluated, epoch_id, began)
                self.endings.agree()  # on checkpoints that hooks of rank 0 have requested
                self._save_requested()
            except TrainingTerminated:
                raise
            except BaseException as error:
                error.add_note(
                    f"in the evaluation at the end of the training ({limit.reason}); the training is finished, and its "
                    "checkpoint latest is saved; `emrun resume` evaluates again"
                )
                raise
        self._measured = state.point

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
        state = self.state
        names = _different_names([*train, *evaluated])
        began = self.began = perf_counter()
        self._profile = {"save_checkpoints": self._saving_seconds}
        self.shown.clear()
        epoch_data: EpochData = ByStream((name, {}) for name in names)
        is_resumed = bool(train) and state.is_in_epoch
        if not is_resumed:
            if train:
                state.begin_epoch()
            elif not self.endings.evaluating:
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
            ended = self._end_epoch(epoch_data, [stream.name for stream in train], evaluated, epoch_id, began)
            self.endings.agree()
        except (TrainingTerminated, TrainingAborted):
            raise
        except BaseException:
            if train:
                state.go_back()
            raise
        self._save_requested()
        for termination in ended:
            raise termination
        self.endings.raise_if_due()
        return epoch_data

    def _end_epoch(
        self, epoch_data: EpochData, trained: list[str], evaluated: list[StreamWrapper], epoch_id: int, began: float
    ) -> list[TrainingTerminated]:
        """Evaluate streams, call the hooks, and record the epoch; return the terminations of the last events.

        Args:
            epoch_data: gets what the model and hooks write about its streams.
            trained: the streams that the model was trained on in the whole epoch.
            evaluated: the streams to evaluate.
            epoch_id: the number of the epoch for the hooks.
            began: when the epoch began.
        """
        state, is_counted = self.state, not (self.endings.evaluating or self.endings.at_end)
        names = list(epoch_data)
        self.events.notify("before_evaluation")
        for stream in evaluated:
            with preserved_randomness():
                seed_everything(self.seed, "evaluation", stream.name)
                self._run_stream(stream, train=False)
        for name in names:
            epoch_data[name].update(self.model.stream_values(name))
        if is_counted:
            state.end_epoch(trained=bool(trained))
        if not self.endings.evaluating:
            self._add_rates(epoch_data, trained or [self.streams.train_stream_name])
        hooks_began = perf_counter()
        if self.events.of_ranks is not None:
            self.events.of_ranks.merge(self.events.hooks)
        ended = [self._terminated_in("after_epoch", epoch_id=epoch_id, epoch_data=epoch_data)]
        self._profile["after_epoch_hooks"] = array("d", [perf_counter() - hooks_began])
        if self.events.times is not None:
            self._profile.update(self.events.times.take())
        self._saving_seconds = array("d")  # the checkpoints that follow belong to the next profile
        profile = {"profile": self._profile, "streams": names}
        ended.append(self._terminated_in("after_epoch_profile", epoch_id=epoch_id, **profile))
        self._record(epoch_data, trained, epoch_id, perf_counter() - began)
        return [*filter(None, ended)]

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream without running the model; see `Loop.evaluation_pass`."""
        before = self.training, self.current
        stream = self.streams.get(name, train=False)
        checks = self.checks
        check_batch, announce = checks.begin(name, ", ".join(self.events.changers)), self.events.begin_stream()[0]
        several = self.events.of_ranks is not None
        with preserved_randomness(), stream:
            seed_everything(self.seed, "evaluation", name)
            self.training, self.current = False, stream
            try:
                for batch in stream:
                    if (several and not rows_in(batch)) or check_batch(batch) == 0:
                        continue
                    changed = announce(stream_name=name, batch=batch) if announce is not None else None
                    if changed is None:
                        yield batch
                    elif (rows_in(changed) or not several) and checks.check_changed(changed):
                        yield changed
                    self.endings.raise_if_due(in_epoch=True)
                self.endings.raise_if_due(in_epoch=True)  # a signal may end the stream
            finally:
                self.training, self.current = before

    def _add_rates(self, epoch_data: EpochData, streams: Sequence[str]) -> None:
        """Add the learning rates of the last update, or of the first one if there is none yet, to train streams."""
        rates = learning_rates(self.model)
        for name in streams:
            if name in epoch_data:
                epoch_data[name].update(rates)

    def _terminated_in(self, event: str, **arguments: Any) -> TrainingTerminated | None:
        """Call an event; return the termination with which hooks end the training, if any."""
        try:
            self.events.notify(event, **arguments)
        except TrainingTerminated as error:
            return error
        return None

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
        before = self.training, self.current  # a hook may evaluate another stream between two batches
        self.training = train
        if self._silence is not None:
            self._silence.__enter__()
        try:
            if not (is_resumed and (is_last or stream.has_begun)):
                self.events.notify("before_stream", stream_name=stream.name)
            self.current = stream.__enter__()  # a train stream also reads ahead during evaluations; see `Session.end`
            if train:
                self.length.fix()
                self.steps.begin(self.state.iterations_done)
            batches_run = self._run_batches(stream, train)
        finally:
            self._end_silence()
            self.training, self.current = before
            if not (train and stream is self.streams.trained.get(stream.name)):  # `Session.end` ends train streams
                stream.__exit__(None, None, None)
        self.endings.agree()
        self._note_length(stream, batches_run, train=train, is_whole=stream.epoch_ended and not is_resumed)
        if not (train and stream.epoch_ended):
            self.endings.raise_if_due(in_epoch=True, is_left=train)  # a resume would begin another pass after its end
        if batches_run == 0 and not is_resumed:
            self.checks.report_empty_stream(stream.name)
        if train and is_last:
            self.state.end_train_streams()
            self.steps.end_chunk()
            self.loss.look(self.state.epochs_done + 1, self.state.iterations_done)
        self.events.notify("after_stream", stream_name=stream.name)

    def _note_length(self, stream: StreamWrapper, batches_run: int, *, train: bool, is_whole: bool) -> None:
        """Tell the length of the run how many batches an epoch of the train stream or a pass of it had."""
        if stream.name != self.streams.train_stream_name:
            return
        if train and stream.epoch_size > 0:
            if stream.last_pass is not None:
                self.length.check_pass(*stream.last_pass)
        elif train and is_whole:
            self.length.check_pass(self.state.epochs_done + 1, batches_run)
        elif is_whole and not self.endings.evaluating:
            self.length.count_evaluated(batches_run)

    def _run_batches(self, stream: StreamWrapper, train: bool) -> int:  # noqa: PLR0915 - calls would cost time
        """Run the model on the batches of a stream; return their number. Each line of the loop costs time per batch."""
        name = stream.name
        seconds = self._profile.setdefault(f"eval_batch_{name}", array("d"))
        hook_seconds = self._profile.setdefault(f"after_batch_hooks_{name}", array("d"))
        stream.profile = self._profile
        model, state, endings, steps, clock = self.model, self.state, self.endings, self.steps, self.model.clock
        run, has_windows = model.run, train and model.iterations_per_update > 1
        checks, changers, draws = self.checks, self.events.changers, self.failures.draws
        check_batch = checks.begin(name, ", ".join(changers))
        announce, report = self.events.begin_stream()
        if self.events.times is not None:
            lengths = self._profile.setdefault(f"batch_length_{name}", array("d"))
            of_ranks = self.events.of_ranks
            run = counted(run, lengths, lambda: checks.batch_length if of_ranks is None else of_ranks.share[1])
        batches: Iterable[Batch] = stream
        if self.events.of_ranks is not None:
            run, end = self.events.of_ranks.noting(name, run)
            batches = map(partial(self.events.of_ranks.filled, name), stream)
        note_randomness = draws.take_all if draws is not None else None
        note_first: Callable[..., None] | None = self.beginnings.note
        handled: Batch | None = None
        last: Batch | None = None
        position, is_last_update = stream.position, False
        batches_run = 0
        try:
            for batch in batches:
                if note_first is not None:
                    note_first(name, stream.position, batch)
                    note_first = None
                if check_batch(batch) == 0:
                    continue
                handled = batch
                if note_randomness is not None:
                    note_randomness()
                if announce is not None and (changed := announce(stream_name=name, batch=batch)) is not None:
                    handled = None
                    if self.events.of_ranks is not None:
                        changed = self.events.of_ranks.filled(name, changed, is_changed=True)
                    if checks.check_changed(changed) == 0:
                        continue
                    handled = batch = changed  # noqa: PLW2901 - the stream has its own variable
                began = clock()
                outputs = run(batch, train, name)
                seconds.append(clock() - began)
                if batches_run == 0:
                    self._end_silence()
                    checks.check_outputs(outputs)
                    if train:
                        checks.check_step_values()
                    note_randomness = draws.watch(of_whole_steps=not changers) if draws is not None else None
                batches_run += 1
                if has_windows:
                    position, last = stream.position, batch
                if train:
                    state.iterations_done += 1  # here, because a call would cost as much as a hook
                    if not has_windows or not model.is_accumulating:
                        state.updates_done += 1
                try:
                    if report is not None:
                        began = clock()
                        report(stream_name=name, batch_data={**batch, **outputs})
                        hook_seconds.append(clock() - began)
                finally:  # also if a hook ends the training
                    if train and (state.iterations_done == steps.due or steps.given):
                        steps.take(state.iterations_done)
                handled = None
                if endings.news:
                    if has_windows and model.is_accumulating:
                        endings.announce_wait()
                        continue
                    if endings.look(stream.is_at_end if train else _is_last):
                        break
                    self._save_requested()
            if has_windows and model.is_accumulating:
                handled, is_last_update = last, True
                self.finish_update(last, position)
                handled = None
            if self.events.of_ranks is not None:
                end()
        except BaseException as error:  # user code may also call sys.exit
            if handled is not None:
                checks.name_batch(error)
                place = position if is_last_update else stream.position
                self.failures.keep(error, handled, stream.name, place, train=train, is_counted=is_last_update)
            raise
        finally:
            if train and batches_run:
                self.loss.outputs = outputs
        return batches_run

    def finish_update(self, batch: Batch | None = None, position: StreamPosition | None = None) -> None:
        """Make the update of the last window of an epoch, which has fewer batches than the others.

        Args:
            batch: the last batch of the window.
            position: the position in the stream after it.
        """
        state = self.state
        state.iterations_done -= 1  # for hooks, as in any other update
        self._closing = (batch, position) if batch is not None and position is not None else None
        try:
            with self.steps.reopened(state.iterations_done + 1):
                self.model.finish_update()
        finally:
            state.iterations_done += 1
            self._closing = None
        state.updates_done += 1

    def keep_step(self, error: UpdateSkipped) -> None:
        """Keep the current step for a replay, if there is one: a hook skips its update and asks for it."""
        stream = self.current
        if stream is None or not self.training:
            return  # a model is run without the loop
        batch, position = self._closing or (stream.last_batch, stream.position)
        if self._closing is None and self.events.changed is not None and self.events.changed[0] == stream.name:
            batch = self.events.changed[1]
        if batch is not None:
            self.failures.keep(error, batch, stream.name, position, train=True, is_counted=False)

    def _end_silence(self) -> None:
        """Stop waiting for the first batch of the session: it was run, or there will be none."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _record(self, epoch_data: EpochData, trained: Sequence[str], epoch_id: int, seconds: float) -> None:
        """Check the losses of the train streams, and write the epoch to the metrics of the run."""
        state = self.state
        for name in trained:
            self.loss.look_at_mean(name, epoch_data.get(name, {}), state.epochs_done, state.iterations_done)
        self.loss.warn()
        if self.run is None:
            return
        if trained and self.saving.newest is None:
            self.saving.wait()  # a run with a recorded epoch but no checkpoint counts as one that has lost it
        number, at_end = (epoch_id, True) if self.endings.at_end else (state.epochs_done, False)
        self.run.record_epoch(number, state.iterations_done, seconds, epoch_data, at_end=at_end)

    def _save_requested(self) -> None:
        """Save the checkpoints that hooks or a signal requested."""
        if self.endings.wants_checkpoint():
            self.saving.request_by_signal(self.state.iterations_done, is_training=self.endings.have_effect)
        began = perf_counter()
        self.saving.save_requested(*self.state.point)
        self._saving_seconds.append(perf_counter() - began)


def _is_last() -> bool:
    """Return whether a batch is the last one for limits: in an evaluation always, because the epoch is completed."""
    return True


def _different_names(streams: Sequence[StreamWrapper]) -> list[str]:
    """Return the names of an epoch's streams.

    Raises:
        UsageError: two streams have the same name.
    """
    names = [stream.name for stream in streams]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two streams of the epoch have the name {name!r}")
    return names
