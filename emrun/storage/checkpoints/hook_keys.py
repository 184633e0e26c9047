"""The keys under which a checkpoint has the states of hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from emrun.epoch_data import declared
from emrun.hook import AbstractHook


def keyed(hooks: Sequence[AbstractHook]) -> dict[str, AbstractHook]:
    """Return the key of the state of each hook in a checkpoint -> the hook.

    Hooks of one class are counted in their order. One that saves checkpoints is known by their name instead, so that
    it keeps what it knows of them whatever is listed before it.
    """
    found: dict[str, AbstractHook] = {}
    counts: Counter[str] = Counter()
    for hook in hooks:
        kind = f"{type(hook).__module__}.{type(hook).__qualname__}"
        if saves := declared(hook, "saves"):
            key = f"{kind} of {saves[0]!r}"
        else:
            counts[kind] += 1
            key = kind if counts[kind] == 1 else f"{kind} number {counts[kind]}"
        found[key] = hook
    return found


def class_of(key: str) -> str:
    """Return the class in a key of `keyed`."""
    return key.partition(" ")[0]


def short_key(key: str) -> str:
    """Return a key of `keyed` for messages, without the module: `ComputeStats number 2`, `SaveBest of 'best'`."""
    return class_of(key).rpartition(".")[2] + key.removeprefix(class_of(key))
