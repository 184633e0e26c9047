"""The errors that emrun raises, to be caught by programs; each is an `EmrunError`.

from emrun.errors import ConfigError

try:
    training = create_training("config.yaml")
except ConfigError as error:
    print(error.problems)
"""

from emrun.base.errors import (
    ArgumentError,
    ConfigError,
    DataChanged,
    DifferentRanks,
    DownloadError,
    EmrunError,
    ExportError,
    HookError,
    MissingExtra,
    RankFailed,
    ReadTimeout,
    RunExists,
    RunInUse,
    StateError,
    StorageError,
    StreamError,
    UsageError,
)

__all__ = [
    "ArgumentError",
    "ConfigError",
    "DataChanged",
    "DifferentRanks",
    "DownloadError",
    "EmrunError",
    "ExportError",
    "HookError",
    "MissingExtra",
    "RankFailed",
    "ReadTimeout",
    "RunExists",
    "RunInUse",
    "StateError",
    "StorageError",
    "StreamError",
    "UsageError",
]
