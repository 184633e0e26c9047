"""What a model keeps beside what checkpoints have of it: attributes of its modules, buffers with `persistent=False`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from emrun.state import digest

NOT_PERSISTENT = "(persistent=False)"
"""Stands behind the name of such a buffer."""

DIGEST = "digest"
"""How the text of a value begins that is too long to be shown."""

_TRUSTED = ("emrun.", "torch.")  # their states are complete, what else they keep is their own business
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that every module has


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
            found |= {f"{key} {_kind(loss)}, buffer {name!r}": _digest(each) for name, each in loss.named_buffers()}
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
    own = {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in _OF_MODULES}
    texts = {f"{what}, attribute {name!r}": _text(value) for name, value in own.items()}
    return {name: text for name, text in texts.items() if text is not None}


def varying(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    """Return the names of what differs, or is in one of two only."""
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _of_modules(root: torch.nn.Module, what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, part in root.named_modules():
        place = f"{what} {name!r} ({_kind(part)})" if name else f"{what} {_kind(part)}"
        found |= attributes(part, place)
        found |= {f"{place}, buffer {key!r} {NOT_PERSISTENT}": _digest(each) for key, each in _not_persistent(part)}
    return found


def _not_persistent(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(part._non_persistent_buffers_set):
        buffer = part._buffers.get(name)
        if buffer is not None and not is_lazy(buffer):
            yield name, buffer


def _digest(value: Any) -> str:
    return f"{DIGEST} {digest(value)}"


def _text(value: Any) -> str | None:
    """Return a text for a value that can be compared between processes, None for any other."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, torch.Tensor):
        is_readable = not is_lazy(value) and value.layout is torch.strided and not value.is_meta
        return _digest(value) if is_readable else None
    if isinstance(value, np.ndarray):
        return _digest(value)
    if isinstance(value, np.random.Generator):
        return _digest(value.bit_generator.state)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        entries = list(value.values()) if isinstance(value, Mapping) else list(value)
        parts = [_text(part) for part in entries]
        if None in parts:
            return None
        return _digest(sorted(map(str, parts)) if isinstance(value, set | frozenset) else parts)
    if isinstance(value, type):
        return None
    take = getattr(value, "getstate", None) or getattr(value, "get_state", None)  # of a random generator, any library's
    return _digest(take()) if callable(take) else None


def _kind(value: Any) -> str:
    return type(value).__name__
