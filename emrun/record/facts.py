"""What a run is made from, as trackers show it: the values of its config by key, the command, the git commit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from emrun.storage.plain import read_plain
from emrun.storage.run import CONFIG
from emrun.storage.trace import read_trace

_LARGEST = 64_000_000  # bytes


@dataclass(frozen=True)
class Facts:
    """What a run is made from.

    Args:
        name: the name of the run directory.
        config: key -> value of the config, such as `model.optimizer.lr`; the arguments of a hook are
            `hooks.NAME.ARGUMENT`. Values are strings, numbers, booleans and None; a list is a JSON string. References
            such as `${env:TOKEN}` are not replaced.
        command: the command that started the run.
        git_commit: the commit of the code, None if it is not known.
        seed: the seed of the run.
        host: the name of the machine.
    """

    name: str
    config: Mapping[str, str | float | bool | None]
    command: str
    git_commit: str | None
    seed: int | None
    host: str

    @property
    def about(self) -> dict[str, str | None]:
        """Command, commit and machine, as trackers get them beside the config."""
        return {"command": self.command, "git_commit": self.git_commit, "host": self.host}


def facts_of(directory: Path) -> Facts:
    """Return the facts of a run, from its `config.yaml` and `trace.yaml`.

    Raises:
        StorageError: `config.yaml` cannot be read.
    """
    path = directory / CONFIG
    try:
        config = read_plain(path, _LARGEST) if os.path.lexists(path) else None
    except YAMLError:
        config = None
    trace = read_trace(directory)
    command = trace.get("command") or []
    return Facts(
        directory.resolve().name,
        dict(_flat("", config if isinstance(config, Mapping) else {})),
        " ".join(map(str, command)),
        trace.get("git_commit"),
        trace.get("seed"),
        str(trace.get("host") or ""),
    )


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(f"{key}.{name}".removeprefix("."), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            if isinstance(item, Mapping) and len(item) == 1:  # a hook with arguments, a stream with an interval
                yield from _flat(key, item)
            else:
                yield from _flat(f"{key}.{index if isinstance(item, Mapping) else item}", item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield key, value
    else:
        yield key, json.dumps(value, default=str)
