"""The main loop: epochs of streams through a model, with hooks that watch and steer."""

from __future__ import annotations

import copy
import itertools
import logging
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, cast

from emrun.arguments import check_choice, check_count, check_exit_status
from emrun.dataset import open_stream, stream_function, stream_names
from emrun.errors import ArgumentError, UsageError, reason_of
from emrun.hook import (
    EVENTS,
    AbstractHook,
    TrainingAborted,
    TrainingTerminated,
    check_monitors,
    check_saved_names,
    listener,
    may_change_batches,
)
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.interrupts import Interrupts
from emrun.loop.outcome import Outcome, warn_of_no_end
from emrun.loop.saving import Checkpointing, InsteadOf
from emrun.loop.state import Phase, TrainingState
from emrun.model import AbstractModel
from emrun.randomness import preserved_randomness, seed_everything
from emrun.slow_start import NamedWhenSlow
from emrun.storage.capsules import Draws, Step, keep_failure
from emrun.storage.run import Run
from emrun.stream_context import StreamContext
from emrun.streams.dataset_streams import DatasetStreams, StreamLike
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper
from emrun.streams.stream_pass import is_stateful
from emrun.types import Batch, EpochData, InterruptPolicy, Policy, Prefetch, Profile, StartMethod
from emrun.wording import did_you_mean

_LOG = logging.getLogger(__name__)
_MOST_UNUSABLE = 100  # batches are looked at for one from which a lazy model gets its shapes
_DEFERRED = ("before_update", "after_update")  # a termination in these takes effect when the update is done


class MainLoop:
    """Trains a model on a dataset's streams, epoch by epoch, until a hook or a signal ends it.

    An epoch is a pass of the train stream followed by the evaluation of the extra streams. Before the first one, the
    zeroth epoch evaluates the train stream and the extra streams. Used as a context manager, `epoch` can be called by
    hand: hooks get `before_training` at the beginning of the block and `after_training` at its end.

    Args:
        model: any `AbstractModel`.
        dataset: any object with methods `<name>_stream`.
        hooks: called in this order, the model after them.
        train_stream_name: the stream that the model learns from.
        extra_streams: names of the streams that are evaluated after it; `{name: '5 epochs'}` for not each time. The
            train stream may be among them: it is evaluated, in a pass of its own, under the name `train_eval` (or
            `NAME_eval` for another `train_stream_name`), beside what is seen of `train` while it is trained on.
        buffer: how many batches of a stream are read ahead, by a thread or the workers; 0 for none, or two for each of
            the workers.
        workers: how many processes read a stream whose rows come from `ctx.batches`, in turn; another stream is read by
            one. Batches and their order do not depend on it, unless a stream draws from global random states.
        start_method: how the processes of `workers` are started; null for Python's default.
        stream_timeout: how many seconds the loop waits for one batch before the stream is said to hang, which is an
            error; null for no limit. Needs `buffer` or `workers`.
        prefetch_to_device: pin the batches that are read ahead and copy each to the GPU while the model is busy with
            the one before it; nothing on a CPU, without `buffer` and `workers`, or when a hook may change batches
            before they are run (`changes_batches`). Needs memory for three more batches on the GPU, and page-locked
            memory for those that are read ahead, at least two.
        on_empty_batch: what to do about a batch without sources or of length 0, which no model and hook gets to see:
            `error`, `warn` or `ignore`.
        on_empty_stream: likewise about a stream without any batch for the model.
        on_unused_sources: likewise about sources that neither the model nor a hook reads.
        on_incorrect_config: likewise about arguments that are none of these.
        fixed_batch_size: batches of another length are dropped.
        fixed_epoch_size: how many batches of the train stream make an epoch, whatever the length of a pass.
        skip_zeroth_epoch: do not evaluate before the training.
        on_interrupt: after what the first SIGINT or SIGTERM ends the training, with a checkpoint: the current `batch`,
            or the current `epoch`, its evaluations and hooks included. The second one ends the process at once. SIGUSR1
            saves the checkpoint `latest` after the current batch, and the training goes on.
        preempt_exit_code: the exit status of the command when SIGTERM ended the training and its checkpoint is saved,
            such as the 75 on which a cluster starts the command again; null for ending by the signal. Ctrl-C (SIGINT)
            always ends the process by the signal, so that a shell's loop stops too.
        run: the run directory; without one, no trace, metrics or checkpoints are written.
        seed: the seed of streams and evaluations.
        unknown: see `on_incorrect_config`.

    Raises:
        ArgumentError: an argument has a value that cannot be used.
        HookError: a hook is registered already.
    """

    saves = False
    """Whether the weights will be saved: those that could not be loaded again are refused before training."""
    _silence: NamedWhenSlow | None = None  # until the first batch of a session
    _epoch_began: float = 0.0  # on the clock of `perf_counter`

    def __init__(
        self,
        model: AbstractModel,
        dataset: Any,
        hooks: Iterable[AbstractHook] = (),
        train_stream_name: str = "train",
        extra_streams: Sequence[str | Mapping[str, Any]] = (),
        buffer: int = 0,
        workers: int = 0,
        on_empty_batch: Policy = "error",
        on_empty_stream: Policy = "error",
        on_unused_sources: Policy = "warn",
        on_incorrect_config: Policy = "error",
        fixed_batch_size: int | None = None,
        fixed_epoch_size: int | None = None,
        skip_zeroth_epoch: bool = False,
        on_interrupt: InterruptPolicy = "batch",
        preempt_exit_code: int | None = None,
        start_method: StartMethod | None = None,
        stream_timeout: float | None = None,
        prefetch_to_device: bool = True,
        run: Run | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        check_choice("on_incorrect_config", on_incorrect_config, Policy)
        for name in unknown:
            _refuse_unknown(name, on_incorrect_config)
        check_choice("on_empty_stream", on_empty_stream, Policy)
        check_choice("on_interrupt", on_interrupt, InterruptPolicy)
        reading = Reading(buffer, workers, start_method, stream_timeout, self._get_prefetch)
        if preempt_exit_code is not None:
            check_exit_status("preempt_exit_code", preempt_exit_code)
        for argument, value in (("fixed_batch_size", fixed_batch_size), ("fixed_epoch_size", fixed_epoch_size)):
            if value is not None:
                check_count(argument, value, minimum=1)
        self.model = model
        self.dataset = dataset
        self.hooks = tuple(hooks)
        self.run = run
        self.seed = seed
        self.train_stream_name = train_stream_name
        self.outcome: Outcome | None = None
        self.training = False
        self.evaluating = False
        self._prefetches = prefetch_to_device and reading.ahead > 0
        self._prefetch: Prefetch | None = None
        self._streams = DatasetStreams(
            dataset,
            train_stream_name,
            extra_streams,
            reading=reading,
            fixed_epoch_size=fixed_epoch_size,
            seed=seed,
            interrupted=self._is_interrupted,
        )
        self.intervals = self._streams.intervals
        self._state = TrainingState(model, self.hooks, self._streams, run)
        self.on_empty_stream = on_empty_stream
        self.fixed_batch_size = fixed_batch_size
        self.fixed_epoch_size = fixed_epoch_size
        self._skip_zeroth_epoch = skip_zeroth_epoch
        self._on_interrupt = on_interrupt
        self._preempt_exit_code = preempt_exit_code
        self._interrupts = Interrupts(self._wake_stream)
        self._termination: TrainingTerminated | None = None
        self._is_ending = False  # whether the log says that a signal ends the training after this epoch
        self._profile: Profile = {}
        self._news = False  # a signal, a termination or a request for a checkpoint: looked at after each batch
        self._entered = False
        self.checks = BatchChecks(model, self.hooks, on_empty_batch, on_unused_sources)
        self._checkpointing = Checkpointing(
            run.checkpoints if run else None,
            lambda: self._state.stage(self._checkpointing.names),
            self._take_notice,
            partial(run.add_to_trace, has_checkpoints=True) if run else lambda: None,
        )
        self._current: StreamWrapper | None = None
        self._draws = Draws()
        self._failed_call: tuple[str, int] | None = None  # the event that raised, and the index of its listener
        self.capsule: Path | None = None
        """Where the batch that made the training fail is kept."""
        self._listeners = self._find_listeners()
        for hook in self.hooks:
            hook.register_mainloop(main_loop=self)
        self.notify("register_mainloop", main_loop=self)

    @property
    def training_epochs_done(self) -> int:
        """How many training epochs are complete."""
        return self._state.epochs_done

    @property
    def iterations_done(self) -> int:
        """How many batches of training streams the model has run on."""
        return self._state.iterations_done

    @property
    def extra_streams(self) -> list[str]:
        """Names of the streams that are evaluated after the train stream; that itself is `train_eval` there."""
        return list(self.intervals)

    @property
    def dataset_streams(self) -> list[str]:
        """Names of the dataset's streams that are run, the train stream first."""
        return list(dict.fromkeys([self.train_stream_name, *map(self._streams.source_of, self.intervals)]))

    @property
    def stream_name(self) -> str | None:
        """The name of the stream whose batches are run at the moment."""
        return self._current.name if self._current is not None else None

    @property
    def batch_length(self) -> int:
        """How many examples the current batch has."""
        return self.checks.batch_length

    @property
    def epoch_seconds(self) -> float:
        """How long the current epoch has taken so far in this process, evaluations included."""
        return perf_counter() - self._epoch_began

    def request_checkpoint(self, name: str, on_failure: Policy = "error", instead_of: InsteadOf = ()) -> None:
        """Ask for a checkpoint, which is saved when the event is over for all hooks.

        In an evaluation, and in the `before_epoch` of an epoch that is resumed in its middle, do nothing.

        Args:
            name: the name it gets, such as `latest`; an older checkpoint loses it.
            on_failure: what to do when it cannot be saved: `error`, `warn` or `ignore`.
            instead_of: names that are given up when it is saved, or a function that returns them, which is called with
                all names that there are then, this one included. A checkpoint that loses its last name is deleted.

        Raises:
            HookError: the loop has no run directory.
        """
        if not (self.evaluating or self._state.begins_again):
            self._checkpointing.request(name, on_failure, instead_of)
            self._news = True

    def wait_for_checkpoints(self) -> None:
        """Return when what was requested before this event is on disk, for a hook that does something with it.

        Raises:
            StorageError: it could not be saved, and it was requested that way.
        """
        self._checkpointing.wait()

    def start_from(self, epochs_done: int, iterations_done: int) -> None:
        """Count on from where a model that was loaded has come to."""
        self._state.start_from(epochs_done, iterations_done)

    def restore(self, place: Path) -> Path:
        """Load a checkpoint: weights and state of the model, hooks, counters, positions of the streams.

        Random states follow when the run continues, after `before_training`. When the checkpoint lies in the middle of
        an epoch, `before_epoch` is called first, under the random states with which that epoch began, and the
        checkpoint is loaded a second time.

        Args:
            place: the directory of the checkpoint, or its name's link; the directory must be there until then.

        Returns:
            Where the checkpoint lies now: a directory under a name, as in a copy that followed links, is put where
            checkpoints lie.

        Raises:
            StateError: it does not fit the model, the hooks or the streams.
            StorageError: it cannot be read.
        """
        place = place.resolve()
        self._state.load(place)
        place = self._checkpointing.go_on_from(place, *self._state.point, self._state.names)
        self._state.is_now_in(place)
        return place

    def get_stream(self, name: str) -> StreamWrapper:
        """Return the wrapper of a stream, made when it is first asked for.

        Raises:
            AttributeError: the dataset has no method `<name>_stream`.
        """
        return self._streams.get(name, train=name == self.train_stream_name)

    def change_hooks(self, hooks: Iterable[AbstractHook]) -> None:
        """Take other hooks before the training begins; those that are new to the loop are registered.

        Raises:
            HookError: a new one is registered elsewhere.
        """
        before, self.hooks = self.hooks, tuple(hooks)
        self._state.hooks = self.checks.hooks = self.hooks
        for hook in self.hooks:
            if not any(hook is other for other in before):
                hook.register_mainloop(main_loop=self)
        self._listeners = self._find_listeners()

    def check_hooks(self, *, any_stream: bool = False) -> None:
        """Check that what hooks read of the epoch's data is written by a hook before them, in a stream that is run.

        Where the loop will train, also check that no two hooks save under one name.

        Args:
            any_stream: the streams that will be run are not known, as for an evaluation: look only at variables that
                are monitored without a stream, and not at the model, which reads after training epochs.

        Raises:
            HookError: a hook monitors what is not there, or two save under one name; the message says what to do.
        """
        if any_stream:
            check_monitors(self.hooks, None)
        else:
            check_saved_names(self.hooks)
            check_monitors([*self.hooks, self.model], [self.train_stream_name, *self.extra_streams])

    def run_training(self) -> Outcome:
        """Train until a hook or a signal ends it.

        Returns:
            How it ended.

        Raises:
            BaseException: what made it fail, after `on_error` and `after_training` of every hook.
        """
        state, streams = self._state, self._streams
        self.check_hooks()
        for name in self.dataset_streams:
            stream_function(self.dataset, name)
        with self:
            warn_of_no_end(self.hooks)
            self._end_if_due()
            if self.run is not None:
                state.encoded()  # what cannot be saved is found before the first batch
            self._go_on()
            if state.phase is Phase.BEFORE and not self._skip_zeroth_epoch:
                self._run_epoch([], [streams.get(self.train_stream_name, train=False), *streams.due(0)], 0)
            while True:
                train = streams.get(self.train_stream_name, train=True)
                self._run_epoch([train], streams.due(state.epochs_done + 1), state.epochs_done + 1)
        self.close()
        return cast(Outcome, self.outcome)

    def run_evaluation(self, stream_name: str) -> EpochData:
        """Evaluate the model on one pass of a stream; hooks get all events, but cannot end it or save checkpoints.

        Returns:
            What the hooks wrote of the stream.

        Raises:
            Interrupted: a signal ended it.
            BaseException: what made it fail, after `on_error` and `after_training` of every hook.
        """
        self.evaluating = True
        epoch_data: EpochData = {}
        try:
            with nullcontext() if self._entered else self:
                epoch_data = self._run_epoch([], [self._streams.get(stream_name, train=False)], 0)
            self._interrupts.raise_if_any()  # one that ended the block ended there
        finally:
            self.evaluating = False
        return epoch_data

    def epoch(self, train_streams: Sequence[StreamLike] = (), eval_streams: Sequence[StreamLike] = ()) -> EpochData:
        """Run one epoch by hand, inside a `with` block of the main loop.

        Args:
            train_streams: streams to learn from, by name, as wrappers, or any iterables of batches.
            eval_streams: streams to evaluate after them, likewise.

        Returns:
            What the hooks wrote: stream -> variable -> a number or a mapping aggregation -> number.

        Raises:
            UsageError: two streams have the same name, or the loop is not entered (a `ValueError`).
            TrainingTerminated: a hook or a signal ends the training.
        """
        if not self._entered:
            raise UsageError("an epoch runs inside `with main_loop:`, which calls before_training and after_training")
        self._end_if_due()
        self._go_on()
        resolve = self._streams.resolve
        train = [resolve(stream, f"unnamed_train_{i}", train=True) for i, stream in enumerate(train_streams)]
        evaluated = [resolve(stream, f"unnamed_eval_{i}", train=False) for i, stream in enumerate(eval_streams)]
        return self._run_epoch(train, evaluated, self._state.epochs_done + bool(train))

    def notify(self, event: str, **arguments: Any) -> None:
        """Call an event of all hooks that listen to it, then of the model; models call it for their update events.

        Raises:
            TrainingTerminated: hooks ended the training; all of them got the event.
        """
        ended: list[TrainingTerminated] = []
        for call in self._listeners[event]:
            try:
                call(**arguments)
            except TrainingTerminated as error:
                ended.append(error)
            except BaseException:
                self._failed_call = event, self._listeners[event].index(call)
                raise
        if ended and not (self.evaluating or self._state.begins_again):
            reasons = "; ".join(dict.fromkeys(error.reason for error in ended))
            termination = ended[0] if len(ended) == 1 else TrainingTerminated(reasons)
            if event in _DEFERRED:
                self._termination = self._termination or termination
                self._news = True
            else:
                raise termination

    def materialise(self, model: AbstractModel | None = None, *, may_fail: bool = False) -> None:
        """Show a lazy model the first batch of an evaluation pass of the train stream; one that was loaded needs none.

        Hooks that may change batches get `before_batch`. The pass leaves no traces: a stream with a state is put back
        into that. A dataset without that stream is for epochs by hand, whose first batch the model takes.

        Args:
            model: the model; None for that of the loop.
            may_fail: leave the model lazy when a hook or the model cannot use the batch yet.

        Raises:
            ArgumentError: the stream is one iterator, from which the training would miss the batch.
        """
        name = self.train_stream_name
        model = self.model if model is None else model
        if not model.is_lazy or name not in stream_names(self.dataset):
            return
        changers = [each for each in (*self.hooks, model) if may_change_batches(each)]
        check = self.checks.begin(name, ", ".join(self._changers))
        with preserved_randomness(), NamedWhenSlow("reading the first batch, for the shapes of a lazy module"):
            seed_everything(self.seed, "evaluation", name)
            with self._first_batches(name) as batches:
                for batch in batches:
                    changed = dict(batch)
                    length = check(batch)
                    if length == 0 or self.fixed_batch_size not in (None, length):
                        continue
                    with suppress(*([Exception] if may_fail else [])):
                        for each in changers:
                            call = listener(each, "before_batch", AbstractModel if each is model else AbstractHook)
                            if call is not None:
                                call(stream_name=name, batch=changed)
                        if changers and self.checks.check_changed(changed) == 0:
                            continue
                        model.materialise(changed)
                    break

    @contextmanager
    def _first_batches(self, name: str) -> Iterator[Iterator[Batch]]:
        """Begin an evaluation pass over a stream; at the end of the block the stream is as it was."""
        context = StreamContext(name, seed=self.seed, epoch=0)
        stream = open_stream(self.dataset, name, context)
        before = copy.deepcopy(stream.state_dict()) if is_stateful(stream) else None
        batches = iter(stream)
        if before is None and batches is stream and open_stream(self.dataset, name, context) is stream:
            raise ArgumentError(
                "module",
                f"stream {name!r} returns the same iterator for each pass, so that the training would miss the batch "
                "that gives a lazy module its shapes; return a new iterator for each pass, give the iterator "
                "state_dict() and load_state_dict(), or give the module its sizes",
            )
        try:
            yield itertools.islice(batches, _MOST_UNUSABLE)
        finally:
            close = getattr(batches, "close", None)
            if close is not None and (before is None or batches is not stream):
                close()
            if before is not None:
                stream.load_state_dict(before)

    def listens(self, event: str) -> bool:
        """Tell whether anything listens to an event."""
        return bool(self._listeners[event])

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream; a model that updates itself calls it before.

        Raises:
            StreamError: an output has the name of a source, or a hook reads a variable that is neither.
        """
        self.checks.check_outputs(outputs)

    def close(self) -> None:
        """End the passes that were begun; positions are kept."""
        self._streams.close()

    def __enter__(self) -> MainLoop:
        """Open the log of the run, install the signal handlers and call `before_training` of the hooks."""
        if self._entered:
            raise UsageError("the main loop is entered already")
        self.check_hooks(any_stream=True)
        if self.run is not None:
            self.saves = True
            self.run.open_log()
        self._entered = True
        self._termination = None
        self._is_ending = False
        self._silence = NamedWhenSlow("reading and running the first batch")
        self.outcome = None
        try:
            self._interrupts.install()
            self.materialise(may_fail=bool(self._changers))
            self._prefetch = self._find_prefetch()
            self.notify("before_training")
            self.materialise()  # which may need the before_training of the hooks that change batches
        except TrainingTerminated as error:
            self._termination = error
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Save what is to be saved, call `after_training` of every hook, restore the signal handlers, close the log.

        A `TrainingTerminated`, a signal's too, ends here.
        """
        failure = error
        try:
            failure = self._stop(error)
            if failure is None and self.outcome is not None and not self.evaluating:
                _LOG.info("%s", ": ".join(filter(None, (self.outcome.status, self.outcome.reason))))
        except BaseException as last_error:
            failure = last_error
            raise
        finally:
            self._entered = self.training = False
            self._interrupts.restore()
            if self.run is not None:
                self.run.close_log(failure)
        if failure is not None and failure is not error:
            raise failure
        return failure is None

    def _stop(self, error: BaseException | None) -> BaseException | None:
        """End the session; return what made it fail, if anything did."""
        failure = None if isinstance(error, TrainingTerminated) else error
        self._streams.stop()
        try:
            if failure is None and not self.evaluating:
                self._checkpointing.save_latest(*self._state.point)
                self._state.loss.look(self._state.epochs_done + 1, self._state.iterations_done)
            else:
                self._checkpointing.wait()
        except BaseException as saving_error:
            if failure is not None:
                _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
            failure = failure or saving_error
        self._checkpointing.close()
        if not isinstance(failure, TrainingAborted):  # the guard has said it
            self._state.loss.warn()
        self.outcome = Outcome.of(failure or error, None if self.evaluating else self._preempt_exit_code)
        self.outcome = replace(self.outcome, warning=self._state.loss.warning)
        if failure is not None:
            self._call_all("on_error", error=failure)
        hook_error = self._call_all("after_training", success=failure is None)
        if failure is None and hook_error is not None:
            failure = hook_error
            self.outcome = Outcome.of(failure)
        if self.run is not None:
            self.run.end(self.outcome.status, self.outcome.exit_status, self.outcome.reason, self.iterations_done)
        return failure

    def _call_all(self, event: str, **arguments: Any) -> BaseException | None:
        """Call an event of everyone, whatever the others do; return the first error, log the others."""
        first: BaseException | None = None
        for call in self._listeners[event]:
            try:
                call(**arguments)
            except TrainingTerminated:
                _LOG.debug("a termination in %s has no effect", event)
            except BaseException as error:
                if first is not None or event == "on_error":
                    _LOG.exception("a hook failed in %s", event)
                first = first or error
        return first if event != "on_error" else None

    def _go_on(self) -> None:
        """Bring everything to the checkpoint that was restored, if there is one."""
        self._state.go_on(lambda epoch_id: self.notify("before_epoch", epoch_id=epoch_id))

    def _run_epoch(self, train: list[StreamWrapper], evaluated: list[StreamWrapper], epoch_id: int) -> EpochData:
        state = self._state
        names = [stream.name for stream in (*train, *evaluated)]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"two streams of the epoch are named {name!r}")
        began = self._epoch_began = perf_counter()
        self._profile = {}
        epoch_data: EpochData = {name: {} for name in names}
        if not (train or self.evaluating):
            state.keep_copy()
        continued = bool(train) and state.is_in_epoch
        if not continued:
            if train:
                state.begin_epoch()
            self.notify("before_epoch", epoch_id=epoch_id)
        if train and state.phase is not Phase.EVALUATE:
            state.phase = Phase.TRAIN
            for stream in train:
                is_last = stream is train[-1]
                self._run_stream(stream, train=True, is_last=is_last, may_be_empty=continued)
        if train:
            state.phase = Phase.EVALUATE
            if evaluated:
                state.keep_copy()
            self._end_if_due(in_epoch=True)
        for stream in evaluated:
            with preserved_randomness():
                seed_everything(self.seed, "evaluation", stream.name)
                self._run_stream(stream, train=False)
        if train:
            state.epochs_done += 1
        state.drop_copy()
        if not self.evaluating:
            state.phase = Phase.BETWEEN
        hooks_began = perf_counter()
        ended: TrainingTerminated | None = None
        try:
            self.notify("after_epoch", epoch_id=epoch_id, epoch_data=epoch_data)
        except TrainingTerminated as error:
            ended = error
        self._profile["after_epoch_hooks"] = array("d", [perf_counter() - hooks_began])
        try:
            self.notify("after_epoch_profile", epoch_id=epoch_id, profile=self._profile, streams=names)
        except TrainingTerminated as error:
            ended = ended or error
        self._record_epoch(perf_counter() - began, epoch_data, [stream.name for stream in train])
        self._request_by_signal()
        self._checkpointing.save_requested(*state.point)
        if ended is not None:
            raise ended
        self._end_if_due()
        return epoch_data

    def _record_epoch(self, seconds: float, epoch_data: EpochData, trained: list[str]) -> None:
        """Look at the losses of the streams that were trained on, and write the epoch into the run's metrics."""
        state = self._state
        for name in trained:
            state.loss.look_at_mean(name, epoch_data.get(name, {}), state.epochs_done, state.iterations_done)
        state.loss.warn()
        if self.run is None:
            return
        if trained and self._checkpointing.newest is None:
            self._checkpointing.wait()  # a run that has recorded an epoch and has no checkpoint is one that lost it
        self.run.record_epoch(state.epochs_done, state.iterations_done, seconds, epoch_data)

    def _run_stream(
        self, stream: StreamWrapper, *, train: bool, is_last: bool = False, may_be_empty: bool = False
    ) -> None:
        """Run the model on the batches of one epoch of a stream, and tell the hooks that it is over."""
        self.training = train
        self._failed_call = None
        self._current = stream.__enter__()  # a train stream reads ahead during the evaluations too, see `_stop`
        try:
            if self._silence is not None:
                self._silence.__enter__()
            batches_run = self._run_batches(stream, train)
        finally:
            self._end_silence()
            self.training = False
            self._current = None
            if not (train and stream is self._streams.trained.get(stream.name)):  # `_stop` ends the others
                stream.__exit__(None, None, None)
        if not (train and stream.epoch_ended):
            self._end_if_due(in_epoch=True)  # otherwise a resume would begin the next pass in this epoch
        if batches_run == 0 and not may_be_empty:
            self.checks.report_empty_stream(stream.name, self.on_empty_stream)
        if train and is_last:
            self._state.phase = Phase.EVALUATE
            self._state.loss.look(self._state.epochs_done + 1, self._state.iterations_done)
        self.notify("after_stream", stream_name=stream.name)

    def _end_silence(self) -> None:
        """Take note that the first batch of the session is there, or will not come."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _run_batches(self, stream: StreamWrapper, train: bool) -> int:
        """Run the model on the batches of a stream, return on how many. Each batch pays for every line in the loop."""
        name = stream.name
        seconds = self._profile.setdefault(f"eval_batch_{name}", array("d"))
        hook_seconds = self._profile.setdefault(f"after_batch_hooks_{name}", array("d"))
        stream.profile = self._profile
        checks, run, state, clock = self.checks, self.model.run, self._state, perf_counter
        check_batch, fixed_batch_size = checks.begin(name, ", ".join(self._changers)), self.fixed_batch_size
        announce: Callable[..., Batch | None] | None = None
        if self._listeners["before_batch"]:
            announce = self._let_change if self._changers else partial(self.notify, "before_batch")
        report = partial(self.notify, "after_batch") if self._listeners["after_batch"] else None
        note_randomness = self._draws.take_all if self.run is not None else None
        handled: Batch | None = None
        batches_run = 0
        try:
            for batch in stream:
                length = check_batch(batch)
                if length == 0:
                    continue
                if fixed_batch_size is not None and length != fixed_batch_size:
                    _LOG.debug("stream %r: dropped a batch of %d examples: %s", name, length, ", ".join(batch))
                    continue
                handled = batch
                if note_randomness is not None:
                    note_randomness()
                if announce is not None and (changed := announce(stream_name=name, batch=batch)) is not None:
                    handled = None
                    if checks.check_changed(changed) == 0:
                        continue
                    handled = batch = changed  # noqa: PLW2901 - the stream keeps its own
                began = clock()
                outputs = run(batch, train, name)
                seconds.append(clock() - began)
                if batches_run == 0:
                    self._end_silence()
                    checks.check_outputs(outputs)
                    note_randomness = note_randomness and self._draws.watch(of_whole_steps=not self._changers)
                batches_run += 1
                if train:
                    state.iterations_done += 1
                if report is not None:
                    began = clock()
                    report(stream_name=name, batch_data={**batch, **outputs})
                    hook_seconds.append(clock() - began)
                handled = None
                if self._news and self._handle_news():
                    break
        except BaseException as error:  # the user's code may also have called sys.exit
            if handled is not None and self.run is not None:
                self._keep_failure(error, handled, stream, train)
            raise
        return batches_run

    def _keep_failure(self, error: BaseException, batch: Batch, stream: StreamWrapper, train: bool) -> None:
        """Write a capsule of the batch that was being handled."""
        event, index = self._failed_call or (None, 0)
        if event == "before_batch" and self._offered is not None:
            batch = self._offered
        listening = [hook for hook in self.hooks if event is not None and listener(hook, event) is not None]
        hook = listening[index] if index < len(listening) else None
        step = Step(
            stream=stream.name,
            train=train,
            evaluating=self.evaluating,
            epoch=self._state.epochs_done,
            iteration=self._state.iterations_done - (train and event == "after_batch"),
            pass_number=stream.position.pass_number,
            batch=stream.position.batch - 1,
            event=event,
            hook=self.hooks.index(hook) if hook is not None else None,
            hook_class=type(hook).__qualname__ if hook is not None else None,
        )
        assert self.run is not None  # what the caller looked at
        try:
            self.wait_for_checkpoints()
        except Exception as saving_error:  # the failure of the step is what the training ends with
            _LOG.warning("the last checkpoint was not saved: %s", reason_of(saving_error))
        self.capsule = keep_failure(
            self.run.directory,
            error,
            step,
            batch,
            self.model,
            censor=self.run.censor,
            draws=self._draws,
            hook=hook,
            checkpoint=self._checkpointing.newest,
        )

    def _handle_news(self) -> bool:
        """Save what was requested during a batch; return whether the stream ends here."""
        self._news = False
        ends = self._is_interrupted() or self._termination is not None
        if not ends:
            if self._interrupts.signal is not None and not self._is_ending:
                self._is_ending = True
                name = signal.Signals(self._interrupts.signal).name
                _LOG.info("%s: the training ends after this epoch; another one ends it at once", name)
            self._request_by_signal()
            self._checkpointing.save_requested(*self._state.point)
        return ends

    def _request_by_signal(self) -> None:
        """Ask for the checkpoint that a signal wants."""
        if self._interrupts.wants_checkpoint:
            self._interrupts.wants_checkpoint = False
            if self.run is None or self.evaluating:
                _LOG.warning("SIGUSR1: there is no training to save a checkpoint of")
                return
            _LOG.info("SIGUSR1: saving a checkpoint at iteration %d", self._state.iterations_done)
            self._checkpointing.request_latest()

    def _is_interrupted(self) -> bool:
        """Tell whether a signal ends the epoch where it is."""
        return self._interrupts.signal is not None and (self._on_interrupt == "batch" or self.evaluating)

    def _take_notice(self) -> None:
        """Let the loop look after the batch at what happened elsewhere."""
        self._news = True

    def _end_if_due(self, *, in_epoch: bool = False) -> None:
        """Raise what ends the training: a signal, or a termination that waited for the end of an update."""
        if not in_epoch or self._is_interrupted():
            self._interrupts.raise_if_any()
        if self._termination is not None and not self.evaluating:
            raise self._termination

    def _find_listeners(self) -> dict[str, list[Callable[..., Any]]]:
        """Return what to call at each event: the hooks that override it, in order, then the model."""
        listeners: dict[str, list[Callable[..., Any]]] = {}
        self._offered: Batch | None = None  # a batch as the hook got it that was the last to change it
        self._changers = [type(each).__name__ for each in (*self.hooks, self.model) if may_change_batches(each)]
        for event in EVENTS:
            hooks = [] if event == "register_mainloop" else [listener(hook, event) for hook in self.hooks]
            found = [*hooks, listener(self.model, event, AbstractModel)]
            listeners[event] = [call for call in found if call is not None]
        if self._changers:
            listeners["before_batch"] = [partial(self._offer, call) for call in listeners["before_batch"]]
        return listeners

    def _let_change(self, stream_name: str, batch: Batch) -> Batch:
        """Return a copy of a batch on which all who may change it were called."""
        changed = dict(batch)
        self.notify("before_batch", stream_name=stream_name, batch=changed)
        if self.run is not None:
            self._draws.before_model()
        return changed

    def _offer(self, call: Callable[..., Any], stream_name: str, batch: Batch) -> None:
        """Call `before_batch` of a hook, and keep what it takes to do that again."""
        self._offered = dict(batch)
        if self.run is not None:
            self._draws.before_hook()
        call(stream_name=stream_name, batch=batch)

    def _get_prefetch(self) -> Prefetch | None:
        return self._prefetch

    def _find_prefetch(self) -> Prefetch | None:
        """Return what prepares batches, None when there is nothing or a hook may change them afterwards."""
        prefetch = self.model.prefetcher() if self._prefetches else None
        if prefetch is not None and self._changers:
            _LOG.info(
                "batches are not copied to the device ahead: %s.before_batch may change them (a hook that only looks "
                "says so with `changes_batches = False`)",
                self._changers[0],
            )
            return None
        return prefetch

    def _wake_stream(self) -> None:
        """Let the loop notice a signal; called by the handler."""
        self._news = True
        if self._current is not None:
            self._current.wake()


def _refuse_unknown(name: str, policy: Policy) -> None:
    known = [each for each in MainLoop.__init__.__annotations__ if each not in ("unknown", "return")]
    message = f"unknown argument of the main loop{did_you_mean(name, known)}"
    if policy == "error":
        raise ArgumentError(name, message)
    if policy == "warn":
        _LOG.warning("%s: %s", name, message)
