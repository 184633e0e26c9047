"""The epochs: which streams an epoch has, which epochs follow one another, and what is evaluated at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import NoReturn

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.terminal import restore_logging
from emrun.base.types import EpochData
from emrun.epoch_data import ByStream, check_numbers, learning_rates
from emrun.hook import TrainingAborted, TrainingTerminated
from emrun.loop.batches import BatchLoop
from emrun.loop.parts import Parts
from emrun.loop.progress import Phase, Point
from emrun.record.rows import as_floats
from emrun.streams.dataset_streams import different_names
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class TrainingLoop:
    """Runs epochs: trains the model on the train streams, then evaluates it on the evaluation streams.

    Args:
        parts: what takes part.
        batches: runs the batches of a stream.
    """

    def __init__(self, parts: Parts, batches: BatchLoop) -> None:
        self._parts = parts
        self._batches = batches
        self._trained: EpochData = {}  # the data of the last training epoch in this process
        self._evaluated_at_end: Point | None = None  # the state that was evaluated once more

    def run(self, *, skip_zeroth_epoch: bool) -> NoReturn:
        """Run epoch after epoch, from the start or from the restored checkpoint.

        Raises:
            TrainingTerminated: a hook or a signal ends the training.
        """
        parts = self._parts
        progress = parts.progress
        name = parts.streams.train_stream_name
        try:
            # what may end the training before it begins
            parts.requests.exchange()
            if not progress.is_in_epoch:
                parts.requests.raise_if_due()
            if parts.has_run:
                parts.snapshot.encoded()  # a state that cannot be saved is found before the first batch

            # the middle of an epoch that is resumed
            progress.begin_epoch(is_resumed=progress.is_in_epoch)
            self.resume()
            if progress.is_in_epoch:
                with parts.streams.get(name, train=True) as stream:
                    is_left = progress.phase is Phase.TRAIN and not stream.is_at_end()
                parts.requests.raise_if_due(in_epoch=True, is_left=is_left)

            # the epochs
            if progress.phase is Phase.BEFORE and not skip_zeroth_epoch:
                self.run_epoch([], [parts.streams.get(name, train=False), *parts.streams.due(0)], 0)
            while True:
                epoch_id = progress.epochs_done + 1
                self.run_epoch([parts.streams.get(name, train=True)], parts.streams.due(epoch_id), epoch_id)
        except TrainingTerminated as error:
            if error.limit:
                self._evaluate_at_end(error)
            raise

    def resume(self) -> None:
        """Complete the restore of a checkpoint, if one was restored; see `Snapshot.resume`."""
        callbacks = self._parts.callbacks
        self._parts.snapshot.resume(lambda epoch_id: callbacks.notify("before_epoch", epoch_id=epoch_id))

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
        parts = self._parts
        progress = parts.progress
        snapshot = parts.snapshot
        epoch_data: EpochData = ByStream((name, {}) for name in different_names([*train, *evaluated]))

        # the beginning
        is_resumed = bool(train) and progress.is_in_epoch
        progress.begin_epoch(is_resumed=is_resumed)
        parts.shown.clear()
        if parts.callbacks.profiling is not None:
            parts.callbacks.profiling.begin_epoch()
        if not is_resumed:
            if train:
                snapshot.begin_epoch()
            elif not progress.evaluating:
                snapshot.keep_copy()
            parts.callbacks.notify("before_epoch", epoch_id=epoch_id)

        # the train streams
        if train:
            if progress.begin_train_streams():
                for stream in train:
                    self._batches.run(stream, train=True, is_last=stream is train[-1], is_resumed=is_resumed)
            progress.end_train_streams()  # again: a hook may have run an epoch by hand in `after_stream`
            snapshot.keep_copy()
            parts.requests.raise_if_due(in_epoch=True)
            self._trained = epoch_data

        # the evaluations, and the events of the end
        try:
            ended = self._end_epoch(epoch_data, [stream.name for stream in train], evaluated, epoch_id)
            parts.requests.exchange()
        except (TrainingTerminated, TrainingAborted):
            raise
        except BaseException:
            if train:
                snapshot.go_back()
            raise

        # the end of the epoch, or of the training
        self._batches.save_requested()
        for termination in ended:
            raise termination
        parts.requests.raise_if_due()
        return epoch_data

    def _end_epoch(
        self, epoch_data: EpochData, trained: list[str], evaluated: list[StreamWrapper], epoch_id: int
    ) -> list[TrainingTerminated]:
        """Evaluate streams, call the hooks, and record the epoch; return the terminations of the last events.

        Args:
            epoch_data: gets what the model and hooks write about its streams.
            trained: the streams that the model was trained on in the whole epoch.
            evaluated: the streams to evaluate.
            epoch_id: the number of the epoch for the hooks.
        """
        parts = self._parts
        progress = parts.progress
        callbacks = parts.callbacks
        model = parts.model
        names = list(epoch_data)

        # the evaluations
        restore_logging()
        callbacks.notify("before_evaluation")
        for stream in evaluated:
            with preserved_randomness():
                seed_everything(parts.seed, "evaluation", stream.name)
                self._batches.run(stream, train=False)

        # what the model says of the streams
        for name in names:
            epoch_data[name].update(model.stream_values(name))
        check_numbers(epoch_data, f"model {type(model).__name__}")
        if not (progress.evaluating or progress.at_end):
            parts.snapshot.end_epoch(trained=bool(trained))
        if not progress.evaluating:  # the rates of the last update, or of the first one if there is none yet
            for name in {*(trained or [parts.streams.train_stream_name])} & {*names}:
                epoch_data[name].update(learning_rates(model))

        # the hooks, and the record
        began = perf_counter()
        callbacks.merge()
        ended = callbacks.termination_of("after_epoch", epoch_id=epoch_id, epoch_data=epoch_data)
        if callbacks.profiling is not None:
            profile = callbacks.profiling.end_epoch(perf_counter() - began)
            ended += callbacks.termination_of("after_epoch_profile", epoch_id=epoch_id, profile=profile, streams=names)
        parts.loss.end_epoch(epoch_data, trained)
        self._record(epoch_data, trained, epoch_id)
        return ended

    def _record(self, epoch_data: EpochData, trained: Sequence[str], epoch_id: int) -> None:
        """Record an epoch, unless it is an evaluation within the training."""
        parts = self._parts
        progress = parts.progress
        if not progress.records_epochs:
            return
        if trained and parts.run is not None and progress.newest_checkpoint is None:
            parts.checkpointer.wait()  # a run with a recorded epoch but no checkpoint counts as one that has lost it
        epoch = epoch_id if progress.at_end else progress.epochs_done
        parts.record.add_epoch(
            epoch,
            progress.iterations_done,
            progress.updates_done,
            perf_counter() - progress.epoch_began,
            epoch_data,
            parts.shown,
            at_end=progress.at_end,
        )
        if parts.run is not None and not progress.at_end:
            parts.run.trace.count(epoch, progress.iterations_done)

    def _evaluate_at_end(self, limit: TrainingTerminated) -> None:
        """Evaluate the extra streams once more, if a limit has ended the training since one of them was evaluated.

        Nothing of this counts for a longer run: the checkpoint `latest` is saved before.

        Raises:
            Interrupted: a signal ends the evaluation.
        """
        parts = self._parts
        progress = parts.progress
        streams = parts.streams

        # whether an extra stream was not evaluated with these weights
        epoch_id = progress.epochs_done + progress.is_in_epoch
        due = [] if progress.is_in_epoch else streams.due(epoch_id)
        evaluated = streams.all_extra()
        is_new = self._evaluated_at_end != progress.point
        if not progress.iterations_done or len(due) == len(evaluated) or not is_new:
            return

        # the training is saved as it is
        streams.stop()
        parts.checkpointer.save_latest()
        where = f"in epoch {epoch_id}" if progress.is_in_epoch else f"after epoch {epoch_id}"
        _LOG.info("the training ends %s: evaluating all extra streams once more", where)
        parts.requests.end_at_limit(limit)
        with progress.evaluation_at_end(), parts.callbacks.without_model("after_epoch"):
            try:
                parts.snapshot.keep_copy()
                self._run_evaluations_at_end(evaluated, epoch_id)
            except TrainingTerminated:
                raise
            except BaseException as error:
                error.add_note(
                    f"in the evaluation at the end of the training ({limit.reason}); the training is finished, and its "
                    "checkpoint latest is saved; `emrun resume` evaluates again"
                )
                raise
        self._evaluated_at_end = progress.point

    def _run_evaluations_at_end(self, evaluated: list[StreamWrapper], epoch_id: int) -> None:
        """Evaluate streams, with the events of an epoch; hooks also get the data of the last training epoch."""
        parts = self._parts
        train_stream_name = parts.streams.train_stream_name
        names = different_names(evaluated)
        if parts.progress.is_in_epoch:
            names.insert(0, train_stream_name)
        else:
            parts.progress.begin_epoch(is_resumed=parts.progress.epoch_is_resumed)
            parts.callbacks.notify("before_epoch", epoch_id=epoch_id)
        recorded = (as_floats(line["streams"]) for line in reversed(parts.record.epochs))
        last = self._trained or next(recorded, {})
        epoch_data = ByStream((name, {}) for name in names)
        epoch_data.before = {train_stream_name: {}, **last}
        self._end_epoch(epoch_data, [], evaluated, epoch_id)
        parts.requests.exchange()  # on checkpoints that hooks of rank 0 have requested
        self._batches.save_requested()
