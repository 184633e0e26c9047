"""What objects keep beside what checkpoints have of them: attributes, buffers with `persistent=False`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from emrun.diagnosis.differences import DIGEST, NOT_PERSISTENT
from emrun.encoding import digest
from emrun.hook import AbstractHook

_TRUSTED = ("emrun.", "torch.")  # their states are complete, what else they keep is their own business
_DEEPEST = 8  # containers in containers
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that every module has


def private_state(model: Any, hooks: Iterable[AbstractHook], dataset: Any) -> dict[str, str]:
    """Return what the objects of a training keep in attributes of their own, as `unsaved_state` does for a model."""
    found = unsaved_state(model)
    for hook in hooks:
        found |= attributes(hook, f"hook {_kind(hook)}")
    return found | attributes(dataset, f"dataset {_kind(dataset)}")


def forgetful(hooks: Iterable[AbstractHook]) -> list[str]:
    """Return the names of the user's hooks that have no state of their own."""
    own = [type(hook) for hook in hooks if not type(hook).__module__.startswith(_TRUSTED)]
    return [kind.__name__ for kind in own if kind.state_dict is AbstractHook.state_dict]


def unsaved_state(model: Any) -> dict[str, str]:
    """Return what a model keeps where no checkpoint may have it, as texts that can be compared between processes.

    Args:
        model: its `module`, its losses and itself are looked at; values of other types than numbers, texts, tensors,
            arrays, generators and containers of these are left out.

    Returns:
        `module 'encoder' (Encoder), attribute 'count'` -> the number, or a digest of anything longer. What is in
        `get_extra_state()` or in the model's `state_dict()` is there too.
    """
    found: dict[str, str] = {}
    module = getattr(model, "module", None)
    if isinstance(module, torch.nn.Module):
        found |= _of_modules(module, "module")
    for key, loss in getattr(model, "losses", {}).items():
        if isinstance(loss, torch.nn.Module):
            found |= _of_modules(loss, key)
            found |= _texts((f"{key} {_kind(loss)}, buffer {name!r}", each) for name, each in loss.named_buffers())
        else:
            found |= attributes(loss, f"{key} {_kind(loss)}")
    return found | attributes(model, f"model {_kind(model)}")


def attributes(owner: Any, what: str) -> dict[str, str]:
    """Return the attributes of an object that can be compared, unless emrun or torch defines its class.

    Args:
        owner: the object.
        what: what it is called.
    """
    if type(owner).__module__.startswith(_TRUSTED):
        return {}
    own = list(getattr(owner, "__dict__", {}).items())
    return _texts((f"{what}, attribute {name!r}", value) for name, value in own if name not in _OF_MODULES)


def _of_modules(root: torch.nn.Module, what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, part in root.named_modules():
        place = f"{what} {name!r} ({_kind(part)})" if name else f"{what} {_kind(part)}"
        found |= attributes(part, place)
        found |= _texts((f"{place}, buffer {key!r} {NOT_PERSISTENT}", each) for key, each in _not_persistent(part))
    return found


def _not_persistent(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(part._non_persistent_buffers_set):
        buffer = part._buffers.get(name)
        if buffer is not None and not is_lazy(buffer):
            yield name, buffer


def _texts(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the texts of values under their names, without those that cannot be compared."""
    found = {}
    for name, value in values:
        try:
            text = _text(value)
        except Exception:  # objects of the user's, and tensors of kinds that torch can do little with
            continue
        if text is not None:
            found[name] = text
    return found


def _digest(value: Any) -> str:
    return f"{DIGEST} {digest(value)}"


def _text(value: Any, depth: int = 0) -> str | None:
    """Return a text for a value that can be compared between processes, None for any other."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, torch.Tensor):
        is_readable = not is_lazy(value) and value.layout is torch.strided and not value.is_meta
        return _digest(value.detach().resolve_conj().resolve_neg()) if is_readable else None
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else _digest(value)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        if depth == _DEEPEST:  # or a container that holds itself
            return None
        entries = list(value.values()) if isinstance(value, Mapping) else list(value)
        parts = []
        for entry in entries:
            part = _text(entry, depth + 1)
            if part is None:
                return None
            parts.append(part)
        return _digest(sorted(parts) if isinstance(value, set | frozenset) else parts)
    state = _state_of_generator(value)
    return None if state is None else _digest(state)


def _state_of_generator(value: Any) -> Any:
    """Return the state of a random generator, None of anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state()
    return None


def _kind(value: Any) -> str:
    return type(value).__name__
