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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from emrun.base.censor import hidden
from emrun.base.errors import HookError
from emrun.base.types import Batch, EpochData, Horizon, InsteadOf, Names, Policy, Profile, evaluated
from emrun.base.wording import meant_of
from emrun.model import AbstractModel
from emrun.shown import Shown, Text


class TrainingTerminated(Exception):
    """Raised by a hook to end the training successfully.

    The other hooks still get the current event. Then a checkpoint is saved and the training ends.

    Args:
        reason: why.
        alike: whether a hook that runs on every rank raises this on all of them at the same point, as limits that are
            counted do. Otherwise, such as with a limit of time, the ranks agree first: if it is raised on any of them,
            all end a little later. Default: as `limit` says.
        limit: whether a planned limit was reached, as those of `StopAfter`. If this was the last batch of an epoch, the
            run then ends after the epoch; elsewhere the extra streams are evaluated once more at the end.
    """

    def __init__(
        self, reason: str = "a hook ended the training", *, alike: bool | None = None, limit: bool = False
    ) -> None:
        self.reason = reason
        self.alike = limit if alike is None else alike
        self.limit = limit
        super().__init__(reason)

    def only_here(self) -> None:
        """Note that a hook of one rank raised this, so that the ranks have to agree."""
        self.alike = False


class TrainingAborted(Exception):
    """Raised by a hook to end the training as failed, with exit status 3 and without a traceback."""

    exit_status = 3
    code = "guard"

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


class Loop:
    """What hooks and models may ask of the main loop they are registered in: an `emrun.MainLoop`.

    A hook reads the attributes and calls the methods; to set an attribute of an `emrun.MainLoop` is an error. This
    class does nothing itself: it stands for a main loop in tests of hooks, where its attributes can be set.
    """

    model: AbstractModel
    """The model."""
    dataset: Any
    """The dataset."""
    hooks: Sequence[AbstractHook] = ()
    """The hooks, in the order in which they are called."""
    train_stream_name: str = "train"
    """The name of the stream that the model is trained on."""
    seed: int = 0
    """The seed of the run, for random numbers of your own; see `emrun.base.randomness.derived_seed`."""
    has_run: bool = False
    """Whether there is a run directory for checkpoints and metrics."""
    training: bool = False
    """Whether the model is trained on the current batches, rather than evaluated."""
    evaluating: bool = False
    """Whether the loop only evaluates, as in `emrun eval`."""
    at_end: bool = False
    """Whether the extra streams are evaluated once more, because a limit has ended the training since.

    Hooks that count epochs or evaluations leave this one out: a longer run does not have it.
    """
    training_epochs_done: int = 0
    """Number of complete training epochs."""
    iterations_done: int = 0
    """Number of batches that the model was trained on; the current batch counts from `after_batch` on."""
    updates_done: int = 0
    """Number of updates of the weights. With `accumulate`, an update has several batches; it counts if skipped."""
    passes_done: int = 0
    """Number of complete passes of the train stream; these are epochs, unless there is a `fixed_epoch_size`."""
    stream_name: str | None = None
    """The name of the current stream; None between streams."""
    batch_length: int = 0
    """Number of examples in the current batch."""
    epoch_began: float = 0.0
    """When the current epoch began in this process, in seconds of `time.perf_counter`."""
    epoch_seconds: float = 0.0
    """Seconds since the current epoch began in this process, evaluations included."""
    epoch_is_resumed: bool = False
    """Whether the current epoch was resumed in its middle: `epoch_seconds` are those since then."""
    training_seconds: float = 0.0
    """The seconds in which this process has trained: without start and compilation, evaluations and checkpoints."""
    is_alone: bool = False
    """Whether a hook is called now on this rank only, of several."""
    outcome: Any = None
    """How the run ended, in `on_error` and `after_training`: `status` is `finished`, `interrupted` or `failed`, and
    `reason` says why in one line. None before."""
    capsule: Path | None = None
    """The directory with the batch that made the training fail; None if there is none."""
    rows: Any
    """The rows that the run records, an `emrun.record.metrics_log.MetricsLog`: sinks are made from them."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """The lines of `metrics.jsonl` so far, one for each epoch; empty without a run directory."""
    recorded: Mapping[str, Any] = MappingProxyType({})
    """What hooks have recorded for the current iteration: name -> a number, or a tensor on its device.

    An iteration that neither `steps.jsonl` nor a hook with `every` records has nothing.
    """
    shown: dict[str, Shown]
    """What hooks have shown since the epoch began, by name; to be read in `after_epoch_profile`."""
    on_nan_loss: Policy = "error"
    """What happens when the loss that is minimised is not finite; see `main_loop.on_nan_loss`."""
    extra_streams: Sequence[str] = ()
    """Names of the streams that are evaluated after the train stream. The train stream is `train_eval` here."""
    stream_sizes: Mapping[str, int] = MappingProxyType({})
    """Stream -> how many batches of it an epoch has at most, for streams that the config limits."""
    fixed_epoch_size: int | None = None
    """Number of batches of the train stream in an epoch; None for a whole pass."""
    reading_ahead: Mapping[str, int] = MappingProxyType({"buffer": 0, "workers": 0})
    """How streams are read ahead: the settings `buffer` and `workers` of the config; 0 for none."""
    limits: Mapping[str, int] = MappingProxyType({})
    """What hooks end the training at, see `AbstractHook.limits`; the smallest one of each unit."""
    horizon: Horizon = Horizon(None)
    """How many updates the run will make, as far as this is known."""

    def __init__(self) -> None:
        self.shown = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Loop:
        """Return the loop itself: a copy of a model or of a hook belongs to the same loop."""
        return self

    notify: Callable[..., None]
    """Calls an event of all hooks that listen to it, then of the model: `notify("before_update", model=..., ...)`.

    A model calls this for `before_update` and `after_update`. It raises `TrainingTerminated` if at least one hook ended
    the training, and `UpdateSkipped` if at least one hook skips the update; all hooks have got the event then.
    """

    def listens(self, event: str) -> bool:
        """Return whether any hook or the model listens to an event."""
        return False

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream; a model calls this before its first update.

        Raises:
            StreamError: an output has the name of a source, or a hook reads a variable that is neither of the two.
        """

    def wait_for_checkpoints(self) -> None:
        """Wait until the checkpoints requested before this event are on disk, for a hook that reads or copies them.

        Raises:
            StorageError: one that was requested with `on_failure="error"` could not be saved.
        """

    def evaluation_pass(self, name: str) -> Iterator[Batch]:
        """Yield the batches of a pass of a stream, which the model does not run on.

        They are those of an evaluation of the stream, the same ones each time, after the `before_batch` of the hooks;
        of the train stream, at most `fixed_epoch_size`. The stream function must return a new iterator for each call.
        The training does not change: its position in the stream stays, and the random states are restored at the end.
        Until then, random numbers are those of an evaluation. A signal ends the run in between, by a
        `TrainingTerminated`.
        """
        return iter(())

    def record(self, name: str, value: Any) -> None:
        """Add a value of the current iteration, such as the norm of the gradients, to the step log `steps.jsonl`.

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

    def show(self, name: str, value: Shown) -> None:
        """Show a picture, a text or a histogram in the trackers that the config lists, e.g. `WriteTensorBoard`.

        Pictures and texts are kept without a tracker, too; the newest of each name are on the page of the run. To be
        called in `after_batch` or `after_stream` of a stream that is evaluated, or in `after_epoch`; what is shown
        before the end of the train stream is lost if the run is interrupted in between.

        Args:
            name: the name, such as `valid/confusion`.
            value: a `Picture`, a `Text` or a `Histogram` of `emrun.shown`.

        Raises:
            TypeError: the value is something else.
        """
        if not isinstance(value, Shown):
            raise TypeError(f"show({name!r}, ...): {value!r} is not a Picture, a Text or a Histogram of emrun.shown")
        if isinstance(value, Text):
            value = replace(value, text=hidden(value.text))
        self.shown[name] = value

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


class _NotesNames:
    """Records which variables and statistics the arguments of a hook name, before the constructor runs.

    This is not part of `AbstractHook`, because the signature of `AbstractHook` must be that of its constructor.
    """

    _named_by_arguments: tuple[tuple[str, str], ...] = ()  # (kind, name), see `_named_by`

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        new = super().__new__
        hook = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        object.__setattr__(hook, "_named_by_arguments", tuple(dict.fromkeys(_named_by(cls, args, kwargs))))
        return hook

    __new__.only_looks = True  # type: ignore[attr-defined]  # a hook takes what its constructor takes


class AbstractHook(_NotesNames):
    """Base class of hooks: the main loop calls their methods at its events.

        hooks:
          - my_hooks.PrintLoss: {every: 10}

    A hook overrides the methods of the events it listens to; all other events cost nothing. A method may leave out
    arguments that it does not need, because events are called by keyword. A hook that needs an event only in some
    configurations switches it off in the others, with `self.mute("after_batch")` in its constructor.

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

    only_in: Mapping[str, Sequence[str]] = {}
    """Variable of `writes` -> the streams whose data get the variable, if not all do."""

    monitors: Sequence[str] = ()
    """What this hook reads from the epoch data: `variable` (in any stream), `stream/variable` or
    `stream/variable/aggregation`. An earlier hook must write it."""

    saves: Sequence[str] = ()
    """Names of the checkpoints that only this hook saves: `epoch` stands for `epoch`, `epoch-1`, `epoch-2`, ... Two
    hooks whose names can be the same are an error at the start. Names that a hook requests
    (`main_loop.request_checkpoint`) but does not declare are not checked."""

    files: Sequence[str] = ()
    """Names that this hook writes in the run directory, each relative to it. A name that ends with a slash is a folder,
    and `*` stands for any text within a name. The trace keeps them: `emrun prune` removes only names that a run writes,
    and leaves a directory alone in which anything else lies."""

    limits: Mapping[str, int] = {}
    """What this hook ends the training at: a number of `epochs`, `passes`, `updates` or `iterations`. The loop
    compares them and ends the training; schedules of learning rates depend on them."""

    progress: Callable[[], float] | None = None
    """Returns the share of a budget of time that is used, from 0 to 1, if this hook ends the training when it is used
    up: schedules of learning rates go by this share. It must be the same on several ranks, as `Loop.training_seconds`
    is."""

    every_rank: bool = False
    """Whether the hook runs on every rank, on the share of its rank in each batch. Hooks that listen to `before_batch`
    (unless `changes_batches` is False), `before_update` or `after_update` run on every rank anyway, other hooks on rank
    0. A termination or a request for a checkpoint by a hook on every rank must be the same on all of them."""

    whole_batches: bool = False
    """Whether a hook on rank 0 of several gets whole batches in `after_batch`, which are collected for it. Such a hook
    that takes `batch_data` and declares neither this nor `reads = ()` is an error on several ranks."""

    changes_batches: bool = True
    """Whether `before_batch` may change the batch. A hook that only looks at the batch sets this to False: then the
    loop need not copy the batch, and the model can copy it to the GPU ahead of its turn."""

    def __init__(self, model: Any = None, dataset: Any = None, output_dir: Any = None) -> None:
        self.model = model
        self.dataset = dataset
        self.output_dir = output_dir

    def mute(self, *events: str) -> None:
        """Switch events of this hook off before it is registered: it does not listen to them, and they cost nothing.

        `self.after_batch = None` does the same for one event, unchecked.

        Raises:
            HookError: a name is not that of an event, or the hook is already registered with a main loop.
        """
        hook = type(self).__name__
        own = vars(self)
        can_be_muted = [event for event in EVENTS if event != "register_mainloop"]
        for event in events:
            if event not in can_be_muted:
                raise HookError(f"{hook}.mute: {event!r} is not an event{meant_of(event, can_be_muted)}")
            if "main_loop" in own:
                raise HookError(
                    f"{hook}.mute: the hook is already registered with a main loop, which calls its {event}; "
                    f"mute {event} in __init__, or let it return early"
                )
            own[event] = None

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
        the next hooks see what a hook adds. A number may be of any type that `float` takes, or an array or a tensor
        with one element; one that a `float` cannot have is an error. What is not a number is not recorded.
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
        """Return the state that a checkpoint must hold, without constructor arguments.

        Plain types, tensors, numbers and arrays of NumPy, `numpy.random.Generator` and `torch.Generator`, paths, dates
        and times, also in the collections of Python (`dict`, `Counter`, `defaultdict`, `deque`, `set`, ...);
        `load_state_dict` gets the same. Anything else, such as a named tuple or a dataclass, is an error.
        """
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
    and name not in ("mute", "merge", "state_dict", "load_state_dict")
}
"""The events, which are the other methods, and the arguments they are called with, by keyword."""


def _named_by(hook_class: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) for the arguments of a constructor and those it passes to its bases by *args, **kwargs."""
    constructors = dict.fromkeys(cls.__init__ for cls in hook_class.__mro__)  # type: ignore[misc]  # of each class
    for index, constructor in enumerate(constructors):
        try:
            bound = inspect.signature(constructor).bind_partial(None, *args, **kwargs)
        except (TypeError, ValueError):  # the constructor reports a wrong call; some signatures cannot be read
            return
        if index == 0:
            bound.apply_defaults()
        args = ()
        kwargs = {}
        plain = inspect.unwrap(constructor)
        annotations = getattr(plain, "__annotations__", {})
        names = getattr(plain, "__globals__", {})
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            values = [value]
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args = values = value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs = value
                values = value.values()
            hint = evaluated(annotations.get(name), names)
            for each in values:
                yield from _names_in(hint, each)
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
