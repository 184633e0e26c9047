"""The main loop: how it is built, what hooks may use of it, and how it is run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, cast

from emrun.base.arguments import check_choice, check_seconds
from emrun.base.errors import ArgumentError, HookError, UsageError
from emrun.base.types import Batch, EpochData, Horizon, InterruptPolicy, Policy, StartMethod
from emrun.base.wording import did_you_mean
from emrun.dataset import check_streams, stream_function
from emrun.epoch_data import check_monitors
from emrun.hook import AbstractHook, Loop
from emrun.loop.batches import BatchLoop
from emrun.loop.checkpointer import check_saved_names
from emrun.loop.outcome import Outcome, warn_of_no_end
from emrun.loop.parts import Parts, build
from emrun.loop.session import Session
from emrun.loop.training import TrainingLoop
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks, ranks
from emrun.storage.log import RunLog
from emrun.storage.run import Run
from emrun.streams.dataset_streams import StreamLike
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


def _read(path: str) -> Any:
    """Return a property of the main loop that reads an attribute of one of its parts, without a call of Python."""
    return property(attrgetter(path))


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
            (`ImageFolder`, `Pictures`, `TarShards`, `TorchDataset` with a map-style dataset): `error` ends the
            training; `warn` and `ignore` leave the example out, so that its batch is shorter. The names of such
            examples, and why they are bad, are in `rows.jsonl` of the run. More than 1 % of the examples of a pass are
            an error. A batch without any example is left out too, unless `on_empty_batch` says what to do about it. In
            Python, give it to the dataset too.
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

    parts: Parts
    """The parts of the loop, for emrun itself."""
    batches: BatchLoop
    training_loop: TrainingLoop
    session: Session
    report: bool
    """Whether a page of the run is written at its end."""

    progress = _read("parts.progress")
    """Where the training is; what follows is read there."""
    training = _read("progress.training")
    evaluating = _read("progress.evaluating")
    at_end = _read("progress.at_end")
    training_epochs_done = _read("progress.epochs_done")
    iterations_done = _read("progress.iterations_done")
    updates_done = _read("progress.updates_done")
    stream_name = _read("progress.stream_name")
    batch_length = _read("progress.batch_length")
    epoch_began = _read("progress.epoch_began")
    epoch_is_resumed = _read("progress.epoch_is_resumed")
    outcome = _read("session.outcome")
    capsule = _read("parts.failures.capsule")
    is_alone = _read("parts.requests.is_alone")
    training_seconds = _read("parts.time.seconds")
    passes_done = _read("parts.length.passes_done")
    metrics = _read("parts.record.epochs")
    shown = _read("parts.shown")

    # what the config says
    model = _read("parts.model")
    dataset = _read("parts.snapshot.dataset")
    train_stream_name = _read("parts.streams.train_stream_name")
    seed = _read("parts.seed")
    on_nan_loss = _read("parts.loss.on_nan_loss")
    run = _read("parts.run")
    has_run = _read("parts.has_run")
    ranks = _read("parts.ranks")
    rows = _read("parts.record")
    streams = _read("parts.streams")
    time = _read("parts.time")
    fixed_epoch_size = _read("parts.streams.fixed_epoch_size")
    stream_sizes = _read("parts.streams.sizes")
    limits = _read("parts.length.limits")

    def __init__(
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
        _refuse_unknown(unknown, on_incorrect_config)
        parts = build(
            model,
            dataset,
            ranks=_ranks_for(model, rank_timeout),
            run=run,
            follows=rank_log is not None,
            seed=seed,
            train_stream_name=train_stream_name,
            extra_streams=extra_streams,
            fixed_epoch_size=fixed_epoch_size,
            overfit=overfit,
            reading=Reading(buffer, workers, start_method, stream_timeout, on_bad_example=on_bad_example),
            prefetch_to_device=prefetch_to_device,
            fixed_batch_size=fixed_batch_size,
            skip_zeroth_epoch=skip_zeroth_epoch,
            on_empty_batch=on_empty_batch,
            on_bad_example=on_bad_example,
            on_empty_stream=on_empty_stream,
            on_unused_sources=on_unused_sources,
            on_nan_loss=on_nan_loss,
            on_changed_data=on_changed_data,
            on_interrupt=on_interrupt,
            record_steps=record_steps,
        )
        batches = BatchLoop(parts)
        self._set(
            parts=parts,
            batches=batches,
            training_loop=TrainingLoop(parts, batches),
            session=Session(parts, batches, run.log if run is not None else rank_log, preempt_exit_code),
            report=report,
            notify=parts.callbacks.notify,
            listens=parts.callbacks.listens,
            check_outputs=parts.checks.check_outputs,
            request_checkpoint=parts.requests.checkpoint,
        )
        self.change_hooks(hooks)
        self.notify("register_mainloop", main_loop=self)

    def _set(self, **attributes: Any) -> None:
        """Set attributes that are read only from outside."""
        vars(self).update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that a hook keeps here for itself; what the loop has is read only.

        Raises:
            HookError: the loop has an attribute or a method of this name.
        """
        if hasattr(MainLoop, name) or name in MainLoop.__annotations__ or name in Loop.__annotations__:
            raise HookError(f"main_loop.{name} cannot be set: {_INSTEAD.get(name, _READ_ONLY)}")
        super().__setattr__(name, value)

    @property
    def hooks(self) -> Sequence[AbstractHook]:  # type: ignore[override]  # it cannot be set
        """The hooks, in the order in which they are called."""
        return tuple(self.parts.hooks)

    @property
    def extra_streams(self) -> list[str]:  # type: ignore[override]
        """Names of the streams that are evaluated after the train stream. The train stream is `train_eval` here."""
        return list(self.parts.streams.extra)

    @property
    def reading_ahead(self) -> Mapping[str, int]:  # type: ignore[override]
        """How streams are read ahead: the settings `buffer` and `workers` of the config; 0 for none."""
        reading = self.parts.streams.reading
        return {"buffer": reading.buffer or 0, "workers": reading.workers}

    @property
    def epoch_seconds(self) -> float:  # type: ignore[override]
        """Seconds since the current epoch began in this process, evaluations included."""
        return perf_counter() - self.parts.progress.epoch_began

    @property
    def horizon(self) -> Horizon:  # type: ignore[override]
        """How many updates the run will make, as far as this is known."""
        return self.parts.length.horizon

    @property
    def recorded(self) -> Mapping[str, Any]:  # type: ignore[override]
        """What hooks have recorded for the current iteration; see `Loop`."""
        return {**self.parts.record.intervals.recorded, **self.parts.steps.given}

    def record(self, name: str, value: Any) -> None:
        """Add a value of the current iteration to the step log; see `Loop`."""
        if self.parts.progress.training and self.parts.progress.stream is not None:
            self.parts.steps.add(name, value)
            self.parts.record.intervals.note(name, value)
        elif self.parts.progress.stream is None and not self.parts.progress.evaluating:
            raise HookError(
                f"record({name!r}, ...) was called outside of the batches of a stream, so that the value belongs to no "
                "iteration; call it in before_batch, before_update, after_update or after_batch of the train stream"
            )

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream; see `Loop`."""
        return self.batches.evaluation_pass(name)

    def wait_for_checkpoints(self) -> None:
        """Wait until the checkpoints requested before this event are on disk; see `Loop`."""
        self.parts.checkpointer.wait()

    def get_stream(self, name: str) -> StreamWrapper:
        """Return the wrapper of a stream, made at the first call; see `DatasetStreams.get`."""
        return self.parts.streams.get(name, train=name == self.train_stream_name)

    def start_from(self, epochs_done: int, iterations_done: int, *, evaluating: bool = False) -> None:
        """Set the counters to those of the loaded checkpoint; with `evaluating=True`, the loop then only evaluates."""
        updates_done = iterations_done // self.model.iterations_per_update  # about right
        self.parts.progress.start_between_epochs(epochs_done, iterations_done, updates_done)
        self.parts.progress.only_evaluate(evaluating)

    def restore(self, place: Path, changed: Sequence[str] = ()) -> Path:
        """Load a checkpoint: weights and state of the model, states of the hooks, counters, positions of the streams.

        Random states are restored when the training continues, after `before_training`; see `Snapshot.resume`.

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
        self.parts.changed_data.expect(changed)
        names = self.parts.snapshot.load(place)
        self.parts.checkpointer.rewind(place, names)
        return place

    def change_hooks(self, hooks: Iterable[AbstractHook]) -> None:
        """Replace the hooks before the training begins; check and register those that are new."""
        self.parts.callbacks.change_hooks(hooks, self)

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
            self.parts.length.check()
            check_monitors([*self.hooks, self.model], [self.train_stream_name, *self.extra_streams])

    def run_training(self) -> Outcome:
        """Train until a hook or a signal ends the training.

        Returns:
            How the training ended.

        Raises:
            BaseException: the error that made the training fail, after `on_error` and `after_training` of all hooks.
        """
        self.check_hooks()
        for name in self.parts.streams.sources:
            stream_function(self.dataset, name)
        with self:
            warn_of_no_end(self.hooks)
            self.training_loop.run(skip_zeroth_epoch=not self.parts.length.has_zeroth_epoch)
        self.close()
        return cast(Outcome, self.outcome)

    def run_evaluation(
        self,
        stream_name: str,
        *,
        as_trained: bool = False,
        in_order: bool = False,
        path: Path | None = None,
        batches: int | None = None,
    ) -> EpochData:
        """Evaluate the model on one pass of a stream.

        Hooks get all events, but cannot end the evaluation or save checkpoints. Within a `with` block of the main loop,
        the evaluation is not recorded as an epoch of the run; `epoch` also records streams that are only evaluated.

        Args:
            stream_name: the name of the stream.
            as_trained: read as many batches of an extra stream as an evaluation of the training does.
            in_order: read all rows in their order; see `StreamContext`.
            path: where the data of the stream `new` are; see `stream_function`.
            batches: how many batches to read at most; None for all.

        Returns:
            What the hooks wrote about the stream.

        Raises:
            Interrupted: a signal ended the evaluation.
            BaseException: the error that made the evaluation fail, after `on_error` and `after_training` of all hooks.
        """
        parts = self.parts
        epoch_data: EpochData = {}
        is_within = self.session.is_open
        with parts.progress.evaluation(is_recorded=not is_within):
            with nullcontext() if is_within else self:
                size = parts.streams.extra[stream_name].batches if as_trained else batches
                stream = parts.streams.get(stream_name, train=False, batches=size, in_order=in_order, path=path)
                epoch_data = self.training_loop.run_epoch([], [stream], 0)
            parts.requests.raise_if_due()  # again: the end of the block suppresses an `Interrupted`
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
        self.parts.requests.raise_if_due()
        self.training_loop.resume()
        resolve = self.parts.streams.resolve
        train = [resolve(stream, f"unnamed_train_{i}", train=True) for i, stream in enumerate(train_streams)]
        evaluated = [resolve(stream, f"unnamed_eval_{i}", train=False) for i, stream in enumerate(eval_streams)]
        return self.training_loop.run_epoch(train, evaluated, self.parts.progress.epochs_done + bool(train))

    def close(self) -> None:
        """End the passes that have begun; a stream keeps its position."""
        self.parts.streams.close()

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


_READ_ONLY = "the loop sets it, and hooks read it; a hook may keep values of its own under another name"
_INSTEAD = {
    **dict.fromkeys(
        (
            "model",
            "dataset",
            "train_stream_name",
            "extra_streams",
            "fixed_epoch_size",
            "on_nan_loss",
            "seed",
            "run",
            "report",
        ),
        "give it to the constructor of MainLoop",
    ),
    "hooks": "call change_hooks before the training begins",
    "evaluating": "call run_evaluation, or start_from(..., evaluating=True)",
    **dict.fromkeys(("training_epochs_done", "iterations_done", "updates_done"), "start_from sets the counters"),
    "training": "a hook cannot change which stream the model is trained on",
    **dict.fromkeys(("limits", "horizon"), "a hook declares `limits`"),
    "outcome": "raise TrainingTerminated or TrainingAborted to end the training",
    "shown": "call show",
    "recorded": "call record",
}
"""Attribute -> what to do instead of setting it."""


def _ranks_for(model: AbstractModel, timeout: float | None) -> Ranks:
    """Return the ranks of the run, which wait for each other for some seconds at most.

    Raises:
        UsageError: there are several, on which the model does not train.
    """
    run_ranks = ranks()
    if timeout is not None:
        check_seconds("rank_timeout", timeout)
        run_ranks.limit_waits(timeout)
    if run_ranks.several and not model.shares_batches:
        raise UsageError(
            f"{type(model).__name__} does not train on several ranks: it has no `shares_batches = True`, which says "
            "that its `run` adds up gradients over ranks as TorchModel does; start one process"
        )
    return run_ranks


def _refuse_unknown(names: Iterable[str], policy: Policy) -> None:
    check_choice("on_incorrect_config", policy, Policy)
    known = [name for name in MainLoop.__init__.__annotations__ if name not in ("unknown", "return")]
    for name in names:
        message = f"unknown argument of the main loop{did_you_mean(name, known)}"
        if policy == "error":
            raise ArgumentError(name, message)
        if policy == "warn":
            _LOG.warning("%s: %s", name, message)
