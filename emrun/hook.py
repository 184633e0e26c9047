"""The contract of hooks: the events of a training, and how a hook ends it."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emrun.arguments import safe_component
from emrun.errors import HookError
from emrun.types import Batch, EpochData, Names, Profile, evaluated
from emrun.wording import did_you_mean, listed

if TYPE_CHECKING:  # hooks know the loop they are registered in; the loop knows its hooks
    from emrun.loop.main_loop import MainLoop

EVENTS: dict[str, tuple[str, ...]] = {
    "register_mainloop": ("main_loop",),
    "before_training": (),
    "before_epoch": ("epoch_id",),
    "before_batch": ("stream_name", "batch"),
    "before_update": ("model",),
    "after_update": ("model",),
    "after_batch": ("stream_name", "batch_data"),
    "after_stream": ("stream_name",),
    "after_epoch": ("epoch_id", "epoch_data"),
    "after_epoch_profile": ("epoch_id", "profile", "streams"),
    "on_error": ("error",),
    "after_training": ("success",),
}
"""The events and the arguments they are called with, by keyword."""
_LATEST = "latest"  # the name that every training gives


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

    main_loop: MainLoop
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

    def register_mainloop(self, main_loop: MainLoop) -> None:
        """Called once, when the main loop is built.

        Raises:
            HookError: the hook is registered already, or a method is a misspelt event.
        """
        check_events(type(self))
        if "main_loop" in self.__dict__:
            raise HookError(f"hook {type(self).__name__} is registered in a main loop already; build a new one")
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


def check_events(hook_class: type) -> None:
    """Check that a hook's methods are events of the main loop and take arguments that these offer.

    Raises:
        HookError: a method is one edit away from an event's name, or an event has a parameter that nothing supplies.
    """
    for name in dir(hook_class):
        if name in EVENTS:
            _check_parameters(hook_class, name)
        elif (near := misspelt_event(name)) is not None and callable(getattr(hook_class, name)):
            raise HookError(no_event(hook_class.__name__, name, near))


def misspelt_event(name: str) -> str | None:
    """Return the event that a method's name is one edit away from, None when it is one or is far from all."""
    if name in EVENTS or name.startswith("_") or name in dir(AbstractHook):
        return None
    return next((event for event in EVENTS if _one_edit_apart(name, event)), None)


def no_event(hook_class: str, name: str, near: str) -> str:
    """Return the message about a method whose name is nearly that of an event."""
    return f"{hook_class}.{name} is no event of a hook; did you mean {near!r}?"


def read_by(hook: Any) -> tuple[str, ...] | None:
    """Return the variables of a batch that a hook says it reads, None when it says nothing.

    Raises:
        HookError: its `reads` is not a list of names.
    """
    by_arguments = _named(hook, "variable")
    declared = _declared(hook, "reads")
    return by_arguments or None if declared is None else tuple(dict.fromkeys((*by_arguments, *declared)))


def written_by(hook: Any) -> tuple[str, ...]:
    """Return what a hook says it adds to the epoch's data.

    Raises:
        HookError: its `writes` is not a list of names.
    """
    return _declared(hook, "writes") or ()


def check_monitors(hooks: Sequence[Any], streams: Sequence[str] | None) -> None:
    """Check that what hooks read of the epoch's data is written by a hook before them, in a stream that is run.

    Args:
        hooks: the hooks in their order, and the model, which may monitor too.
        streams: the names of the streams that are run; None when any may be: then only variables that are monitored
            without a stream are looked at.

    Raises:
        HookError: it is not; the message says which hook to move, or what to add.
    """
    writes = [written_by(hook) for hook in hooks]
    everything = sorted({name for names in writes for name in names})
    for index, hook in enumerate(hooks):
        for address, is_variable in _monitored(hook, everything).items():
            stream, _, statistic = ("", "", address) if is_variable else address.partition("/")
            if streams is None and not is_variable:
                continue
            if not is_variable and stream not in (streams or ()):
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but stream {stream!r} is not run"
                    f"{did_you_mean(stream, streams or ())} (main_loop runs {listed(streams or ())}: "
                    "main_loop.extra_streams)",
                    index,
                )
            is_meant = _is_of_variable if is_variable else _is_statistic
            writers = [i for i, names in enumerate(writes) if any(is_meant(name, statistic) for name in names)]
            if not writers:
                there = sorted({name.partition("/")[0] for name in everything}) if is_variable else everything
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but no hook writes {statistic!r}"
                    f"{did_you_mean(statistic, there)} (written are {listed(there)}); add it to ComputeStats. A hook "
                    f"of yours that writes it declares `writes = [{statistic!r}]`",
                    index,
                )
            if writers[0] > index:
                writer = type(hooks[writers[0]]).__name__
                raise HookError(f"{type(hook).__name__} monitors {address}: move it behind {writer}", index)


def check_saved_names(hooks: Sequence[AbstractHook]) -> None:
    """Check that no two hooks save under one name: each would take it from the other's checkpoint.

    Raises:
        HookError: two do, or one does so under the name that the loop itself gives.
    """
    saved = [(index, name) for index, hook in enumerate(hooks) for name in _declared(hook, "saves") or ()]
    for number, (index, name) in enumerate(saved):
        kind = type(hooks[index]).__name__
        if _as_saved(name) == _LATEST:
            raise HookError(
                f"{kind} (hooks[{index}]) saves under the name {name!r}, as SaveLatest and the end of every training "
                "do; give it a model_name of its own",
                index,
            )
        for earlier, other in saved[:number]:
            if earlier != index and _may_be_one(_as_saved(name), _as_saved(other)):
                who = f"{type(hooks[earlier]).__name__} (hooks[{earlier}]) and {kind} (hooks[{index}])"
                if name == other:
                    what = f"save under the name {name!r}"
                else:
                    what = f"save under one name, {other!r} and {name!r}"
                    what += " (which are the same in a path)" if _as_saved(name) == _as_saved(other) else ""
                raise HookError(f"{who} {what}; give one of them a model_name of its own", index)


def _as_saved(name: str) -> str:
    """Return a name as the checkpoint gets it, `-*` at its end as it is."""
    is_numbered = name.endswith("-*")
    return safe_component("saves", name.removesuffix("-*")) + ("-*" if is_numbered else "")


def _may_be_one(one: str, other: str) -> bool:
    """Tell whether two names, of which `-*` at the end stands for any number, can be the same."""
    if one.endswith("-*"):
        one, other = other, one
    numbered = other.endswith("-*") and re.fullmatch(re.escape(other.removesuffix("*")) + r"\d+", one) is not None
    return one == other or numbered


def _monitored(hook: Any, written: Sequence[str]) -> dict[str, bool]:
    """Return what a hook reads of the epoch's data -> whether it is a variable in whatever stream.

    Args:
        hook: the hook, or the model.
        written: what is written: a variable may have a slash in its name.
    """
    addresses = (*_named(hook, "address"), *(_declared(hook, "monitors") or ()))
    found = {name: "/" not in name or any(_is_of_variable(each, name) for each in written) for name in addresses}
    return {**found, **dict.fromkeys(_named(hook, "epoch variable"), True)}


def _is_of_variable(name: str, variable: str) -> bool:
    """Tell whether what is written, `variable` or `variable/aggregation`, is of a variable."""
    return name.startswith(f"{variable}/") or (name == variable and "/" not in variable)


def _is_statistic(name: str, statistic: str) -> bool:
    """Tell whether what is written is a statistic, or the variable of one, whose aggregations are not known."""
    return name in (statistic, statistic.partition("/")[0])


def _declared(hook: Any, attribute: str) -> tuple[str, ...] | None:
    names = getattr(hook, attribute, None)
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise HookError(f"{type(hook).__name__}.{attribute} is {names!r}, not a list of names, e.g. ['loss']")
    return tuple(names)


def _named(hook: Any, what: str) -> tuple[str, ...]:
    """Return what the arguments of a hook name; nothing of a hook that was made without its constructor."""
    return tuple(name for kind, name in getattr(hook, "_named_by_arguments", ()) if kind == what)


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


def listener(hook: Any, event: str, base: type = AbstractHook) -> Callable[..., Any] | None:
    """Return what to call, by keyword, when `event` happens, or None when `hook` does not listen to it.

    Args:
        hook: a hook, or a model that defines some of the events.
        event: one of `EVENTS`.
        base: the class whose methods do nothing.
    """
    method = getattr(hook, event, None)
    if method is None or (hasattr(base, event) and getattr(method, "__func__", None) is getattr(base, event)):
        return None
    if not callable(method):
        raise HookError(
            f"{type(hook).__name__}.{event} is {type(method).__name__}, which hides the event of that name; rename it"
        )
    parameters = inspect.signature(method).parameters
    wanted = [name for name in EVENTS[event] if name in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or len(wanted) == len(EVENTS[event]):
        return method  # type: ignore[no-any-return]
    return lambda **arguments: method(**{name: arguments[name] for name in wanted})


def may_change_batches(hook: Any) -> bool:
    """Tell whether a hook, or a model, gets the batches before the model and may change them."""
    return bool(getattr(hook, "changes_batches", True)) and _gets(hook, "before_batch", "batch")


def may_read_anything(hook: Any) -> bool:
    """Tell whether a hook, or a model, gets the batches and does not say what it reads in them."""
    return read_by(hook) is None and (_gets(hook, "before_batch", "batch") or _gets(hook, "after_batch", "batch_data"))


def _gets(hook: Any, event: str, argument: str) -> bool:
    """Tell whether a hook, or a model, listens to an event and takes one of its arguments."""
    if listener(hook, event) is None:
        return False
    parameters = inspect.signature(getattr(hook, event)).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_parameters(hook_class: type, event: str) -> None:
    parameters = list(inspect.signature(getattr(hook_class, event)).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in variable
        if parameter.name not in EVENTS[event] and required:
            offered = ", ".join(EVENTS[event]) or "no arguments"
            raise HookError(
                f"{hook_class.__name__}.{event} takes {parameter.name!r}, which nothing supplies; "
                f"the event offers {offered}"
            )


def _one_edit_apart(name: str, event: str) -> bool:
    """Tell whether one insertion, deletion, replacement or swap of neighbours makes `event` of `name`."""
    while name and event and name[0] == event[0]:
        name, event = name[1:], event[1:]
    while name and event and name[-1] == event[-1]:
        name, event = name[:-1], event[:-1]
    swapped = len(name) == 2 and name == event[::-1]
    return swapped or (len(name) <= 1 and len(event) <= 1)
