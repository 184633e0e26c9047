"""Finds the keys that overrides of a config can set, and the streams of its dataset; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emrun.base.errors import UsageError
from emrun.base.sources import NEW
from emrun.base.user_modules import find_user_modules
from emrun.base.wording import meant_of
from emrun.config.config import Config
from emrun.config.names import short_names
from emrun.config.overrides import hook_entry
from emrun.config.plan import code_directories, hook_entries
from emrun.config.planner import Planner
from emrun.config.sections import SECTIONS
from emrun.config.source_finder import Unimported
from emrun.config.yaml_tree import Node

_DEEPER = ("dataset", "eval", "hooks", "main_loop", "model", "vars")  # sections that are mappings
_WRITTEN = re.compile(r"[\w-]+")  # a key that needs no quotes, neither in YAML nor in a shell


def keys_below(config: Config, above: Sequence[str]) -> dict[str, bool]:
    """Return the keys of a mapping of a config: those it has, and those that the signature of its class allows.

    Only the section of the mapping is read, so that a shell does not wait.

    Args:
        config: the config.
        above: the path of the mapping, as overrides write it; empty for the sections.

    Returns:
        The key -> whether there may be keys below it.
    """
    tree = config.root
    if not above:
        return {**{name: name in _DEEPER for name in SECTIONS}, **_keys_in(tree)}
    find_user_modules(*code_directories(tree))
    planner = Planner(Unimported())
    if above[0] == "hooks":
        entries = map(hook_entry, hook_entries(tree))
        hooks = {str(name): arguments for name, arguments in entries if name is not None}
        if len(above) == 1:
            return dict.fromkeys(filter(_WRITTEN.fullmatch, [*hooks, *short_names("hook", installed=False)]), True)
        node = hooks.get(above[1])
        planner.hook(above[1], node, tree, f"hooks.{above[1]}")
        node = None if node is None else node.get(*above[2:])
    else:
        others = {name: None for name in ("dataset", "model", "main_loop") if name != above[0]}
        planner.config(tree, (), {**others, "hooks": ()})
        node = tree.get(*above)
    arguments = [name for key, name in planner.places if re.sub(r"\[(\d+)\]", r".\1", key).split(".") == list(above)]
    keys = dict.fromkeys(sorted(arguments), False)
    if node is not None:
        keys |= _keys_in(node)
    return keys


def streams_of(config: Config) -> list[str]:
    """Return the names of the streams that the dataset of a config has, as far as its source says."""
    find_user_modules(*code_directories(config.root))
    finder = Unimported()
    recipe = Planner(finder).section(config.root.get("dataset"), "dataset")
    streams = finder.streams(recipe.target) if recipe is not None else None
    return list(streams or ())


def check_has_stream(config: Config, name: str, advice: str = "") -> None:
    """Check that the dataset of a config has a stream, as far as its source says.

    Args:
        config: the config.
        name: the name of the stream.
        advice: what the error says at its end.

    Raises:
        UsageError: there is no such stream.
    """
    known = streams_of(config)
    if known and name not in (*known, NEW):  # of which another error says what it is
        raise UsageError(f"the dataset has no stream {name!r}{meant_of(name, known)}{advice}")


def _keys_in(node: Node) -> dict[str, bool]:
    """Return the keys of a mapping, or the indices of a list, that are in the config."""
    named = {key: isinstance(child.value, dict | list) for key, child in node.children().items()}
    return {key: is_deeper for key, is_deeper in named.items() if _WRITTEN.fullmatch(key)}
