"""The contract of hooks: the events in the order of the loop, what a hook may ask the loop, how a hook ends a run.

    register_mainloop(main_loop)                            # the loop is built
    before_training()                                       # on resume: states are loaded, random states are not yet
    for epoch_id in 0, 1, 2, ...:                           # epoch 0 only evaluates the train and the extra streams
        before_epoch(epoch_id)
        for stream_name in train stream, extra streams that are due:
            before_evaluation()                             # once an epoch, before the streams that are evaluated
            before_stream(stream_name)                      # not again if the stream is resumed in its middle
            for batch in stream:
                before_batch(stream_name, batch)            # a hook may change the batch
                model.run(batch):                           # in the train stream, once for each update:
                    before_update(model, optimizer)         # the gradients are complete
                    after_update(model, optimizer)          # the optimizer has made its step
                after_batch(stream_name, batch_data)        # the sources and outputs of the batch
                # then: save the requested checkpoints
            after_stream(stream_name)
        after_epoch(epoch_id, epoch_data)                   # hooks write and read the statistics of the epoch
        after_epoch_profile(epoch_id, profile, streams)     # what the loop has timed during the epoch
        # then: write the line of `metrics.jsonl`, save the requested checkpoints, end if a hook or a signal asks for it
    after_checkpoint(name, directory)                       # between batches or epochs: a checkpoint has been committed
    on_error(error)                                         # only if the run has failed
    after_training(success)                                 # always

At each event, the hooks are called in the order of the config. The model, which may define events too, is called last.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from emrun.base.types import Batch, EpochData, Horizon, InsteadOf, Names, Policy, Profile, evaluated
from emrun.model import AbstractModel
from emrun.same_hooks import Arguments, noted
from emrun.shown import Shown


class TrainingTerminated(Exception):
    """Raised by a hook to end the training successfully.

    The other hooks still get the current event. Then a checkpoint is saved and the training ends.

    Args:
        reason: why.
        alike: whether a hook that runs on every rank raises this on all of them at the same point, as limits that are
            counted do. Otherwise, such as with a limit of time, the ranks agree first, and the run ends a little later.
        limit: whether a planned limit was reached, as those of `StopAfter`. If this was the last batch of an epoch, the
            run then ends after the epoch; elsewhere the extra streams are evaluated once more at the end.
    """

    def __init__(self, reason: str = "a hook ended the training", *, alike: bool = True, limit: bool = False) -> None:
        self.reason = reason
        self.alike = alike
        self.limit = limit
        super().__init__(reason)


class TrainingAborted(Exception):
    """Raised by a hook to end the training as failed, with exit status 3 and without a traceback."""

    exit_status = 3

    def __init__(self, reason: str = "a hook aborted the training") -> None:
        self.reason = reason
        super().__init__(reason)


class UpdateSkipped(Exception):
    """Raised by a hook in `before_update` to skip the update.

    The other hooks still get the event. Then the gradients are dropped: the optimizer makes no step, and there is no
    `after_update`. The update counts for limits and schedules, and for `skipped_updates` in the data of the epoch.

    Args:
        reason: why it is skipped.
        keep: what `state_dict` of the hook was before the event, to keep the step for `emrun replay`: the batch, the
            weights and the random states are saved below `failures` in the run directory. The replay calls the hook
            with this state. Default: nothing is kept.
    """

    def __init__(self, reason: str = "a hook skipped it", keep: Mapping[str, Any] | None = None) -> None:
        self.reason = reason
        self.keep = keep
        super().__init__(reason)


class Loop(Protocol):
    """What hooks and models may use of the main loop they are registered in; `emrun.MainLoop` implements it."""

    @property
    def model(self) -> AbstractModel:
        """The model."""

    @property
    def dataset(self) -> Any:
        """The dataset."""

    @property
    def hooks(self) -> Sequence[AbstractHook]:
        """The hooks, in the order in which they are called."""

    @property
    def train_stream_name(self) -> str:
        """The name of the stream that the model is trained on."""

    @property
    def extra_streams(self) -> list[str]:
        """Names of the streams that are evaluated after the train stream. The train stream is `train_eval` here."""

    @property
    def fixed_epoch_size(self) -> int | None:
        """Number of batches of the train stream in an epoch; None for a whole pass."""

    @property
    def reading_ahead(self) -> Mapping[str, int]:
        """How streams are read ahead: the settings `buffer` and `workers` of the config; 0 for none."""

    @property
    def stream_sizes(self) -> Mapping[str, int]:
        """Stream -> how many batches of it an epoch has at most, for streams that the config limits."""

    @property
    def training(self) -> bool:
        """Whether the model is trained on the current batches, rather than evaluated."""

    @property
    def evaluating(self) -> bool:
        """Whether the loop only evaluates, as in `emrun eval`."""

    @property
    def at_end(self) -> bool:
        """Whether the extra streams are evaluated once more, because a limit has ended the training since.

        Hooks that count epochs or evaluations leave this one out: a longer run does not have it.
        """
        ...

    @property
    def training_epochs_done(self) -> int:
        """Number of complete training epochs."""

    @property
    def iterations_done(self) -> int:
        """Number of batches that the model was trained on; the current batch counts from `after_batch` on."""

    @property
    def updates_done(self) -> int:
        """Number of updates of the weights. With `accumulate`, an update has several batches; it counts if skipped."""

    @property
    def stream_name(self) -> str | None:
        """The name of the current stream; None between streams."""

    @property
    def batch_length(self) -> int:
        """Number of examples in the current batch."""

    @property
    def epoch_seconds(self) -> float:
        """Seconds since the current epoch began in this process, evaluations included."""

    @property
    def limits(self) -> Mapping[str, int]:
        """What hooks end the training at, see `AbstractHook.limits`; the smallest one of each unit."""

    @property
    def horizon(self) -> Horizon:
        """How many updates the run will make, as far as this is known."""

    @property
    def passes_done(self) -> int:
        """Number of complete passes of the train stream; these are epochs, unless there is a `fixed_epoch_size`."""

    @property
    def outcome(self) -> Any:
        """How the run ended, in `on_error` and `after_training`: `status` is `finished`, `interrupted` or `failed`, and
        `reason` says why in one line. None before."""

    @property
    def has_run(self) -> bool:
        """Whether there is a run directory for checkpoints and metrics."""

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` so far, one for each epoch; empty without a run directory."""

    @property
    def records_steps(self) -> bool:
        """Whether there is a step record: a run directory, and `main_loop.record_steps` is not 0."""

    @property
    def last_step(self) -> tuple[int, Mapping[str, float]] | None:
        """The last iteration in the step record, and its values: `loss`, `learning_rate`, ..., what hooks recorded.

        In `after_batch`, this is the iteration before the current one; in `after_stream`, the last one of the stream.
        This waits for the device. None if there is none, e.g. after a resume.
        """

    def record(self, name: str, value: Any) -> None:
        """Add a value of the current iteration, such as the norm of the gradients, to the step record `steps.jsonl`.

        To be called in `before_batch`, `before_update`, `after_update` or `after_batch`. The last value counts. The
        value is ignored in batches that are evaluated, in `emrun eval`, without a run directory, and in iterations that
        are not recorded (`main_loop.record_steps`).

        Args:
            name: the name of the column.
            value: a number, or a tensor with one element, which is not read from its device before the chunk ends.

        Raises:
            HookError: this is called outside of the batches of a stream, the value is not a number, or the loop itself
                records something under the name.
        """

    @property
    def shown(self) -> Mapping[str, Shown]:
        """What hooks have shown since the epoch began, by name; to be read in `after_epoch_profile`."""

    def show(self, name: str, value: Shown) -> None:
        """Show a picture, a text or a histogram in the trackers that the config lists, e.g. `WriteTensorBoard`.

        To be called in `after_stream` of a stream that is evaluated, or in `after_epoch`; what is shown before the end
        of the train stream is lost if the run is interrupted in between.

        Args:
            name: the name, such as `valid/confusion`.
            value: a `Picture`, a `Text` or a `Histogram` of `emrun.shown`.

        Raises:
            TypeError: the value is something else.
        """

    def request_checkpoint(self, name: str, on_failure: Policy = "error", instead_of: InsteadOf = ()) -> None:
        """Request a checkpoint.

        The checkpoint is saved when all hooks have handled the current event: after the batch, or at the end of the
        epoch. In an evaluation, and in `before_epoch` of an epoch that is resumed in its middle, the request is
        ignored.

        Args:
            name: the name of the checkpoint, such as `latest`. An older checkpoint of this name loses the name.
            on_failure: what to do if the checkpoint cannot be saved: `error`, `warn` or `ignore`.
            instead_of: names to remove when the checkpoint is saved, or a function that returns them. The function is
                called with all names at that time, including `name`. A checkpoint without a name is deleted.

        Raises:
            HookError: the loop has no run directory.
        """

    def wait_for_checkpoints(self) -> None:
        """Wait until the checkpoints requested before this event are on disk, for a hook that reads or copies them.

        Raises:
            StorageError: a checkpoint that was requested with `on_failure="error"` could not be saved.
        """

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream, which the model does not run on.

        They are those of an evaluation of the stream, the same ones each time, after the `before_batch` of the hooks;
        of the train stream, at most `fixed_epoch_size`. The stream function must return a new iterator for each call.
        The training does not change: its position in the stream stays, and the random states are restored at the end.
        Until then, random numbers are those of an evaluation.

        Raises:
            TrainingTerminated: a signal ends the run.
        """

    def listens(self, event: str) -> bool:
        """Return whether any hook or the model listens to an event."""

    def notify(self, event: str, **arguments: Any) -> None:
        """Call an event of all hooks that listen to it, then of the model.

        A model calls this for `before_update` and `after_update`.

        Raises:
            TrainingTerminated: at least one hook ended the training. All hooks have got the event.
            UpdateSkipped: at least one hook skips the update, in `before_update`. All hooks have got the event.
        """

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream. A model calls this before its first update.

        Raises:
            StreamError: an output has the name of a source, or a hook reads a variable that is neither of the two.
        """


class _NotesNames:
    """Records the arguments of a hook, and which variables and statistics they name, before the constructor runs.

    This is not part of `AbstractHook`, because the signature of `AbstractHook` must be that of its constructor.
    """

    _named_by_arguments: tuple[tuple[str, str], ...] = ()  # (kind, name), see `_names_in`
    _noted_arguments: Arguments = {}  # noqa: RUF012 - it is replaced, not changed

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        new = super().__new__
        hook = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        given = list(_given(cls, args, kwargs))
        names = (each for _, hint, value in given for each in _names_in(hint, value))
        object.__setattr__(hook, "_named_by_arguments", tuple(dict.fromkeys(names)))
        object.__setattr__(
            hook, "_noted_arguments", {k: v for each in reversed(given) for k, v in noted(*each).items()}
        )
        return hook

    __new__.only_looks = True  # type: ignore[attr-defined]  # a hook takes what its constructor takes


class AbstractHook(_NotesNames):
    """Base class of hooks: the main loop calls their methods at its events.

        hooks:
          - my_hooks.PrintLoss: {every: 10}

    A hook overrides the methods of the events it listens to; all other events cost nothing. A method may leave out
    arguments that it does not need, because events are called by keyword. A hook that needs an event only in some
    configurations sets the method to None in the others, as in `self.after_batch = None`.

    A hook raises `TrainingTerminated` to end the training successfully and `TrainingAborted` to end it as failed. Any
    other exception is reported as a failure of the hook.

    Names of variables and statistics are checked before the training or with the first batch of a stream. This covers
    arguments annotated with `emrun.base.types.VariableName`, `EpochVariable` or `Address`, and `reads` and `monitors`.

    Args:
        model: the model of the run. emrun passes `model`, `dataset` and `output_dir` to each constructor that takes
            them, also by `**kwargs`: a hook may write `def __init__(self, limit, **kwargs)` and call
            `super().__init__(**kwargs)`. They become attributes of the same names.
        dataset: the dataset of the run.
        output_dir: the run directory, a `pathlib.Path`.
    """

    main_loop: Loop
    """The main loop; set by `register_mainloop`."""

    reads: Sequence[str] | None = None
    """Variables that this hook reads from the batches of every stream, checked with the first batch of each stream.
    None means not declared: if the hook gets the batches, it may read any source, so emrun reports none as unused. A
    hook of every rank that reads nothing, (), is also called on a rank that has no rows of the batch."""

    adds: Sequence[str] = ()
    """Variables that this hook adds to the data of a batch in `after_batch`: the hooks after it may read them."""

    writes: Sequence[str] = ()
    """What this hook adds to the epoch data: `variable` or `variable/aggregation`. Each hook that adds something must
    declare it."""

    monitors: Sequence[str] = ()
    """What this hook reads from the epoch data: `variable` (in any stream), `stream/variable` or
    `stream/variable/aggregation`. An earlier hook must write it."""

    saves: Sequence[str] = ()
    """Names of the checkpoints that only this hook saves; `epoch-*` stands for epoch-1, epoch-2, ... Two hooks that
    declare the same name are an error. Names that a hook requests (`main_loop.request_checkpoint`) but does not
    declare are not checked."""

    limits: Mapping[str, int] = {}
    """What this hook ends the training at: a number of `epochs`, `passes`, `updates` or `iterations`."""

    every_rank: bool = False
    """Whether the hook runs on every rank, on the share of its rank in each batch. Hooks that listen to `before_batch`
    (unless `changes_batches` is False), `before_update` or `after_update` run on every rank anyway. Other hooks run on
    rank 0: in `after_batch` they get the whole batch, which is collected for them, unless they leave out `batch_data`.
    A termination or a request for a checkpoint by a hook on every rank must be the same on all of them."""

    changes_batches: bool = True
    """Whether `before_batch` may change the batch. A hook that only looks at the batch sets this to False: then the
    loop need not copy the batch, and the model can copy it to the GPU ahead of its turn."""

    def __init__(self, model: Any = None, dataset: Any = None, output_dir: Any = None) -> None:
        self.model = model
        self.dataset = dataset
        self.output_dir = output_dir

    def register_mainloop(self, main_loop: Loop) -> None:
        """Called once, when the main loop is built. A hook that overrides this calls `super()` to get `main_loop`."""
        self.main_loop = main_loop

    def before_training(self) -> None:
        """Called once, when the main loop is entered; on resume, after `load_state_dict`."""

    def before_epoch(self, epoch_id: int) -> None:
        """Called before an epoch. `epoch_id` counts training epochs from 1; epoch 0 only evaluates.

        Also called when an epoch is resumed in its middle, so that what a hook sets up here is set up again. The random
        states are then those with which the epoch began. Afterwards, the weights and the states of the model and the
        hooks are loaded a second time. Anything else that this event changes must therefore depend on `epoch_id` alone.
        Requests for checkpoints and terminations have no effect in this call.
        """

    def before_evaluation(self) -> None:
        """Called before the evaluations of an epoch, after its train streams, also if no stream is evaluated.

        A run that is interrupted in its evaluations repeats them when it is resumed, and this event too: checkpoints of
        that time have the states of the hooks before this event.
        """

    def before_stream(self, stream_name: str) -> None:
        """Called before the first batch of a stream in an epoch.

        `main_loop.training` says whether the model is trained on the stream: the zeroth epoch evaluates all of them.
        When an epoch is resumed in the middle of its train stream, this is not called for this stream again: what it
        sets up must be in `state_dict`, or in `before_epoch`. Evaluations that were interrupted begin again.
        """

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Called before the model runs on a batch of any stream.

        A hook may replace, add and remove sources. `batch` is a copy of the stream's mapping, which all hooks change in
        their order and which the model then gets. The values belong to the stream: do not change them in place.
        """

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Called when the gradients of an update are complete, before the step of `optimizer`.

        A hook may raise `UpdateSkipped` to drop the gradients. With `precision: fp16`, the gradients are unscaled; if
        some are not finite, `model.is_skipping` is true, and the update will be skipped.
        """

    def after_update(self, model: Any, optimizer: Any) -> None:
        """Called after the step of `optimizer`, unless it was skipped; the gradients are not cleared yet."""

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Called after the model ran on a batch of any stream; `batch_data` holds the sources and the outputs.

        All hooks get the same mapping: the next hooks see what a hook adds or replaces.
        """

    def after_stream(self, stream_name: str) -> None:
        """Called after the last batch of a stream."""

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Called after the last stream of an epoch.

        `epoch_data[stream][variable]` is a number or a mapping aggregation -> number. All hooks get the same mapping:
        the next hooks see what a hook adds.
        """

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Called after `after_epoch` of all hooks; `profile` holds what the loop has timed in the epoch.

        The values are arrays of seconds, with an entry for each time something happened:

        - `read_batch_STREAM`: the wait for each batch of the stream,
        - `eval_batch_STREAM`: the model on each batch, with the hooks of `before_update` and `after_update`,
        - `after_batch_hooks_STREAM`, `after_epoch_hooks`: the hooks in these events,
        - `save_checkpoints`: the wait of the loop for checkpoints, also for those since the last profile,
        - `hook_CLASS`: the sum of a hook in all its events; `hooks_in_updates` and `hooks_in_checkpoints` are the parts
          that the time of the model and of the checkpoints includes.

        `batch_length_STREAM` has the number of examples of each batch.
        """

    def after_checkpoint(self, name: str, directory: Path) -> None:
        """Called when a checkpoint has been committed, once for each of its names.

        Checkpoints are written by a thread. The loop calls this event after the first batch or epoch that ends after
        the commit, before the next commit begins, and before `after_training`. Random states are restored afterwards.

        A hook must not change the training here, because the time of the commit differs from run to run. A process that
        is killed may not get to the call: a hook that copies checkpoints elsewhere compares both sides when it is
        resumed. An error ends the run as failed; the checkpoint stays. `directory` must not be changed, and is deleted
        when a later checkpoint takes its last name: a hook that reads it in another thread makes a copy with hard links
        first.
        """

    def on_error(self, error: BaseException) -> None:
        """Called when the training has failed, before `after_training`."""

    def after_training(self, success: bool) -> None:
        """Always called at the end; `success` is False if the training has failed."""

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add what the hooks of other ranks have collected, from their `state_dict`.

        Called on rank 0 of several, before `after_epoch` and when a run is resumed with another number of ranks, for
        hooks that override this.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold, as plain types and tensors, without constructor arguments."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Called twice when an epoch is resumed in its middle: it must set values, not add to them.
        """


EVENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(AbstractHook).items()
    if inspect.isfunction(method)
    and not name.startswith("_")
    and name not in ("merge", "state_dict", "load_state_dict")
}
"""The events, which are the other methods, and the arguments they are called with, by keyword."""


def _given(hook_class: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type hint and value of each argument of a constructor, and of its bases by *args, **kwargs."""
    constructors = dict.fromkeys(cls.__init__ for cls in hook_class.__mro__)  # type: ignore[misc]  # of each class
    for index, constructor in enumerate(constructors):
        try:
            bound = inspect.signature(constructor).bind_partial(None, *args, **kwargs)
        except (TypeError, ValueError):  # the constructor reports a wrong call; some signatures cannot be read
            return
        if index == 0:
            bound.apply_defaults()
        args, kwargs = (), {}
        plain = inspect.unwrap(constructor)
        annotations, names = getattr(plain, "__annotations__", {}), getattr(plain, "__globals__", {})
        for name, value in list(bound.arguments.items())[1:]:  # without self
            parameter = bound.signature.parameters[name]
            pairs = [(name, value)]
            if parameter.kind is parameter.VAR_POSITIONAL:
                args, pairs = value, [(f"{name}{number}", each) for number, each in enumerate(value)]
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs, pairs = value, list(value.items())
            hint = evaluated(annotations.get(name, Any), names)
            yield from ((each, hint, given) for each, given in pairs)
        if not (args or kwargs):
            return


def _names_in(hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) for each string in a value that its type hint marks as a name: `emrun.base.types.Names`."""
    inner = typing.get_args(hint)
    kind = typing.get_origin(hint)
    if kind is typing.Annotated:
        marks = [each for each in hint.__metadata__ if isinstance(each, Names)]
        yield from ((mark.what, value) for mark in marks if isinstance(value, str))
        yield from _names_in(inner[0], value)
    elif kind in (typing.Union, types.UnionType):
        for each in inner:
            yield from _names_in(each, value)
    elif isinstance(value, Mapping) and len(inner) == 2:
        for key, child in value.items():
            yield from _names_in(inner[0], key)
            yield from _names_in(inner[1], child)
    elif (
        isinstance(value, abc.Sequence | abc.Set) and not isinstance(value, str) and (len(inner) == 1 or kind is tuple)
    ):
        fixed = kind is tuple and inner[-1:] != (Ellipsis,)
        for each, child in zip(inner if fixed else [inner[0]] * len(value), value, strict=False):
            yield from _names_in(each, child)
