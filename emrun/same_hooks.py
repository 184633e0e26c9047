"""Which hook of a resumed run is which hook of before: by the arguments that name the hook, else by their order."""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any

Arguments = Mapping[str, str]
"""Name of an argument of a hook's constructor -> a checksum of its value, as it may be secret; see `noted`."""

_NAMES = "'"  # before the checksum of a value that can name the hook
_OBJECTS = ("model", "dataset", "output_dir")  # what the hooks of a run share


def arguments_of(hook: Any) -> Arguments:
    """Return the arguments of a hook; nothing for a hook made without its constructor."""
    return getattr(hook, "_noted_arguments", {})


def noted(name: str, hint: Any, value: Any) -> dict[str, str]:
    """Return an argument with its checksum; nothing for an object, which is not the same in another process.

    A text can name the hook, as a checkpoint, a variable or a file does; one of a few words cannot, nor an interval.
    """
    text = None
    with suppress(TypeError, ValueError):
        text = json.dumps(value, sort_keys=True, default=_named)
    if text is None or name in _OBJECTS:
        return {}
    can_name = _is_free(hint) and any(part[:1].isalpha() or part[:1] in "_./~" for part in text.split('"')[1::2])
    return {name: _NAMES * can_name + hashlib.sha256(text.encode()).hexdigest()[:16]}


def _named(value: Any) -> str:
    """Return the text for a path, a function or a class.

    Raises:
        TypeError: the value is another object.
    """
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError


def _is_free(hint: Any) -> bool:
    """Return whether a type hint allows any text; a hint that is not known does."""
    kind = typing.get_origin(hint)
    if kind in (typing.Union, UnionType):
        return any(_is_free(each) for each in typing.get_args(hint))
    return kind is not typing.Literal and hint is not type(None)  # None: it cannot be evaluated


def matched(before: Sequence[Arguments], now: Sequence[Arguments]) -> list[int | None]:
    """Return for each hook of a class the index of the hook that it was before, None for a new one.

    Hooks with the most equal names belong together, then those with the most equal other arguments, then those at the
    same place. A hook is a new one if none of the names by which the hooks of the class differ is equal.

    Args:
        before: the arguments of the hooks before, in their order; empty for those that are not known.
        now: those of the hooks now.
    """
    names = {name for hooks in (before, now) for hook in hooks for name in hook if _differ(hooks, name)}

    def rank(pair: tuple[int, int]) -> tuple[int, int, int, int]:
        equal = before[pair[0]].items() & now[pair[1]].items()
        named = sum(value.startswith(_NAMES) for _, value in equal)
        return -named, -len(equal), abs(pair[0] - pair[1]), pair[1]

    found: list[int | None] = [None] * len(now)
    for old, new in sorted(product(range(len(before)), range(len(now))), key=rank):
        own = names & before[old].keys() & now[new].keys()
        is_other = own and all(before[old][name] != now[new][name] for name in own)
        if not is_other and found[new] is None and old not in found:
            found[new] = old
    return found


def _differ(hooks: Sequence[Arguments], name: str) -> bool:
    """Return whether hooks have different names in an argument."""
    values = {hook.get(name, "") for hook in hooks}
    return len(values) > 1 and any(value.startswith(_NAMES) for value in values)
