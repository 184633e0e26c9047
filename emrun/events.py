"""Who listens to which event, and whether a class fits the events."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from emrun.epoch_data import read_by
from emrun.errors import HookError
from emrun.hook import EVENTS, AbstractHook


def check_events(hook_class: type) -> None:
    """Check that a hook's methods are events of the main loop and take arguments that these offer.

    Raises:
        HookError: a method is one edit away from an event's name, or an event has a parameter that nothing supplies.
    """
    for name in dir(hook_class):
        if name in EVENTS:
            _check_parameters(hook_class, name)
        elif not name.startswith("_") and name not in dir(AbstractHook):
            near = next((event for event in EVENTS if _one_edit_apart(name, event)), None)
            if near is not None and callable(getattr(hook_class, name)):
                raise HookError(f"{hook_class.__name__}.{name} is no event of a hook; did you mean {near!r}?")


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
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in list(inspect.signature(getattr(hook_class, event)).parameters.values())[1:]:
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
