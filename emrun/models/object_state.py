"""The state of an object that keeps numbers, such as a metric: what a checkpoint stores of it."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from emrun.base.encoding import decode, digest, encode
from emrun.base.errors import StateError
from emrun.models.outputs import is_of_streams

_CONSTANTS = (
    *(type(None), bool, int, float, str, bytes),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    np.ufunc,
    np.dtype,
    torch.dtype,
    torch.device,
    type,
    enum.Enum,
    inspect.Signature,
    re.Pattern,
    PurePath,
)
"""What an object may keep although no checkpoint stores it, because it does not change."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that every module has


class ObjectState:
    """Takes and restores the state of an object, exactly.

    The state of an object with `state_dict` and `load_state_dict` is what they return and take. That of any other
    object is its attributes: numbers, strings, tensors, NumPy arrays, and lists, tuples and dicts of these. Of a
    module, the buffers are part of it, and so are the submodules; the parameters are not. An attribute that is an
    object with a state of its own is handled in the same way.

    Args:
        key: the name of the object in messages.
        thing: the object, as it was built.
        device: the device of tensors that are not on the CPU.
    """

    def __init__(self, key: str, thing: Any, device: torch.device) -> None:
        self._key, self._thing, self._device = key, thing, device
        self._unsaved: dict[tuple[str, str], Any] = {}  # (path, attribute) -> the value that it was built with
        self._built: dict[str, str] = {}  # path -> checksum of the attributes that the object was built with
        for path, part in _parts(thing):
            if not has_own_state(part):
                kept = {}
                for name, value in _attributes(part).items():
                    try:
                        kept[name] = encode(value, "", exact=True)
                    except StateError:
                        self._unsaved[path, name] = value
                self._built[path] = digest(kept)

    def take(self) -> dict[str, Any]:
        """Return a copy of the state, in plain types and tensors.

        Raises:
            StateError: a part of the state cannot be saved; the message names it.
        """
        found = {}
        for path, part in _parts(self._thing):
            values: Any = {}
            if has_own_state(part):
                there = part.state_dict()
                values = encode(there, f"{self._key}{path}.state_dict()", copied=True, exact=True)
            else:
                there = _attributes(part)
                for name, value in list(there.items()):
                    try:
                        values[name] = encode(value, f"{self._key}{path}: attribute {name!r}", copied=True, exact=True)
                    except StateError as error:
                        if not self._is_constant(path, part, name, value):
                            advice = f"define state_dict() and load_state_dict() in {type(part).__name__}"
                            raise StateError(f"{error}, or {advice}") from None
                        del there[name]
            found[path] = {
                "class": _class_of(part),
                "built": self._built.get(path, ""),
                "values": values,
                "of_cpu": [each.is_cpu for each in tree_leaves(there) if isinstance(each, Tensor)],
            }
        return found

    def fits(self, state: Mapping[str, Any] | None) -> bool:
        """Return whether there is a state, of an object that was built in the same way."""
        now = {path: (_class_of(part), self._built.get(path, "")) for path, part in _parts(self._thing)}
        return now == {path: (each["class"], each["built"]) for path, each in (state or {}).items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `take` returned, of an object that was built in the same way."""
        for path, part in list(_parts(self._thing)):
            of_cpu = iter(state[path]["of_cpu"])
            now = tree_map_only(
                Tensor,
                lambda each: each if next(of_cpu) else each.to(self._device),  # noqa: B023 - is called at once
                decode(copy.deepcopy(state[path]["values"])),
            )
            if has_own_state(part):
                part.load_state_dict(now)
                continue
            buffers = getattr(part, "_buffers", {})
            for name in [*_attributes(part), *now]:
                there = buffers if name in buffers else vars(part)
                if name in now:
                    there[name] = now[name]
                elif (path, name) in self._unsaved:
                    there[name] = self._unsaved[path, name]
                else:
                    there.pop(name, None)

    def _is_constant(self, path: str, part: Any, name: str, value: Any) -> bool:
        """Return whether an attribute that cannot be saved need not be, because it stays what it was built with."""
        if self._unsaved.get((path, name)) is not value:
            return False
        return hasattr(part, "metric_state") or _is_made_of_constants(value)  # torchmetrics names its states itself


def has_own_state(thing: Any) -> bool:
    """Return whether an object saves and loads its state itself; a module's `state_dict` may leave out buffers."""
    own = (getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None))
    return not isinstance(thing, torch.nn.Module | type) and all(map(callable, own))


def _class_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_part(value: Any) -> bool:
    """Return whether an attribute is an object with a state of its own."""
    if isinstance(value, type | Tensor):
        return False
    return isinstance(value, torch.nn.Module) or has_own_state(value) or is_of_streams(value)


def _parts(thing: Any, path: str = "", seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for an object and the objects with a state of their own inside."""
    if any(thing is each for each in seen):
        return
    yield path, thing
    if has_own_state(thing):
        return
    inside = dict(thing.named_children()) if isinstance(thing, torch.nn.Module) else {}
    for name, value in [*inside.items(), *(pair for pair in _all_attributes(thing).items() if _is_part(pair[1]))]:
        yield from _parts(value, f"{path}.{name}", (*seen, thing))


def _attributes(part: Any) -> dict[str, Any]:
    """Return the attributes of an object, and the buffers of a module, without objects with a state of their own."""
    return {name: value for name, value in _all_attributes(part).items() if not _is_part(value)}


def _all_attributes(part: Any) -> dict[str, Any]:
    if not hasattr(part, "__dict__") or any(vars(each).get("__slots__") for each in type(part).__mro__):
        message = f"{type(part).__name__} has slots, which cannot be saved"
        raise StateError(f"{message}; define state_dict() and load_state_dict()")
    if isinstance(part, torch.nn.Module):
        return {name: value for name, value in vars(part).items() if name not in _OF_MODULES} | part._buffers
    return dict(vars(part))


def _is_made_of_constants(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_made_of_constants, value))
    if isinstance(value, dict):
        return all(map(_is_made_of_constants, value.values()))
    return isinstance(value, _CONSTANTS)
