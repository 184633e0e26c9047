"""Reads how far the files go that W&B writes in its offline mode: records of protocol buffers in blocks of 32 KiB."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 1 << 15
_FILE_HEAD = 7  # bytes at the beginning of the first block
_HEAD = struct.Struct("<IHB")  # checksum, length and kind of a part of a record
_WHOLE, _FIRST, _LAST = 1, 2, 4


def newest_step(directory: Path, identity: str) -> int | None:
    """Return the largest step of a run in the offline directories of W&B; None if there is none.

    Args:
        directory: the directory `wandb`.
        identity: the id of the run.
    """
    from wandb.proto import wandb_internal_pb2

    record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]  # is made at run time

    newest = None
    for path in sorted(directory.glob(f"offline-run-*-{identity}/run-{identity}.wandb")):
        for data in records_of(path.read_bytes()):
            found = record.FromString(data)
            if found.WhichOneof("record_type") == "history":
                newest = max(-1 if newest is None else newest, found.history.step.num)
    return newest


def records_of(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file; what a killed process has not written completely is left out."""
    at, parts = _FILE_HEAD, b""
    while at + _HEAD.size <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(content, at)
        part = content[at + _HEAD.size : at + _HEAD.size + length]
        if kind == 0 or len(part) < length:
            return
        at += _HEAD.size + length
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            yield parts
