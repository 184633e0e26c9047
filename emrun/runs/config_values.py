"""The values of a run's config, one by one, under the keys that overrides have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emrun.base.errors import ConfigError, StorageError
from emrun.runs.stored_run import StoredRun

_MOST = 2_000
_DEEPEST = 50


def values_of(run: StoredRun) -> dict[str, Any]:
    """Return the values of the config that are neither mappings nor lists, as they are written: key -> value.

    An empty mapping or list is a value, too; so is a hook without arguments, whose value is an empty mapping. A config
    that cannot be read has none, and is a problem of the run.
    """
    try:
        tree = run.written
    except (ConfigError, StorageError) as error:
        run.note(str(error).partition("\n")[0])
        return {}
    hooks = tree.get("hooks")
    if isinstance(hooks, list):
        tree = {**tree, "hooks": _by_name(hooks)}
    found: dict[str, Any] = {}
    for key, value in _flat(tree, (), 0):
        if len(found) == _MOST:
            run.note(f"the config has more than {_MOST:,} values; the others are left out")
            break
        found[key] = value
    return found


def _by_name(hooks: list[Any]) -> dict[str, Any]:
    """Return the arguments of hooks by name; those of a hook that is listed twice by index and name."""
    pairs = []
    for each in hooks:
        is_whole = isinstance(each, dict) and len(each) == 1
        pairs.append(next(iter(each.items())) if is_whole else (each, {}))
    names = [str(name) for name, _ in pairs]
    return {
        name if names.count(name) == 1 else f"{index}.{name}": {} if arguments is None else arguments
        for index, (name, (_, arguments)) in enumerate(zip(names, pairs, strict=True))
    }


def _flat(value: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, Any]]:
    is_nested = isinstance(value, dict | list) and value and depth < _DEEPEST
    if not is_nested:
        yield ".".join(path), value
        return
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in entries:
        yield from _flat(each, (*path, str(key)), depth + 1)
