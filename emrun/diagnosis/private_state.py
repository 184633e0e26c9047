"""State of objects outside checkpoints: attributes, and buffers with `persistent=False`."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from emrun.base.encoding import digest
from emrun.diagnosis.differences import DIGEST, NOT_PERSISTENT
from emrun.hook import AbstractHook

_TRUSTED = ("emrun.", "torch.")  # checkpoints have all state of these classes; other attributes do not matter
_DEEPEST = 8  # levels of nested containers
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that every module has


def private_state(model: Any, hooks: Iterable[AbstractHook], dataset: Any) -> dict[str, str]:
    """Return the state of a model, hooks and a dataset that may be in no checkpoint; see `unsaved_state`."""
    own = [*(_kept([("", hook)], "hook") for hook in hooks), _kept([("", dataset)], "dataset")]
    return unsaved_state(model) | _texts(itertools.chain.from_iterable(own))


def forgetful(hooks: Iterable[AbstractHook]) -> list[str]:
    """Return the class names of the user's hooks that do not override `state_dict`."""
    own = [type(hook) for hook in hooks if not type(hook).__module__.startswith(_TRUSTED)]
    return [kind.__name__ for kind in own if kind.state_dict is AbstractHook.state_dict]


def unsaved_state(model: Any) -> dict[str, str]:
    """Return the state of a model that may be in no checkpoint, as strings that can be compared between processes.

    Args:
        model: its attributes, its `module` and its losses are searched for numbers, strings, tensors, arrays, random
            generators and containers of these. Values of other types are left out.

    Returns:
        A name such as `module 'encoder' (Encoder), attribute 'count'` -> the number, or a digest of a longer value.
        State that `get_extra_state()` or the model's `state_dict()` returns is included.
    """
    found: list[Iterable[tuple[str, Any]]] = [_kept([("", model)], "model")]
    module = getattr(model, "module", None)
    if isinstance(module, torch.nn.Module):
        found.append(_kept(module.named_modules(), "module"))
    for key, loss in getattr(model, "losses", {}).items():
        is_module = isinstance(loss, torch.nn.Module)
        found.append(_kept(loss.named_modules() if is_module else [("", loss)], key))
        if is_module:
            found.append([(f"{key} {_kind(loss)}, buffer {name!r}", each) for name, each in loss.named_buffers()])
    return _texts(itertools.chain.from_iterable(found))


def _kept(owners: Iterable[tuple[str, Any]], what: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of objects, unless emrun or torch defines their classes, and non-persistent buffers.

    Args:
        owners: the named submodules of a module, or one object with an empty name.
        what: the word for the whole in the yielded names, such as `hook`.
    """
    for name, owner in owners:
        place = f"{what} {name!r} ({_kind(owner)})" if name else f"{what} {_kind(owner)}"
        if not type(owner).__module__.startswith(_TRUSTED):
            own = list(getattr(owner, "__dict__", {}).items())
            yield from ((f"{place}, attribute {key!r}", value) for key, value in own if key not in _OF_MODULES)
        if isinstance(owner, torch.nn.Module):
            lost = owner._non_persistent_buffers_set
            buffers = [(key, each) for key, each in owner.named_buffers(recurse=False) if key in lost]
            yield from ((f"{place}, buffer {key!r} {NOT_PERSISTENT}", each) for key, each in buffers)


def _texts(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return strings for values under their names, without values that cannot be compared."""
    found = {}
    for name, value in values:
        with suppress(Exception):  # the user's objects may raise anything; some tensors support few operations
            found[name] = _text(value)
    return found


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
