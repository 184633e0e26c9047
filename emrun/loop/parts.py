"""The parts of a main loop, by name, built in the order in which they depend on each other: the only wiring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from emrun.base.types import InterruptPolicy, Policy
from emrun.hook import AbstractHook
from emrun.loop.bad_examples import BadExamples
from emrun.loop.batch_checks import BatchChecks, VariableChecks
from emrun.loop.callbacks import Callbacks
from emrun.loop.checkpointer import Checkpointer
from emrun.loop.failures import Failures, StepAtWork
from emrun.loop.first_digests import FirstDigests
from emrun.loop.loss_watch import LossWatch
from emrun.loop.prefetching import Prefetching
from emrun.loop.progress import Progress
from emrun.loop.ranks.batches import RankBatches
from emrun.loop.ranks.callbacks import RankCallbacks
from emrun.loop.ranks.requests import SharedRequests
from emrun.loop.ranks.states import RankStates
from emrun.loop.requests import Requests
from emrun.loop.run_length import ChangedData, RunLength
from emrun.loop.snapshot import Snapshot
from emrun.loop.step_log import StepLog
from emrun.loop.training_time import TrainingTime
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks
from emrun.record.metrics_log import MetricsLog
from emrun.shown import Shown
from emrun.storage.run import Run
from emrun.storage.step_randomness import StepRandomness
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.reading import Reading


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a main loop; the class of each part describes it."""

    model: AbstractModel
    hooks: list[AbstractHook]
    ranks: Ranks
    run: Run | None
    has_run: bool
    seed: int
    shown: dict[str, Shown]
    progress: Progress
    requests: Requests
    prefetching: Prefetching
    streams: DatasetStreams
    checks: BatchChecks
    record: MetricsLog
    steps: StepLog
    length: RunLength
    changed_data: ChangedData
    snapshot: Snapshot
    at_work: StepAtWork
    failures: Failures
    shares: RankBatches | None
    callbacks: Callbacks
    checkpointer: Checkpointer
    time: TrainingTime
    loss: LossWatch
    bad_examples: BadExamples
    digests: FirstDigests


def build(
    model: AbstractModel,
    dataset: Any,
    *,
    ranks: Ranks,
    run: Run | None,
    follows: bool,
    seed: int,
    train_stream_name: str,
    extra_streams: Sequence[str | Mapping[str, Any]],
    fixed_epoch_size: int | str | None,
    overfit: int | None,
    reading: Reading,
    prefetch_to_device: bool,
    fixed_batch_size: int | None,
    skip_zeroth_epoch: bool,
    on_empty_batch: Policy,
    on_bad_example: Policy,
    on_empty_stream: Policy,
    on_unused_sources: Policy,
    on_nan_loss: Policy,
    on_changed_data: Policy,
    on_interrupt: InterruptPolicy,
    record_steps: int,
) -> Parts:
    """Build the parts; the arguments are those of `MainLoop`.

    Args:
        model: the model.
        dataset: the dataset.
        ranks: the ranks of the run.
        follows: whether rank 0 has the run of this rank.
        reading: how the streams are read.
    """
    hooks: list[AbstractHook] = []
    has_run = run is not None or follows

    # where the training is, and what is wanted of it
    progress = Progress()
    shared_requests = None
    if ranks.several:
        shared_requests = SharedRequests(progress, model, on_interrupt, has_run=has_run, ranks=ranks)
    requests = shared_requests or Requests(progress, model, on_interrupt, has_run=has_run)

    # the batches
    prefetching = Prefetching(model, hooks, is_on=prefetch_to_device and reading.of(dataset).ahead > 0)
    if prefetching.is_on:
        reading = replace(reading, prefetch=prefetching.current)
    streams = DatasetStreams(
        dataset,
        train_stream_name,
        extra_streams,
        reading=reading,
        fixed_epoch_size=fixed_epoch_size,
        iterations_per_update=model.iterations_per_update,
        overfit=overfit,
        seed=seed,
        interrupted=requests.is_interrupted,
        ranks=replace(ranks, least=model.least_rows),
    )
    checks = BatchChecks(
        VariableChecks(model, hooks, on_unused_sources),
        progress,
        on_empty_batch=on_bad_example if on_empty_batch == "error" else on_empty_batch,
        on_empty_stream=on_empty_stream,
        fixed_batch_size=fixed_batch_size,
    )
    shares = None
    if shared_requests is not None:
        shares = RankBatches(ranks, progress, shared_requests, leaves_out=checks.leaves_out)
    examples = partial(_examples, progress, shares)

    # what is recorded, and what a checkpoint holds
    record = MetricsLog(run.directory if run is not None else None)
    steps = StepLog(model, progress, record.steps, record_steps)
    length = RunLength(
        model, hooks, progress, streams, fixed_batch_size=fixed_batch_size, has_zeroth_epoch=not skip_zeroth_epoch
    )
    changed_data = ChangedData(streams, on_changed_data)
    snapshot = Snapshot(
        model=model,
        hooks=hooks,
        dataset=dataset,
        progress=progress,
        streams=streams,
        record=record,
        steps=steps,
        length=length,
        changed_data=changed_data,
        has_run=has_run,
        ranks=ranks,
        of_ranks=RankStates(model, hooks, ranks, seed),
        follows=follows,
    )

    # the hooks, and what is kept of a step that fails
    at_work = StepAtWork(StepRandomness() if run is not None else None)
    failures = Failures(run.directory if run is not None else None, model, hooks, progress, at_work)
    of_ranks = None
    if shared_requests is not None and shares is not None:
        of_ranks = RankCallbacks(ranks, hooks, progress, shared_requests, shares, is_sharded=model.is_sharded)
    callbacks = Callbacks(
        model=model,
        hooks=hooks,
        progress=progress,
        requests=requests,
        at_work=at_work,
        failures=failures,
        length=length,
        intervals=record.intervals,
        examples=examples,
        of_ranks=of_ranks,
    )

    # the checkpoints
    checkpointer = Checkpointer(
        requests=requests.checkpoints,
        progress=progress,
        take=snapshot.take,
        root=run.checkpoints if run is not None else None,
        notice=requests.notice,
        begin_saving=partial(_note_first_checkpoint, run),
        report=callbacks.report_checkpoint,
        ranks=ranks,
        is_sharded=model.is_sharded,
    )
    return Parts(
        model=model,
        hooks=hooks,
        ranks=ranks,
        run=run,
        has_run=has_run,
        seed=seed,
        shown={},
        progress=progress,
        requests=requests,
        prefetching=prefetching,
        streams=streams,
        checks=checks,
        record=record,
        steps=steps,
        length=length,
        changed_data=changed_data,
        snapshot=snapshot,
        at_work=at_work,
        failures=failures,
        shares=shares,
        callbacks=callbacks,
        checkpointer=checkpointer,
        time=TrainingTime(examples),
        loss=LossWatch(model, progress, steps, on_nan_loss),
        bad_examples=BadExamples(progress, record, ranks, on_bad_example),
        digests=FirstDigests(run),
    )


def _examples(progress: Progress, shares: RankBatches | None) -> int:
    """Return the number of examples in the current batch, on all ranks."""
    return progress.batch_length if shares is None else shares.total


def _note_first_checkpoint(run: Run | None) -> None:
    """Note in the trace of the run that there is a checkpoint."""
    if run is not None:
        run.trace.write(has_checkpoints=True)
