"""Which hooks listen to which event, and whether the methods of a hook class fit the events."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from emrun.base.errors import HookError
from emrun.base.wording import few
from emrun.epoch_data import read_by
from emrun.hook import EVENTS, AbstractHook

_LOG = logging.getLogger(__name__)
_OTHERS = {
    **dict.fromkeys(("on_train_start", "on_train_begin", "on_fit_start"), "before_training"),
    **dict.fromkeys(("on_train_end", "on_fit_end"), "after_training"),
    **dict.fromkeys(("on_epoch_start", "on_epoch_begin", "on_train_epoch_start"), "before_epoch"),
    **dict.fromkeys(("on_epoch_end", "on_train_epoch_end", "training_epoch_end"), "after_epoch"),
    **dict.fromkeys(("on_batch_start", "on_batch_begin", "on_train_batch_start", "on_step_begin"), "before_batch"),
    **dict.fromkeys(("on_batch_end", "on_train_batch_end", "on_validation_batch_end", "on_step_end"), "after_batch"),
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end", "on_evaluate"), "after_stream"),
    **dict.fromkeys(("on_before_optimizer_step", "on_pre_optimizer_step"), "before_update"),
}
"""Events of other tools, which are never called here -> the event to write."""

_FORWARD = "evaluations call forward(self, inputs), and the metrics of the config"
_STEPS = {
    "training_step": "write train_step(self, inputs), which returns the outputs",
    **dict.fromkeys(("validation_step", "test_step", "eval_step", "evaluation_step", "predict_step"), _FORWARD),
    "configure_optimizers": "write model.optimizer: {class: AdamW, lr: 0.001}, or set self.optimizer in __init__",
}
"""Methods of a model that other tools call -> what to write."""

_CALLED = (
    *("state_dict", "load_state_dict", "train_step", "forward", "step_values", "stream_values"),
    *("begin", "newest", "write", "flush", "finish"),
)
"""Methods that emrun calls, beside the events, and that a hook or a model may override."""


def check_events(checked: type) -> None:
    """Check that no method of a hook or of a model is a misspelt one, and that its events take what there is.

    Raises:
        HookError: a method is one edit away from the name of an event, or from a method that emrun calls, or has the
            name of one of other tools, and no other method of the class uses it as a helper; an event requires an
            argument that it does not have; or a method that a derived class must have is missing.
    """
    ours = set().union(*(vars(each) for each in checked.__mro__ if each.__module__.partition(".")[0] == "emrun"))
    called = [*EVENTS, *(name for name in _CALLED if name in ours)]
    for name in dir(checked):
        if not name.startswith("_") and getattr(getattr(checked, name), "__isabstractmethod__", False):
            does = str(inspect.getdoc(getattr(checked, name))).partition("\n")[0]
            raise HookError(f"{checked.__name__} has no method {name}, which is called to do this: {does}")
        if name in EVENTS:
            if getattr(checked, name) is not getattr(AbstractHook, name):
                _check_parameters(checked, name)
        elif not name.startswith("_") and name not in ours and callable(getattr(checked, name)):
            near = next((event for event in called if _one_edit_apart(name, event)), _OTHERS.get(name))
            hint = f"did you mean {near!r}?" if near is not None else "train_step" in ours and _STEPS.get(name)
            if hint and not _calls(checked, name):
                what = "an event of the main loop" if near in EVENTS else "a method that emrun calls"
                keep = f" (to keep it for your own use, name it _{name})" if name in (*_OTHERS, *_STEPS) else ""
                raise HookError(f"{checked.__name__}.{name} is not {what}; {hint}{keep}")


def warn_of_unused(module: object) -> None:
    """Warn of the methods of a module that have the names of events, as only hooks and models get these."""
    names = [name for name in EVENTS if callable(getattr(type(module), name, None))]
    if names := [name for name in names if not _calls(type(module), name)]:
        text = "emrun does not call %s of the module %s: events are for hooks and for classes derived from TorchModel"
        _LOG.warning(text, few(names), type(module).__name__)


def check_constructed(hook: Any, index: int) -> None:
    """Check that the constructor of a hook has called that of the class of emrun that the hook derives from.

    Raises:
        HookError: it has not; `index` is the number of the hook.
    """
    own = [each for each in type(hook).__mro__ if each.__module__.startswith("emrun.") and "__init__" in vars(each)]
    if AbstractHook in own[1:] and "output_dir" not in vars(hook):
        raise HookError(
            f"{type(hook).__name__}.__init__ does not call super().__init__(), which sets what "
            f"{own[0].__name__} needs; call it first",
            index,
        )


def _calls(checked: type, helper: str) -> bool:
    """Return whether another method of a class, or of its bases outside of emrun, uses the name of a helper."""
    classes = [each for each in checked.__mro__ if each.__module__.partition(".")[0] not in ("emrun", "torch")]
    others = [method for cls in classes for name, method in vars(cls).items() if name != helper]
    codes = [method.__code__ for method in others if inspect.isfunction(method)]
    for code in codes:
        codes.extend(each for each in code.co_consts if inspect.iscode(each))
    return any(helper in code.co_names for code in codes)


def listener(hook: Any, event: str, base: type = AbstractHook) -> Callable[..., Any] | None:
    """Return the function to call, by keyword, at an event; None if the hook does not listen to the event.

    Args:
        hook: a hook, or a model that defines events.
        event: one of `EVENTS`.
        base: the base class, whose methods do nothing and are not called.

    Raises:
        HookError: the hook has an attribute with the name of the event that is not a method.
    """
    method = getattr(hook, event, None)
    if method is None or (hasattr(base, event) and getattr(method, "__func__", None) is getattr(base, event)):
        return None
    if not callable(method):
        raise HookError(
            f"{type(hook).__name__}.{event} has the name of an event, so it must be a method, not "
            f"{type(method).__name__}; rename the attribute"
        )
    parameters = inspect.signature(method).parameters
    wanted = [name for name in EVENTS[event] if name in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or len(wanted) == len(EVENTS[event]):
        return method  # type: ignore[no-any-return]
    return wraps(method)(lambda **arguments: method(**{name: arguments[name] for name in wanted}))


def owner(call: Any) -> Any:
    """Return the hook, or the model, whose method is called by a function that wraps it; None if it is not known."""
    while not hasattr(call, "__self__") and hasattr(call, "__wrapped__"):
        call = call.__wrapped__
    return getattr(call, "__self__", None)


def may_change_batches(hook: Any) -> bool:
    """Return whether a hook, or a model, gets the batches in `before_batch` and may change them."""
    return bool(getattr(hook, "changes_batches", True)) and _gets(hook, "before_batch", "batch")


def changers_of(hooks: Iterable[Any], model: Any) -> list[str]:
    """Return the class names of the hooks, and of the model, that may change batches."""
    return [type(each).__name__ for each in (*hooks, model) if may_change_batches(each)]


def runs_on_every_rank(hook: Any) -> bool:
    """Return whether a hook runs on every rank, see `AbstractHook.every_rank`."""
    changes = any(listener(hook, event) is not None for event in ("before_update", "after_update"))
    return bool(getattr(hook, "every_rank", False)) or changes or may_change_batches(hook)


def reads_batches(hook: Any) -> bool:
    """Return whether a hook gets the data of batches in `after_batch`."""
    return _gets(hook, "after_batch", "batch_data")


def merges(hook: Any) -> bool:
    """Return whether a hook adds up what it has collected on several ranks."""
    return type(hook).merge is not AbstractHook.merge if isinstance(hook, AbstractHook) else hasattr(hook, "merge")


def may_read_anything(hook: Any) -> bool:
    """Return whether a hook, or a model, gets the batches and does not declare which variables it reads."""
    return read_by(hook) is None and (_gets(hook, "before_batch", "batch") or _gets(hook, "after_batch", "batch_data"))


def _gets(hook: Any, event: str, argument: str) -> bool:
    """Return whether a hook, or a model, listens to an event and takes the given argument."""
    if listener(hook, event) is None:
        return False
    parameters = inspect.signature(getattr(hook, event)).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_parameters(hook_class: type, event: str) -> None:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in list(inspect.signature(getattr(hook_class, event)).parameters.values())[1:]:
        required = parameter.default is parameter.empty and parameter.kind not in variable
        if parameter.name not in EVENTS[event] and required:
            offered = ", ".join(EVENTS[event]) or "none"
            raise HookError(
                f"{hook_class.__name__}.{event} requires {parameter.name!r}, which is not an argument of this event "
                f"(its arguments: {offered})"
            )


def _one_edit_apart(name: str, event: str) -> bool:
    """Return whether one insertion, deletion, replacement or swap of neighbours turns `name` into `event`."""
    while name and event and name[0] == event[0]:
        name = name[1:]
        event = event[1:]
    while name and event and name[-1] == event[-1]:
        name = name[:-1]
        event = event[:-1]
    swapped = len(name) == 2 and name == event[::-1]
    return swapped or (len(name) <= 1 and len(event) <= 1)
