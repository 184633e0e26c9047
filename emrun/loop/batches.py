"""The path of a batch: from the stream through the checks and the hooks to the model. Read this file first.

`BatchLoop.run` runs the batches of a stream, `_run_batches` is the loop over them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from emrun.base.errors import RankFailed, reason_of
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.terminal import restore_logging
from emrun.base.types import Batch
from emrun.loop.failures import Window
from emrun.loop.parts import Parts
from emrun.loop.ranks.batches import StreamShares
from emrun.ranks.group import answered
from emrun.ranks.shares import like, rows_in
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)
_WEIGHTS = ("loss_weight", "example_weight")
"""The outputs with weights of the examples."""

Outputs = Mapping[str, Any]
Run = Callable[[Batch, bool, str], Outputs]
Report = Callable[..., None]
BeforeStep = Callable[[Batch], None] | None


@dataclass(eq=False)
class Stages:
    """What the batches of a stream go through, in this order; a stage that is off is None."""

    batches: Iterable[Batch]
    """The batches of the stream."""
    check: Callable[[Batch], int]
    """Checks a batch; returns 0 to leave it out."""
    before_first_step: BeforeStep
    """Keeps the random states for `emrun replay`, and the checksum of the first batch."""
    before_batch: Callable[..., Batch | None] | None
    """Calls `before_batch` of the hooks; returns the batch for the model if hooks may have changed it."""
    accept: Callable[[Batch], Batch | None]
    """Checks such a batch; returns the batch for the model, None to leave it out."""
    run: Run
    """Runs the model."""
    after_batch: Report | None
    """Calls `after_batch` of the hooks."""
    last_after_batch: Report
    """The same for a batch with which the training may reach a limit."""
    limit: float
    """The least number of iterations with which the training may reach a limit."""
    record_step: Callable[[], None] | None
    """Records the step in `steps.jsonl`."""
    name_batch: Callable[[BaseException], None]
    """Names the batch in an error of the model about the batch."""
    shares: StreamShares | None
    """Gives this rank its share of each batch; None for one rank."""


@dataclass(eq=False)
class _AtWork:
    """The batch to keep if anything fails; None between two batches."""

    batch: Batch | None = None


class BatchLoop:
    """Runs the model on the batches of streams.

    Args:
        parts: what takes part.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._first_wait: NamedWhenSlow | None = None  # says that the first batch of a session takes long

    def begin_session(self) -> None:
        """Begin to wait for the first batch."""
        self._first_wait = None

    def end_first_wait(self) -> None:
        """End the wait for the first batch of a session."""
        if self._first_wait is not None:
            self._first_wait.cancel()

    def run(self, stream: StreamWrapper, *, train: bool, is_last: bool = False, is_resumed: bool = False) -> None:
        """Run the model on the batches of one epoch of a stream, between `before_stream` and `after_stream`.

        Args:
            stream: the stream.
            train: whether the model is trained on it.
            is_last: whether it is the last train stream of the epoch.
            is_resumed: whether the epoch is resumed in its middle, so that the stream may have begun, or have no batch.
        """
        parts = self._parts
        progress = parts.progress
        with progress.streams_of(train=train):
            try:
                if not (is_resumed and (is_last or stream.has_begun)):
                    parts.callbacks.notify("before_stream", stream_name=stream.name)
                progress.enter(stream.__enter__(), train=train)  # a train stream reads ahead during evaluations too
                iterations = None if stream.has_begun else progress.iterations_done
                is_awaited = not train and parts.length.awaits(stream)
                stages = self._stages_of(stream, train=train)
                with parts.time.counting(train=train):
                    batches = self._run_batches(stream, stages, train=train)
            finally:
                if not (train and stream is parts.streams.trained.get(stream.name)):  # a session ends train streams
                    stream.__exit__(None, None, None)

        # what is known now of the stream
        parts.requests.exchange()
        parts.bad_examples.end_stream(stream)
        if train:
            parts.loss.look()
            parts.steps.end_stream(epoch_ended=stream.epoch_ended)
        parts.changed_data.end_stream(stream, train=train)
        if train:
            parts.length.end_train_stream(stream, iterations)
        elif is_awaited:
            parts.length.end_evaluation(stream, batches)
        self.end_first_wait()
        if stages.shares is not None:
            stages.shares.check_empty()

        # the end of the stream, or of the training
        if not (train and stream.epoch_ended):
            parts.requests.raise_if_due(in_epoch=True, is_left=train)  # a resume would begin another pass after its end
        if not (batches or is_resumed):
            parts.checks.report_empty_stream(stream.name)
        if train and is_last:
            progress.end_train_streams()
        parts.callbacks.notify("after_stream", stream_name=stream.name)

    def _stages_of(self, stream: StreamWrapper, *, train: bool) -> Stages:
        """Return the stages that are on for a stream."""
        parts = self._parts
        callbacks = parts.callbacks
        name = stream.name

        # checks and hooks
        if parts.at_work.failed_event is not None:
            parts.at_work.forget_failure()
        check = parts.checks.begin(name, ", ".join(callbacks.changers))
        accept = self._accepting()
        after_batch: Report | None = None
        if callbacks.listens("after_batch"):
            after_batch = partial(callbacks.notify, "after_batch")
        restore_logging()

        # what is timed
        batches: Iterable[Batch] = stream
        run: Run = parts.model.run
        profiling = callbacks.profiling
        if profiling is not None:
            batches = profiling.batches_of(name, batches)
            run = profiling.run_of(name, run)
            if after_batch is not None:
                after_batch = profiling.report_of(name, after_batch)

        # what is recorded
        before_first_step = self._before_first_step(stream, train=train) if parts.run is not None else None
        record_step = parts.steps.begin_stream() if train and parts.has_run else None
        limit = parts.length.begin_stream(train=train)
        if train and parts.time.counts_examples:
            run = parts.time.counting_examples(run)
        if train and parts.length.budgets:
            run = parts.time.agreeing(run)
        if self._first_wait is None:
            self._first_wait = NamedWhenSlow("reading and running the first batch").__enter__()

        # several ranks
        shares = None
        if parts.shares is not None:
            shares = parts.shares.begin_stream(stream)
            batches = shares.shared(batches)
            accept = shares.accepting(accept)
            if parts.model.is_sharded:
                run = answered()(run)  # it exchanges weights

        return Stages(
            batches=batches,
            check=check,
            before_first_step=before_first_step,
            before_batch=self._before_batch(),
            accept=accept,
            run=run,
            after_batch=after_batch,
            last_after_batch=partial(callbacks.end_training, after_batch),
            limit=limit,
            record_step=record_step,
            name_batch=parts.checks.name_batch,
            shares=shares,
        )

    def _before_first_step(self, stream: StreamWrapper, *, train: bool) -> BeforeStep:
        """Return what is called with the batches of a stream until the model has run on the first one."""
        parts = self._parts
        parts.failures.begin_stream(stream, train=train)

        def before_first_step(batch: Batch) -> None:
            parts.failures.begin_first_step()
            parts.digests.note(stream, batch)

        return before_first_step

    def _accepting(self) -> Callable[[Batch], Batch | None]:
        """Return what checks the batches of the stream again after hooks have changed them."""
        check_changed = self._parts.checks.check_changed
        return lambda batch: batch if check_changed(batch) else None

    def _before_batch(self) -> Callable[..., Batch | None] | None:
        """Return what calls `before_batch` of the hooks; None if none listens."""
        callbacks = self._parts.callbacks
        if not callbacks.listens("before_batch"):
            return None
        return self._change if callbacks.changers else partial(callbacks.notify, "before_batch")

    def _change(self, stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch after `before_batch` of all hooks, which may have changed the copy."""
        changed = like(batch)
        self._parts.callbacks.notify("before_batch", stream_name=stream_name, batch=changed)
        self._parts.at_work.change(stream_name, changed)
        return changed

    def _run_batches(self, stream: StreamWrapper, stages: Stages, *, train: bool) -> int:
        """Run the model on the batches of a stream; return their number. Each line of the loop costs time per batch."""
        # as locals, which are read fastest
        progress = self._parts.progress
        requests = self._parts.requests
        model = self._parts.model
        name = stream.name
        before_step = stages.before_first_step
        before_batch = stages.before_batch
        run = stages.run
        after_batch = stages.after_batch
        record_step = stages.record_step
        limit = stages.limit
        has_windows = train and model.iterations_per_update > 1
        window = None  # the last batch of a window that is open
        at_work = _AtWork()
        done = 0
        with self._blaming(at_work, stream, stages, train=train):
            for batch in filter(stages.check, stages.batches):
                at_work.batch = batch
                if before_step is not None:
                    before_step(batch)

                # hooks that get the batch, and may change it
                if before_batch is not None:
                    changed = before_batch(stream_name=name, batch=batch)
                    if changed is not None:
                        at_work.batch = None
                        accepted = stages.accept(changed)
                        if accepted is None:
                            continue
                        at_work.batch = batch = accepted  # noqa: PLW2901 - the stream has its own variable

                # the model
                outputs = run(batch, train, name)
                if not done:
                    before_step, run = self._end_first_batch(run, outputs, train=train)
                done += 1
                if train:
                    progress.iterations_done += 1  # here, because a call would cost as much as a hook
                    if has_windows and model.is_accumulating:
                        window = Window(batch, stream.position)
                    else:
                        progress.updates_done += 1
                    if progress.iterations_done >= limit:
                        after_batch = stages.last_after_batch

                # hooks that get the outputs, and the step log
                try:
                    if after_batch is not None:
                        after_batch(stream_name=name, batch_data={**batch, **outputs})
                finally:  # also if a hook ends the training
                    if record_step is not None:
                        record_step()
                at_work.batch = None
                if requests.pending and self._leaves(stream, train=train):
                    break
        if train and model.is_accumulating:
            self._close_window(window, stream, stages)
        return done

    def _end_first_batch(self, run: Run, outputs: Outputs, *, train: bool) -> tuple[BeforeStep, Run]:
        """Look at what the first batch of a stream shows.

        Returns:
            What to call before each later step, and what runs the model in it.
        """
        parts = self._parts
        restore_logging()
        parts.checks.check_outputs(outputs)
        if train:
            parts.checks.check_step_values()
            if any(outputs.get(name) is not None for name in _WEIGHTS):
                run = parts.loss.noting(run, outputs)
        before_step = None
        if parts.run is not None:
            before_step = parts.failures.end_first_step(hooks_change_batches=bool(parts.callbacks.changers))
        self.end_first_wait()
        if train:
            parts.time.end_first_batch()
            if parts.shares is not None:
                parts.shares.log_shares()
        return before_step, run

    @contextmanager
    def _blaming(self, at_work: _AtWork, stream: StreamWrapper, stages: Stages, *, train: bool) -> Iterator[None]:
        """A block whose errors name the batch at work, which is kept with its step."""
        parts = self._parts
        try:
            yield
        except BaseException as error:  # user code may also call sys.exit
            if at_work.batch is None:
                raise
            stages.name_batch(error)
            if parts.failures.directory is None or isinstance(error, RankFailed):
                raise
            try:
                parts.checkpointer.wait()
            except Exception as saving_error:  # the training must end with the failure of the step
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            parts.failures.keep(error, at_work.batch, stream, train=train)
            raise

    def _leaves(self, stream: StreamWrapper, *, train: bool) -> bool:
        """After a batch, save what is requested; return whether the loop leaves the stream."""
        requests = self._parts.requests
        if train and self._parts.model.is_accumulating:
            requests.announce_wait()
            return False
        is_last = stream.is_at_end if train else lambda: True  # an evaluation completes its epoch
        if requests.leaves(is_last):
            return True
        self.save_requested()
        return False

    def _close_window(self, window: Window | None, stream: StreamWrapper, stages: Stages) -> None:
        """Make the update of a window that the end of the epoch has left open."""
        at_work = _AtWork(None if window is None else window.batch)
        with self._parts.failures.closing(window), self._blaming(at_work, stream, stages, train=True):
            self.finish_update()
            self._parts.callbacks.end_training()

    def finish_update(self) -> None:
        """Make the update of the last window of an epoch, which has fewer batches than the others."""
        with self._parts.progress.last_update():
            self._parts.model.finish_update()

    def save_requested(self) -> None:
        """Save the checkpoints that hooks or a signal requested."""
        parts = self._parts
        parts.requests.request_by_signal()
        if parts.checkpointer.has_work:
            parts.loss.look()
            profiling = parts.callbacks.profiling
            with parts.time.counting(train=False), nullcontext() if profiling is None else profiling.saving():
                parts.checkpointer.save_requested()

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream on which the model does not run; see `Loop.evaluation_pass`."""
        parts = self._parts
        requests = parts.requests
        stream = parts.streams.get(name, train=False)
        check = parts.checks.begin(name, ", ".join(parts.callbacks.changers))
        check_changed = parts.checks.check_changed
        before_batch = self._before_batch()
        several = parts.shares is not None
        with preserved_randomness(), stream, parts.progress.streams_of(train=False):
            seed_everything(parts.seed, "evaluation", name)
            parts.progress.enter(stream, train=False)
            for batch in stream:
                if (several and not rows_in(batch)) or check(batch) == 0:
                    continue
                changed = None if before_batch is None else before_batch(stream_name=name, batch=batch)
                if changed is None:
                    yield batch
                elif (rows_in(changed) or not several) and check_changed(changed):
                    yield changed
                requests.raise_if_due(in_epoch=True)
            requests.raise_if_due(in_epoch=True)  # a signal may end the stream
