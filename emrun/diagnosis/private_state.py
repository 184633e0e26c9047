"""State of objects outside checkpoints: attributes, and buffers with `persistent=False`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from emrun.base.encoding import digest
from emrun.diagnosis.differences import DIGEST, NOT_PERSISTENT
from emrun.diagnosis.model_facts import optimizers
from emrun.hook import AbstractHook

_TRUSTED = ("emrun.", "torch.")  # checkpoints have all state of these classes; other attributes do not matter
_SAVED = ("model", "module", "hook")  # of these, checkpoints may have the buffers that are persistent
_DEEPEST = 8  # levels of nested containers
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that every module has


def private_state(model: Any, hooks: Iterable[AbstractHook], dataset: Any) -> dict[str, str]:
    """Return the state of a model, hooks and a dataset that may be in no checkpoint; see `unsaved_state`."""
    return (
        unsaved_state(model) | _untrained(model) | _texts([*(("hook", hook) for hook in hooks), ("dataset", dataset)])
    )


def _untrained(model: Any) -> dict[str, str]:
    """Return the names of the parameters that no optimizer has: a resume trains those that have replaced others."""
    groups = [group for optimizer in optimizers(model).values() for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    named = model.module.named_parameters() if groups and hasattr(model, "module") else ()
    names = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in trained]
    return {"parameters that no optimizer trains": ", ".join(names) or "none"}


def forgetful(hooks: Iterable[AbstractHook]) -> list[str]:
    """Return the class names of the user's hooks that do not override `state_dict`."""
    kinds = [type(hook) for hook in hooks if not type(hook).__module__.startswith(_TRUSTED)]
    return [kind.__name__ for kind in kinds if kind.state_dict is AbstractHook.state_dict]


def unsaved_state(model: Any) -> dict[str, str]:
    """Return the state of a model that may be in no checkpoint, as strings that can be compared between processes.

    Args:
        model: its attributes, its `module` and its losses are searched for numbers, strings, tensors, arrays, random
            generators and containers of these. Values of other types are left out.

    Returns:
        A name such as `module 'encoder' (Encoder), attribute 'count'` -> the number, or a digest of a longer value.
        State that `get_extra_state()` or the model's `state_dict()` returns is included.
    """
    return _texts([("model", model), ("module", getattr(model, "module", None)), *getattr(model, "losses", {}).items()])


def _texts(wholes: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return strings for the state of objects, without values that cannot be compared; see `_kept`."""
    texts = {}
    for what, whole in wholes:
        for name, value in _kept(what, whole):
            with suppress(Exception):  # the user's objects may raise anything; some tensors support few operations
                texts[name] = _text(value)
    return texts


def _kept(what: str, whole: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and its submodules, unless emrun or torch defines their classes, and buffers.

    Of a model, its module and a hook, only the buffers that are not persistent.

    Args:
        what: the word for the object in the yielded names, such as `hook`.
        whole: the object.
    """
    owners = whole.named_modules() if isinstance(whole, torch.nn.Module) else [("", whole)]
    for name, owner in owners:
        place = f"{what} {name!r} ({_kind(owner)})" if name else f"{what} {_kind(owner)}"
        if not type(owner).__module__.startswith(_TRUSTED):
            attributes = list(getattr(owner, "__dict__", {}).items())
            yield from ((f"{place}, attribute {key!r}", value) for key, value in attributes if key not in _OF_MODULES)
        buffers = owner.named_buffers(recurse=False) if isinstance(owner, torch.nn.Module) else ()
        for key, buffer in buffers:
            if what not in _SAVED:
                yield f"{place}, buffer {key!r}", buffer
            elif key in owner._non_persistent_buffers_set:
                yield f"{place}, buffer {key!r} {NOT_PERSISTENT}", buffer


def _text(value: Any, depth: int = 0) -> str:
    """Return a string for a value that can be compared between processes.

    Raises:
        TypeError: the value has another type, or is nested too deeply, as a container that holds itself is.
    """
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset) and depth < _DEEPEST:
        parts = [_text(entry, depth + 1) for entry in (value.values() if isinstance(value, Mapping) else value)]
        return f"{DIGEST} {digest(sorted(parts) if isinstance(value, set | frozenset) else parts)}"
    return f"{DIGEST} {digest(_content(value))}"


def _content(value: Any) -> Any:
    """Return the data of a tensor or an array, or the state of a random generator.

    Raises:
        TypeError: the value has another type.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state()
    raise TypeError(type(value).__name__)


def _kind(value: Any) -> str:
    return type(value).__name__
