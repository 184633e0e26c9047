"""What the arguments of the commands are completed with in a shell: configs, override keys, streams, runs, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_UNFINISHED = "partial"  # an item after which the shell writes no blank
_FILE, _DIRECTORY = "file", "dir"  # the shell completes these
_PLAIN = "plain"

_Items = Iterable[tuple[str, str]]
_Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def quietly(items: Callable[[click.Context, str], _Items]) -> _Completer:
    """Return a completer that finds nothing where something is wrong, for example with the config."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            return [CompletionItem(value, type=kind) for value, kind in items(context, incomplete)]
        except Exception:  # also the user's code may fail; a message would stand in the typed line
            return []

    return complete


def named(names: Iterable[str], incomplete: str) -> list[tuple[str, str]]:
    """Return the items for those of some names that begin with what is typed."""
    return [(name, _PLAIN) for name in names if name.startswith(incomplete)]


def _overrides(context: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    from emrun.config.config import read_config
    from emrun.config.override_keys import keys_below

    deletes = incomplete.startswith("~")
    if "=" in incomplete:
        return
    head, dot, tail = incomplete.removeprefix("~").rpartition(".")
    source = context.params.get("config") or context.params["directory"]
    for name, is_deeper in keys_below(read_config(source), head.split(".") if head else []).items():
        if name.startswith(tail):
            written = f"{'~' * deletes}{head}{dot}{name}"
            if is_deeper:
                yield f"{written}.", _UNFINISHED
            elif deletes:
                yield written, _PLAIN
            else:
                yield f"{written}=", _UNFINISHED


def _streams_or_overrides(context: click.Context, incomplete: str) -> _Items:
    from emrun.config.config import read_config
    from emrun.config.override_keys import streams_of

    source = context.params.get("config") or context.params["directory"]
    found = [] if re.search(r"[.~=]", incomplete) else named(streams_of(read_config(source)), incomplete)
    return found or list(_overrides(context, incomplete))


def _at_hand(context: click.Context, incomplete: str) -> _Items:
    from emrun.config.names import short_names

    kinds = ("hooks", "datasets", "models", "optimizers", "schedules", "metrics")
    names = (name for kind in ("hook", "dataset") for name in short_names(kind, installed=False))
    return named((*kinds, *names), incomplete)


complete_configs = quietly(lambda context, incomplete: [(incomplete, _FILE)])
"""Lets the shell complete a config: a file."""
complete_runs = quietly(lambda context, incomplete: [(incomplete, _DIRECTORY)])
"""Lets the shell complete a run: a directory."""
complete_overrides = quietly(_overrides)
"""Completes the key of an override, one part at a time, from the config and the signatures of its classes."""
complete_streams = quietly(_streams_or_overrides)
"""Completes a stream of the dataset, or else an override."""
complete_names = quietly(_at_hand)
"""Completes a name that `emrun show` explains."""
