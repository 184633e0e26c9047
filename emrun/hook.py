"""The contract of hooks: the events, each at its place in the loop, what a hook may ask there, and how it ends a run.

    register_mainloop(main_loop)                        # the loop is built
    before_training()                                   # of a resume: states are loaded, random states not yet
    for epoch_id in 0, 1, 2, ...:                       # 0 only evaluates: the train stream, then the extra streams
        before_epoch(epoch_id)
        for stream_name in the train stream, the extra streams that are due:
            for batch in the stream:
                before_batch(stream_name, batch)        # may change it
                model.run(batch):                       # in the train stream, for each update:
                    before_update(model)                # the gradients are complete
                    after_update(model)                 # the optimizer has made its step
                after_batch(stream_name, batch_data)    # sources and outputs; then checkpoints that were asked for
            after_stream(stream_name)
        after_epoch(epoch_id, epoch_data)               # statistics are written and read
        after_epoch_profile(epoch_id, profile, streams)
        # then: the line of `metrics.jsonl`, checkpoints that were asked for, the end that a hook or a signal wants
    on_error(error)                                     # where it failed
    after_training(success)                             # in any case

Hooks are called in the order of the config, then the model, which may define events too.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from emrun.model import AbstractModel
from emrun.types import Batch, EpochData, InsteadOf, Names, Policy, Profile, evaluated


class TrainingTerminated(Exception):
    """Raised by a hook to end the training successfully.

    Every hook still gets the event in which it was raised, a checkpoint is saved, and the training ends there.
    """

    def __init__(self, reason: str = "a hook ended the training") -> None:
        self.reason = reason
        super().__init__(reason)


class TrainingAborted(Exception):
    """Raised by a guard to end the training as failed, without a traceback and with exit status 3."""

    exit_status = 3

    def __init__(self, reason: str = "a hook aborted the training") -> None:
        self.reason = reason
        super().__init__(reason)


class Loop(Protocol):
    """What a hook or a model may ask of the loop that it is registered in; `emrun.MainLoop` is that loop."""

    @property
    def model(self) -> AbstractModel:
        """The model."""

    @property
    def dataset(self) -> Any:
        """The dataset."""

    @property
    def train_stream_name(self) -> str:
        """The name of the stream that the model learns from."""

    @property
    def extra_streams(self) -> list[str]:
        """Names of the streams that are evaluated after the train stream; that itself is `train_eval` there."""

    @property
    def fixed_epoch_size(self) -> int | None:
        """How many batches of the train stream make an epoch, None for those of a pass."""

    @property
    def training(self) -> bool:
        """Whether the batches are those of a stream that the model learns from."""

    @property
    def evaluating(self) -> bool:
        """Whether nothing but an evaluation is to be done, as in `emrun eval`."""

    @property
    def training_epochs_done(self) -> int:
        """How many training epochs are complete."""

    @property
    def iterations_done(self) -> int:
        """How many batches of training streams the model has run on."""

    @property
    def stream_name(self) -> str | None:
        """The name of the stream whose batches are run at the moment."""

    @property
    def batch_length(self) -> int:
        """How many examples the current batch has."""

    @property
    def epoch_seconds(self) -> float:
        """How long the current epoch has taken so far in this process, evaluations included."""

    @property
    def has_run(self) -> bool:
        """Whether there is a run directory, for checkpoints and metrics."""

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """What `metrics.jsonl` has of each epoch so far; nothing where there is no run directory."""

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

    def wait_for_checkpoints(self) -> None:
        """Return when what was requested before this event is on disk, for a hook that does something with it.

        Raises:
            StorageError: it could not be saved, and it was requested that way.
        """

    def listens(self, event: str) -> bool:
        """Tell whether anything listens to an event."""

    def notify(self, event: str, **arguments: Any) -> None:
        """Call an event of all hooks that listen to it, then of the model; models call it for their update events.

        Raises:
            TrainingTerminated: hooks ended the training; all of them got the event.
        """

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs for the first batch of a stream; a model that updates itself calls it before.

        Raises:
            StreamError: an output has the name of a source, or a hook reads a variable that is neither.
        """


class _NotesNames:
    """Takes note of what the arguments of a hook name before the constructor runs, whoever builds it.

    It stands apart from `AbstractHook`, whose signature is that of its constructor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        new = super().__new__
        hook = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        object.__setattr__(hook, "_named_by_arguments", tuple(dict.fromkeys(_named_by(cls, args, kwargs))))
        return hook

    __new__.only_looks = True  # type: ignore[attr-defined]  # what a hook takes is what its constructor takes


class AbstractHook(_NotesNames):
    """Base of all hooks: an object whose methods are called at the events of the main loop.

    A hook overrides the events it listens to; the others cost nothing. One that needs an event only with some of its
    arguments sets it to None otherwise, as in `self.after_batch = None`. An event is called by keyword, so a method may
    declare only those of its arguments that it needs. Errors: `TrainingTerminated` ends the training successfully,
    `TrainingAborted` ends it as failed, anything else is a failure of the hook.

        hooks:
          - my_hooks.PrintLoss: {every: 10}

    Variables and statistics that a hook is given by name are checked before the training, or with the first batches:
    those in parameters that are annotated with `emrun.types.VariableName`, `EpochVariable` or `Address`, and those in
    `reads` and `monitors`.

    Args:
        model: the model, the dataset and the directory of the run, a `pathlib.Path`, kept under these names. emrun
            supplies those that a hook's constructor takes, so that a hook written `def __init__(self, limit, **kwargs):
            super().__init__(**kwargs)` works.
        dataset: see `model`.
        output_dir: see `model`.
    """

    main_loop: Loop
    """The loop, from `register_mainloop` on."""

    reads: Sequence[str] | None = None
    """Variables that this hook reads in the batches of every stream; checked with each stream's first batch. None for
    what is not declared: a hook that gets the batches may read anything in them, and no source is unused then."""

    writes: Sequence[str] = ()
    """What this hook adds to the epoch's data: `variable` or `variable/aggregation`. Every hook that adds something
    declares it."""

    monitors: Sequence[str] = ()
    """What this hook reads in the epoch's data: `variable` (in whatever stream), `stream/variable` or
    `stream/variable/aggregation`. An earlier hook must write it."""

    saves: Sequence[str] = ()
    """Names of the checkpoints that this hook alone saves; `epoch-*` for epoch-1, epoch-2, ... Two hooks that save
    under one name are an error. Names that a hook asks for (`main_loop.request_checkpoint`) and does not declare here
    are not checked."""

    changes_batches: bool = True
    """Whether `before_batch` may change the batch. A hook that has this event and only looks says False, so that
    batches need not be copied, and can be copied to a GPU ahead of their turn."""

    def __init__(self, model: Any = None, dataset: Any = None, output_dir: Any = None) -> None:
        self.model = model
        self.dataset = dataset
        self.output_dir = output_dir

    def register_mainloop(self, main_loop: Loop) -> None:
        """Called once, when the main loop is built."""
        self.main_loop = main_loop

    def before_training(self) -> None:
        """Called when the main loop is entered; of a run that is resumed, after `load_state_dict`."""

    def before_epoch(self, epoch_id: int) -> None:
        """Called before an epoch. `epoch_id` counts training epochs from 1; the zeroth epoch only evaluates.

        Also called when an epoch is resumed in its middle, under the random states with which that epoch began, so that
        what a hook sets up here is in force again. After that the weights and the states of model and hooks are loaded
        again. So whatever else this event changes must be a function of `epoch_id`. A request for a checkpoint and a
        termination have no effect then.
        """

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Called before the model runs on a batch of any stream.

        Sources may be replaced, added and removed: hooks share a copy of the mapping, in order, on which the model is
        run. What is in the sources is the stream's, and not to be changed in place.
        """

    def before_update(self, model: Any) -> None:
        """Called when the gradients of an update are complete, before the optimizer uses them."""

    def after_update(self, model: Any) -> None:
        """Called after the optimizer's step; the gradients are still there."""

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Called after the model ran on a batch of any stream; `batch_data` holds its sources and the outputs.

        Hooks share the mapping, in order: what one adds or replaces, the next ones see.
        """

    def after_stream(self, stream_name: str) -> None:
        """Called when the last batch of a stream was run."""

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Called after the last stream of an epoch.

        `epoch_data[stream][variable]` is a number or a mapping aggregation -> number; hooks share it, in order.
        """

    def after_epoch_profile(self, epoch_id: int, profile: Profile, streams: Sequence[str]) -> None:
        """Called after `after_epoch` of all hooks, with what was timed during the epoch, in seconds."""

    def on_error(self, error: BaseException) -> None:
        """Called when the training ends as failed."""

    def after_training(self, success: bool) -> None:
        """Called at the end, whatever happened; `success` is false when the training failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume, as plain types and tensors; never constructor arguments."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Called twice when an epoch is resumed in its middle: it sets what was counted, and adds nothing.
        """


EVENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(AbstractHook).items()
    if inspect.isfunction(method) and not name.startswith("_") and name not in ("state_dict", "load_state_dict")
}
"""The events, which are the other methods, and the arguments they are called with, by keyword."""


def _named_by(hook_class: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the arguments of a constructor name, and those that it hands on to its bases as they are."""
    constructors = dict.fromkeys(cls.__init__ for cls in hook_class.__mro__)  # type: ignore[misc]  # of each class
    for index, constructor in enumerate(constructors):
        try:
            bound = inspect.signature(constructor).bind_partial(None, *args, **kwargs)
        except (TypeError, ValueError):  # of a wrong call the constructor tells; some signatures cannot be read
            return
        if index == 0:
            bound.apply_defaults()
        args, kwargs = (), {}
        plain = inspect.unwrap(constructor)
        annotations, names = getattr(plain, "__annotations__", {}), getattr(plain, "__globals__", {})
        for name, value in bound.arguments.items():
            parameter = bound.signature.parameters[name]
            values = [value]
            if parameter.kind is parameter.VAR_POSITIONAL:
                args = values = value
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs, values = value, value.values()
            for each in values:
                yield from _names_in(evaluated(annotations.get(name), names), each)
        if not (args or kwargs):
            return


def _names_in(hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what a value names, as far as its type says what its texts are: what it is, and the name."""
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
