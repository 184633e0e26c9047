"""The values of a run's config, one by one, under the keys that overrides have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emrun.base.errors import ConfigError, Position, StorageError
from emrun.config.yaml_tree import Node, node_of
from emrun.runs.config_comparison import children
from emrun.runs.stored_run import StoredRun
from emrun.storage.run import CONFIG

_MOST = 2_000
_DEEPEST = 50


def values_of(run: StoredRun) -> dict[str, Any]:
    """Return the values of the config that are neither mappings nor lists, as they are written: key -> value.

    An empty mapping or list is a value, too; so is a hook without arguments, whose value is an empty mapping. A config
    that cannot be read has none, and is a problem of the run.
    """
    try:
        tree = node_of(run.written, Position(CONFIG))
    except (ConfigError, StorageError) as error:
        run.note(str(error).partition("\n")[0])
        return {}
    found: dict[str, Any] = {}
    for key, value in _flat(tree, ()):
        if len(found) == _MOST:
            run.note(f"the config has more than {_MOST:,} values; the others are left out")
            break
        found[key] = value
    return found


def _flat(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    below = children(node, path) if len(path) < _DEEPEST else {}
    if not below:
        yield ".".join(path), node.plain()
    for key, each in below.items():
        yield from _flat(each, (*path, key))
