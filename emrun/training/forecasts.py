"""The forecast of `emrun check`, kept in the user's cache so that a run of the same config can take it over."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from emrun.base.arguments import expanded
from emrun.base.errors import StorageError
from emrun.base.fields import fitting, mapping_of
from emrun.config.config import Config
from emrun.config.interpolation import escaped
from emrun.config.plan import with_statistics
from emrun.storage.files import read_regular, written_aside
from emrun.storage.trace import FORECAST, Clock, local_time

_MOST = 100  # configs
_LARGEST = 1_000_000  # bytes


def keep_forecast(config: Config, forecast: Mapping[str, Any], clock: Clock = local_time) -> None:
    """Keep the forecast of a config, the newest of 100; nothing happens where the cache cannot be written.

    Args:
        config: the config.
        forecast: what a run takes, see `try_out`.
        clock: returns the time.
    """
    key = _key(config)
    others = {each: found for each, found in _kept().items() if each != key}
    made = {"made": clock().isoformat(timespec="seconds"), "values": forecast}
    with suppress(OSError):
        _place().parent.mkdir(parents=True, exist_ok=True)
        with written_aside(_place(), flushes=False) as aside:  # the next `check` makes what is lost
            aside.write_text(json.dumps(dict([*others.items(), (key, made)][-_MOST:])), encoding="utf-8")


def kept_forecast(config: Config) -> Mapping[str, Any] | None:
    """Return the forecast of the last check of a config in the same directory, see `FORECAST`; None without one."""
    return _kept().get(_key(config))


def _kept() -> dict[str, Any]:
    with suppress(StorageError, ValueError, RecursionError):
        found = json.loads(read_regular(_place(), _LARGEST))
        return found if fitting(found, mapping_of(FORECAST)) else {}
    return {}


def _place() -> Path:
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "emrun" / "forecasts.json"


def _key(config: Config) -> str:
    """Return a digest of what a config says about a run; the seed changes no forecast."""
    here = {"code_directory": escaped(str(Path.cwd()))}
    plain = with_statistics(config).without("sweep", "seed").with_defaults(here).root.plain()
    return sha256(json.dumps(plain, sort_keys=True, default=repr).encode(errors="surrogateescape")).hexdigest()
