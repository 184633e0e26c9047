"""Of which kinds the saved values of an optimizer or a scheduler must be: those of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from emrun.errors import StateError
from emrun.fields import ANYTHING, FLAG, TEXT, Kind, mapping_of, optional, record, sequence_of

CLASS_AND_STATE = record({"class": TEXT, "configured": ANYTHING, "state": ANYTHING})
"""What is saved of an optimizer or a scheduler."""


def check_class(saved: Mapping[str, Any], key: str, kind: str) -> None:
    """Check that a saved optimizer or scheduler is of the class that the config has now.

    Raises:
        StateError: it is not.
    """
    if saved["class"] != kind:
        raise StateError(f"model.{key} was {saved['class']}, is {kind}; a resume cannot change it")


def like(own: Any, may_lack: Collection[str] = (), *, same_length: bool = False) -> Kind:
    """Return the kind of what stands in the place of a value in a saved state.

    Args:
        own: the value.
        may_lack: where it is a mapping, the keys that may be missing.
        same_length: whether lists must have as many entries.
    """
    if own is None:
        return ANYTHING
    if isinstance(own, bool):
        return optional(FLAG)
    if isinstance(own, int | float) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        return Kind("a number", is_one_number)
    if isinstance(own, torch.Tensor):
        return Kind("a tensor", lambda value: isinstance(value, torch.Tensor))
    if isinstance(own, str):
        return TEXT
    if isinstance(own, Mapping) and all(isinstance(name, str) for name in own):
        return record({name: like(each, same_length=same_length) for name, each in own.items()}, may_lack)
    if isinstance(own, list | tuple):
        parts = own[0] if own else None
        entries = sequence_of(mapping_of(ANYTHING) if isinstance(parts, Mapping) else like(parts))
        if not same_length:
            return entries
        allowed = f"a list of {len(own)} entries"
        return Kind(allowed, lambda value: entries.fits(value) and len(value) == len(own), entries.look_inside)
    return Kind(f"a {type(own).__name__}", lambda value: isinstance(value, type(own)))


def is_one_number(value: Any) -> bool:
    """Tell whether a value is a number, or a tensor of one."""
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_tensor or (type(value) is float or (type(value) is int and abs(value) < 2**63))


def is_of_torch(value: Any) -> bool:
    """Tell whether a value is of one of torch's own classes."""
    return type(value).__module__.partition(".")[0] == "torch"
