"""Finds out why an object cannot be pickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

_DEPTH = 20  # the number of nested attributes and items that are examined


def what_cannot_be_pickled(part: Any) -> str:
    """Return the innermost part of an object that cannot be pickled: its place in the object, and its type.

    Args:
        part: an object that cannot be pickled; for a method, its object is examined.
    """
    owner = getattr(part, "__self__", None)
    if owner is None or _can_be_pickled(owner):
        return f"its function {getattr(part, '__qualname__', '')} ({type(part).__name__})"
    place, found = type(owner).__name__, owner
    for _ in range(_DEPTH):
        inner = next(((name, each) for name, each in _parts(found) if not _can_be_pickled(each)), None)
        if inner is None:
            break
        place, found = place + inner[0], inner[1]
    return f"{place} ({type(found).__name__})"


def _can_be_pickled(part: Any) -> bool:
    try:
        with Path(os.devnull).open("wb") as nowhere:
            pickle.dump(part, nowhere)
    except Exception:
        return False
    return True


def _parts(whole: Any) -> list[tuple[str, Any]]:
    if isinstance(whole, dict):
        return [(f"[{key!r}]", value) for key, value in whole.items()]
    if isinstance(whole, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(whole)]
    return [(f".{name}", value) for name, value in getattr(whole, "__dict__", {}).items()]
