"""The main loop: how it is built, what hooks may use of it, and how it is run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from emrun.base.arguments import check_choice, check_seconds
from emrun.base.errors import ArgumentError, UsageError
from emrun.base.types import Batch, EpochData, InterruptPolicy, Policy, StartMethod
from emrun.base.wording import did_you_mean
from emrun.dataset import check_streams, stream_function
from emrun.epoch_data import check_monitors
from emrun.hook import AbstractHook, Loop
from emrun.loop.agreement import AgreedEndings
from emrun.loop.bad_examples import BadExamples
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.dispatch import Events
from emrun.loop.endings import Endings, switched_on
from emrun.loop.epoch_rows import EpochRows
from emrun.loop.epochs import Epochs
from emrun.loop.evaluation_pass import evaluation_pass
from emrun.loop.failures import Failures
from emrun.loop.first_digests import FirstDigests
from emrun.loop.horizon import RunLength
from emrun.loop.loss_watch import LossWatch
from emrun.loop.outcome import Outcome, warn_of_no_end
from emrun.loop.rank_events import RankEvents
from emrun.loop.saving import Saving, check_saved_names
from emrun.loop.session import Session
from emrun.loop.state import TrainingState
from emrun.loop.steps import StepRecord
from emrun.loop.training_time import TrainingTime
from emrun.loop.whole_training import resume, train
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks, ranks
from emrun.record.record import Record
from emrun.storage.log import RunLog
from emrun.storage.run import Run
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.dataset_streams import DatasetStreams, StreamLike
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class MainLoop(Loop):
    """Trains a model on the streams of a dataset, epoch by epoch, until a hook or a signal ends the training.

    An epoch is a pass of the train stream, followed by the evaluation of the extra streams. The zeroth epoch, before
    the first one, only evaluates the train stream and the extra streams. In a `with` block of the main loop, `epoch`
    can be called by hand: hooks get `before_training` at the beginning of the block and `after_training` at its end.

    Args:
        model: any `AbstractModel`.
        dataset: any object with methods `<name>_stream`.
        hooks: the hooks, called in this order; the model is called after them.
        train_stream_name: the stream that the model is trained on.
        extra_streams: names of the streams to evaluate after the train stream, or `{name: '5 epochs'}` to evaluate a
            stream less often, or `{name: {every: 5 epochs, batches: 20}}` to evaluate only its first 20 batches, the
            same ones each time. If the train stream is listed, it is also evaluated in a separate pass, under the name
            `train_eval` (or `NAME_eval` for another `train_stream_name`).
        buffer: how many batches of a stream to read ahead, in a thread or in the workers. 0 is none, or with `workers`
            two batches per worker. By default, as many as the dataset's attribute `read_ahead` says: 4 for images, none
            for most others.
        workers: number of processes that read a stream. They share a stream that uses `ctx.batches`; one process reads
            any other stream. The batches and their order are the same for any number, unless a stream draws from global
            random states.
        start_method: how to start the processes of `workers`; null for Python's default.
        stream_timeout: how many seconds the loop waits for a batch before it raises an error; null for no limit. Needs
            `buffer` or `workers`.
        rank_timeout: how many seconds a rank waits for the others before it raises an error; null for 30 minutes. It
            must be longer than the longest work that one rank does alone, such as hooks at the end of an epoch.
        prefetch_to_device: pin the batches that are read ahead, and copy each batch to the GPU while the model runs on
            the previous one. No effect on a CPU, without `buffer` and `workers`, or if a hook may change batches
            (`changes_batches`). Needs memory for three more batches on the GPU, and page-locked memory for the batches
            that are read ahead, at least two.
        on_empty_batch: what to do about a batch without sources or of length 0, which is always skipped: `error`,
            `warn` or `ignore`.
        on_bad_example: what to do about an example that cannot be read, of a dataset that reads its examples one by one
            (`ImageFolder`, `TarShards`, `TorchDataset` with a map-style dataset): `error` ends the training; `warn` and
            `ignore` leave the example out, so that its batch is shorter. The names of such examples, and why they are
            bad, are in `rows.jsonl` of the run. More than 1 % of the examples of a pass are an error. A batch without
            any example is left out too, unless `on_empty_batch` says what to do about it. In Python, give it to the
            dataset too.
        on_empty_stream: what to do about a stream without any batch for the model: `error`, `warn` or `ignore`.
        on_unused_sources: what to do about sources that neither the model nor a hook reads: `error`, `warn` or
            `ignore`.
        on_nan_loss: what to do when the loss that is minimised is NaN or infinite: `error` ends the training with exit
            status 3, `warn` and `ignore` train on. On a CPU, the update is not made, and `emrun replay` names the
            examples that cause this. On a GPU, which nothing waits for, the last loss is looked at before each
            checkpoint and at the end of an epoch, so that no checkpoint has weights of NaN. Updates that are skipped,
            by `SkipSpike` or with fp16, do not count.
        on_incorrect_config: what to do about unknown arguments: `error`, `warn` or `ignore`.
        on_changed_data: what to do if a stream has another length than before a resume, and no override of the resume
            changes the data: `error`, `warn` or `ignore`. A pass that has become shorter than the position of the
            checkpoint is an error in any case; with `warn` and `ignore`, it ends there.
        fixed_batch_size: drop batches of another length.
        fixed_epoch_size: number of batches of the train stream in an epoch, independent of the length of a pass; also
            written `200 updates`. So the extra streams are evaluated, and checkpoints are saved, every 200 updates. The
            zeroth epoch evaluates as many batches, but at most one pass.
        overfit: train and evaluate on this many batches only, the first ones of pass 1 of the train stream, in every
            epoch. A model that does not overfit them has a mistake. The names of the streams do not change, and
            `emrun eval` reads the whole stream. Not together with `fixed_epoch_size`.
        skip_zeroth_epoch: do not evaluate before the training.
        on_interrupt: with `batch`, the first SIGINT, SIGTERM or SIGHUP ends the training after the current batch, and a
            second signal ends the process at once. With `epoch`, the first SIGINT ends the training after the current
            epoch with its evaluations and hooks, SIGTERM, SIGHUP or a second signal after the batch, and a third signal
            ends the process. A checkpoint is saved. SIGUSR1 saves the checkpoint `latest` after the current batch, and
            the training continues.
        preempt_exit_code: the exit status of the command after SIGTERM or SIGHUP, once the checkpoint is saved, such as
            75 for a cluster that then starts the command again; null to end the process by the signal. Ctrl-C (SIGINT)
            always ends the process by the signal, so that a shell loop stops too.
        record_steps: record the loss and the learning rates of every n-th iteration in `steps.jsonl`, and what hooks
            add; 0 for none. After 100,000 iterations only every 10th of these is recorded, after 1,000,000 every 100th.
        report: write `report.html`, a page of the run, into the run directory at the end of the training.
        run: the run directory; without a run, no trace, metrics, steps or checkpoints are written.
        rank_log: on another rank than 0, the log to write, if rank 0 has a run.
        seed: the seed of streams and evaluations.
        unknown: unknown arguments; see `on_incorrect_config`.

    Raises:
        ArgumentError: an argument has a wrong value.
        HookError: a hook does not fit the events, or already belongs to a main loop.
    """

    streams: DatasetStreams

    def __init__(  # noqa: PLR0915 - the parts are made one after another
        self,
        model: AbstractModel,
        dataset: Any,
        hooks: Iterable[AbstractHook] = (),
        train_stream_name: str = "train",
        extra_streams: Sequence[str | Mapping[str, Any]] = (),
        buffer: int | None = None,
        workers: int = 0,
        on_empty_batch: Policy = "error",
        on_bad_example: Policy = "error",
        on_empty_stream: Policy = "error",
        on_unused_sources: Policy = "warn",
        on_nan_loss: Policy = "error",
        on_incorrect_config: Policy = "error",
        on_changed_data: Policy = "error",
        fixed_batch_size: int | None = None,
        fixed_epoch_size: int | str | None = None,
        skip_zeroth_epoch: bool = False,
        on_interrupt: InterruptPolicy = "batch",
        preempt_exit_code: int | None = None,
        start_method: StartMethod | None = None,
        stream_timeout: float | None = None,
        rank_timeout: float | None = None,
        prefetch_to_device: bool = True,
        record_steps: int = 1,
        overfit: int | None = None,
        report: bool = True,
        run: Run | None = None,
        rank_log: RunLog | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        check_choice("on_incorrect_config", on_incorrect_config, Policy)
        check_choice("on_nan_loss", on_nan_loss, Policy)
        _refuse_unknown(unknown, on_incorrect_config)
        reading = Reading(buffer, workers, start_method, stream_timeout, lambda: self.session.prefetch, on_bad_example)
        self.model = model
        self.dataset = dataset
        self.run = run
        self.rows = record = Record(run.directory if run is not None else None)
        """The rows that the run records."""
        self.report = report
        """Whether a page of the run is written at its end."""
        self.seed = seed
        self.train_stream_name = train_stream_name
        self.has_run = run is not None or rank_log is not None
        self.on_nan_loss = on_nan_loss
        self.shown = {}
        randomness = StepRandomness() if run is not None else None
        them = ranks()
        if rank_timeout is not None:
            check_seconds("rank_timeout", rank_timeout)
            them.limit_waits(rank_timeout)
        if them.several and not model.shares_batches:
            name = type(model).__name__
            raise UsageError(
                f"{name} does not train on several ranks: it has no `shares_batches = True`, which says that its `run` "
                "adds up gradients over ranks as TorchModel does; start one process"
            )
        follows = them, rank_log is not None
        several = AgreedEndings(self, on_interrupt, them) if them.several else None
        self._endings = endings = several or Endings(self, on_interrupt)
        self.streams = streams = DatasetStreams(
            dataset,
            train_stream_name,
            extra_streams,
            reading=reading,
            fixed_epoch_size=fixed_epoch_size,
            iterations_per_update=model.iterations_per_update,
            overfit=overfit,
            seed=seed,
            interrupted=endings.is_interrupted,
            ranks=replace(them, least=model.least_rows),
        )
        checks = BatchChecks(
            self,
            on_empty_batch=on_bad_example if on_empty_batch == "error" else on_empty_batch,
            on_empty_stream=on_empty_stream,
            on_unused_sources=on_unused_sources,
            fixed_batch_size=fixed_batch_size,
        )
        events = Events(self, endings, checks, randomness)
        events.last, record.intervals.main_loop = [record.intervals], self
        self._steps = steps = StepRecord(self, record.steps, record_steps)
        self._length = length = RunLength(self, events, streams, not skip_zeroth_epoch, on_changed_data)
        state = TrainingState(self, streams, record, steps, length, *follows)
        first_saved = partial(run.trace.write, has_checkpoints=True) if run is not None else lambda: None
        saving = Saving(
            run.checkpoints if run else None,
            state.snapshot,
            endings.take_notice,
            first_saved,
            events.tell_of_checkpoint,
            *follows,
            self.model.is_sharded,
        )
        if several is not None:
            events.of_ranks = RankEvents(them, several, checks, self)
        self.time, loss = TrainingTime(events.examples), LossWatch(self, steps)
        failures = Failures(run, self, events, saving, randomness)
        self.epochs: Epochs = Epochs(self, streams, state, events, endings, saving)
        prefetches = prefetch_to_device and streams.reading.ahead > 0
        log = run.log if run is not None else rank_log
        ends = prefetches, preempt_exit_code, log
        self.session: Session = Session(self.epochs, run, steps, loss, *ends)
        rows = EpochRows(self, run, record, saving)
        bad = BadExamples(self, state, record, them, on_bad_example)
        events.parts = [failures, bad, FirstDigests(run), self.time, loss, steps, length, self.session, rows]
        endings.request, endings.wake_stream = saving.request, self.epochs.wake
        events.reached, events.keep_step = length.reached, failures.keep_skipped
        events.before_saving = loss.look
        self.notify, self.listens, self.check_outputs = events.notify, events.listens, checks.check_outputs
        self.change_hooks(hooks)
        self.notify("register_mainloop", main_loop=self)

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run: this one, and how many there are."""
        return ranks()

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream; see `Loop`."""
        return evaluation_pass(self.epochs, name)

    def wait_for_checkpoints(self) -> None:
        """Wait until the checkpoints requested before this event are on disk; see `Loop`."""
        self.epochs.saving.wait()

    def get_stream(self, name: str) -> StreamWrapper:
        """Return the wrapper of a stream, made at the first call; see `DatasetStreams.get`."""
        return self.streams.get(name, train=name == self.train_stream_name)

    def start_from(self, epochs_done: int, iterations_done: int, *, evaluating: bool = False) -> None:
        """Set the counters to those of the loaded checkpoint; with `evaluating=True`, the loop then only evaluates."""
        self.epochs.state.start_from(epochs_done, iterations_done)
        self.evaluating = evaluating

    def restore(self, place: Path, changed: Sequence[str] = ()) -> Path:
        """Load a checkpoint: weights and state of the model, states of the hooks, counters, positions of the streams.

        Random states are restored when the training continues, after `before_training`; see `TrainingState.resume`.

        Args:
            place: the directory of the checkpoint, or a link with its name. The directory must exist until the
                training continues.
            changed: what this resume changes in the data, for the warning that it is not exact.

        Returns:
            The directory of the checkpoint.

        Raises:
            StateError: the checkpoint does not fit the model, the hooks or the streams.
            StorageError: the checkpoint cannot be read.
        """
        place = place.resolve()
        self._length.changed = changed
        names = self.epochs.state.load(place)
        self.epochs.saving.rewind(place, *self.epochs.state.point, names)
        return place

    def change_hooks(self, hooks: Iterable[AbstractHook]) -> None:
        """Replace the hooks before the training begins; check and register those that are new."""
        self.epochs.events.change_hooks(hooks)

    def check_hooks(self, *, any_stream: bool = False) -> None:
        """Check that hooks write what later hooks read; unless `any_stream`, also check streams and checkpoint names.

        Raises:
            HookError: a check failed; the message says what to do. See `check_monitors`, `check_saved_names`.
        """
        if any_stream:
            check_monitors([*self.hooks, self.model], None)
        else:
            check_saved_names(self.hooks)
            named = {name for names in self.model.only_in.values() for name in names}
            check_streams(named, self.dataset, self.extra_streams, "model.metrics names", len(self.hooks))
            self._length.check()
            check_monitors([*self.hooks, self.model], [self.train_stream_name, *self.extra_streams])

    def run_training(self) -> Outcome:
        """Train until a hook or a signal ends the training.

        Returns:
            How the training ended.

        Raises:
            BaseException: the error that made the training fail, after `on_error` and `after_training` of all hooks.
        """
        self.check_hooks()
        for name in self.streams.sources:
            stream_function(self.dataset, name)
        with self:
            warn_of_no_end(self.hooks)
            train(self.epochs, skip_zeroth_epoch=not self._length.has_zeroth_epoch)
        self.close()
        return cast(Outcome, self.outcome)

    def run_evaluation(self, stream_name: str, *, as_trained: bool = False, in_order: bool = False) -> EpochData:
        """Evaluate the model on one pass of a stream.

        Hooks get all events, but cannot end the evaluation or save checkpoints. Within a `with` block of the main loop,
        the evaluation is not recorded as an epoch of the run; `epoch` also records streams that are only evaluated.

        Args:
            stream_name: the name of the stream.
            as_trained: read as many batches of an extra stream as an evaluation of the training does.
            in_order: read all rows in their order; see `StreamContext`.

        Returns:
            What the hooks wrote about the stream.

        Raises:
            Interrupted: a signal ended the evaluation.
            BaseException: the error that made the evaluation fail, after `on_error` and `after_training` of all hooks.
        """
        epoch_data: EpochData = {}
        with (
            switched_on(self, "evaluating"),
            switched_on(self, "batch_length", self.batch_length),  # of a batch in which a hook calls this
            switched_on(self.rows, "takes_epochs", not self.session.is_open),
        ):
            with nullcontext() if self.session.is_open else self:
                size = self.streams.extra[stream_name].batches if as_trained else None
                stream = self.streams.get(stream_name, train=False, batches=size, in_order=in_order)
                epoch_data = self.epochs.run_epoch([], [stream], 0)
            self._endings.raise_if_due()  # again: the end of the block suppresses an `Interrupted`
        return epoch_data

    def epoch(self, train_streams: Sequence[StreamLike] = (), eval_streams: Sequence[StreamLike] = ()) -> EpochData:
        """Run one epoch by hand, inside a `with` block of the main loop.

        Args:
            train_streams: streams to train on: names, wrappers or any iterables of batches.
            eval_streams: streams to evaluate afterwards, given in the same ways.

        Returns:
            What the hooks wrote: stream -> variable -> a number or a mapping aggregation -> number.

        Raises:
            UsageError: two streams have the same name, or this is called outside of `with main_loop:`.
            TrainingTerminated: a hook or a signal ends the training.
        """
        if not self.session.is_open:
            raise UsageError("main_loop.epoch() must be called in a `with main_loop:` block, which begins the training")
        self._endings.raise_if_due()
        resume(self.epochs)
        resolve = self.streams.resolve
        train = [resolve(stream, f"unnamed_train_{i}", train=True) for i, stream in enumerate(train_streams)]
        evaluated = [resolve(stream, f"unnamed_eval_{i}", train=False) for i, stream in enumerate(eval_streams)]
        return self.epochs.run_epoch(train, evaluated, self.training_epochs_done + bool(train))

    def close(self) -> None:
        """End the passes that have begun; a stream keeps its position."""
        self.streams.close()

    def __enter__(self) -> MainLoop:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks."""
        if self.session.is_open:
            raise UsageError("the main loop is already entered; leave its `with` block first")
        self.check_hooks(any_stream=True)
        self.session.begin()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Save, call `after_training` of all hooks and restore the signal handlers; suppress a `TrainingTerminated`."""
        return self.session.end(error)


def _refuse_unknown(names: Iterable[str], policy: Policy) -> None:
    known = [each for each in MainLoop.__init__.__annotations__ if each not in ("unknown", "return")]
    for name in names:
        message = f"unknown argument of the main loop{did_you_mean(name, known)}"
        if policy == "error":
            raise ArgumentError(name, message)
        if policy == "warn":
            _LOG.warning("%s: %s", name, message)
