"""How often runs were evaluated on streams that their training does not use: each look makes such a result weaker."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from emrun.base.errors import ConfigError, StorageError
from emrun.runs.stored_run import StoredRun
from emrun.storage.lock import EVALUATIONS

_NOT_OF_CONFIG = ("seed", "name", "code_directory")


def looks_of(run: StoredRun) -> Counter[str]:
    """Return how often a run was evaluated on each stream that its training does not use, by the results in it."""
    training_streams: set[str] = set()
    with suppress(StorageError):
        for epoch in run.epochs():
            training_streams |= epoch["streams"].keys()
    names: list[str] = []
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(run.directory / EVALUATIONS) if entry.is_dir(follow_symlinks=False)]
    matches = (re.fullmatch(r"(.+)-[0-9]+", name) for name in names)
    return Counter(match[1] for match in matches if match is not None and match[1] not in training_streams)


def looks_by_config(runs: Iterable[StoredRun]) -> dict[Path, Counter[str]]:
    """Return for each run how often all that have its config, but perhaps another seed or name, were evaluated so."""
    runs = list(runs)
    configs = {run.directory: _config_of(run) for run in runs}
    looks: dict[str, Counter[str]] = {}
    for run in runs:
        looks.setdefault(configs[run.directory], Counter()).update(looks_of(run))
    return {directory: looks[config] for directory, config in configs.items()}


def _config_of(run: StoredRun) -> str:
    try:
        kept = {name: value for name, value in run.written.items() if name not in _NOT_OF_CONFIG}
    except (ConfigError, StorageError):
        return str(run.directory)
    return json.dumps(kept, sort_keys=True, default=str)
