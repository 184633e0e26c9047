"""A checkpoint of a sharded model: each rank writes its own files, and rank 0 commits it when all have done so."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from emrun.base.errors import StorageError, reason_of
from emrun.ranks.group import Ranks
from emrun.storage.checkpoints.shards import Shard, write_places

_LOG = logging.getLogger(__name__)

LONGEST = 1800.0
"""Seconds that a rank waits for the files of the others."""
_Save = Callable[[Path], dict[str, Any]]


def write_together(
    ranks: Ranks, write: Callable[[Path], list[Shard]], commit: Callable[[_Save], Path] | None = None
) -> Path | None:
    """Write a checkpoint; all ranks call this, each in a thread of its own.

    Args:
        ranks: the ranks, with a process group that only these threads use.
        write: writes what this rank has to a directory, and returns that.
        commit: on rank 0: commits what the function that it is called with writes.

    Returns:
        On rank 0 what `commit` returns, the directory of the checkpoint.

    Raises:
        StorageError: on rank 0, another rank cannot write its files.
        RankFailed: another rank has ended, or has not written its files in time.
    """
    if commit is None:
        place: Path | None = ranks.from_first("directory of the checkpoint", None)
        if place is not None:
            _written(ranks, write, place)
        return None
    is_broadcast = False

    def save(directory: Path) -> dict[str, Any]:
        nonlocal is_broadcast
        is_broadcast = True
        return _written(ranks, write, ranks.from_first("directory of the checkpoint", directory.absolute()))

    try:
        return commit(save)
    finally:
        if not is_broadcast:
            ranks.from_first("directory of the checkpoint", None)


def _written(ranks: Ranks, write: Callable[[Path], list[Shard]], directory: Path) -> dict[str, Any]:
    """Write what this rank has; return on rank 0 the checksums and sizes of the files of all ranks."""
    began = monotonic()
    error = None
    shards: list[Shard] = []
    try:
        shards = write(directory)
    except Exception as failure:  # the model's code may raise anything
        error = failure
    ended = monotonic()
    reason = None if error is None else (getattr(error, "errno", None), reason_of(error))
    gathered = ranks.gathered("files of the checkpoint", (shards, reason, ended - began))
    if not gathered:
        return {}
    waited = monotonic() - ended
    if error is not None:
        raise error
    for rank, (_, reason, _) in enumerate(gathered):
        if reason is not None:
            raise StorageError(reason[0] or errno.EIO, f"rank {rank} of {ranks.size}: {reason[1]}")
    sizes = [sum(file["size"] for shard in shards for file in shard["files"].values()) for shards, _, _ in gathered]
    lines = [f"rank {rank} wrote {size:,} bytes in {gathered[rank][2]:.2f} s" for rank, size in enumerate(sizes)]
    _LOG.info("checkpoint of shards: %s; rank 0 waited %.2f s for the others", ", ".join(lines), waited)
    return write_places(directory, [shard for shards, _, _ in gathered for shard in shards])
