"""The first batch of each stream: its checksums tell later whether the data are still the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emrun.base.encoding import digest
from emrun.base.errors import StorageError
from emrun.base.sources import is_nested
from emrun.base.wording import listed
from emrun.loop.batch_calls import Calls
from emrun.ranks.group import ranks
from emrun.storage.code.files import Key, note_batch
from emrun.storage.run import Run
from emrun.streams.stream import StreamPosition, StreamWrapper

_LOG = logging.getLogger(__name__)
_MOST = 1_000_000  # bytes of a batch that are looked at; this takes about a millisecond
_ENTRY = 1000  # bytes that a value counts as besides, because it takes as long


class FirstDigests:
    """Gives the checksums of first batches to the run: of the first evaluation and of pass 1 of each stream.

    Args:
        run: the run; None for none.
    """

    def __init__(self, run: Run | None) -> None:
        self._code = None if run is None else run.code
        self._seen: set[tuple[str, int]] = set()

    def begin_batches(self, stream: StreamWrapper, train: bool, calls: Calls) -> None:
        """Look at the first batch of a stream."""
        if self._code is not None:
            calls.before.append(lambda batch: self.note(stream.name, stream.position, batch))

    def note(self, stream: str, position: StreamPosition, batch: Any) -> None:
        """Look at a batch if it is the first of its stream.

        Args:
            stream: the name of the stream.
            position: the position after the batch.
            batch: the batch, before hooks can change it.
        """
        key = stream, position.pass_number
        if self._code is None or key in self._seen or position.pass_number > 1 or position.batch != 1:
            return
        self._seen.add(key)
        # copied, since the batch may change; the checksums would hold up the training
        self._code.later(partial(_write, self._code.directory, (*key, ranks().size), beginnings(batch)))


def _write(directory: Path, key: Key, values: Mapping[str, Any]) -> None:
    stream, pass_number, _ = key
    try:
        different = note_batch(directory, key, digests(values))
    except StorageError as error:
        _LOG.warning("the first batch of stream %r is not recorded: %s", stream, error)
        return
    if different:
        where = f"pass {pass_number}" if pass_number else "an evaluation"
        message = "stream %r has other data than when the run began: %s in the first batch of %s"
        _LOG.warning(message, stream, listed(list(map(repr, different))), where)


def beginnings(batch: Any) -> dict[str, list[Any]]:
    """Return a copy of the beginning of each source of a batch, in a list, which is empty for objects of other types.

    Of a large batch only the beginning counts: of each source as many bytes as make about a megabyte together, and of
    lists as many numbers and strings as can be looked at in the same time.
    """
    found: dict[str, list[Any]] = {}
    for name, values in batch.items() if isinstance(batch, Mapping) else ():
        found[str(name)] = []
        with suppress(Exception):  # values of the user's own types can raise anything
            found[str(name)].append(_beginning(values, [_MOST // len(batch)]))
    return found


def digests(values: Mapping[str, Sequence[Any]]) -> dict[str, str | None]:
    """Return a checksum of each of the `beginnings` of a batch; None for those that are empty."""
    found: dict[str, str | None] = dict.fromkeys(values)
    for name, each in values.items():
        with suppress(Exception):
            found[name] = digest(*each)
    return found


def _beginning(values: Any, left: list[int]) -> Any:
    """Copy the first values, and the lengths of all, in types of which `digest` makes a checksum.

    Args:
        values: a source, or a part of it.
        left: the number of bytes that may still be looked at, which is counted down.

    Raises:
        TypeError: a value is of another type.
    """
    left[0] -= _ENTRY
    if is_nested(values):
        values = list(values.unbind())
    if isinstance(values, torch.Tensor) or (isinstance(values, np.ndarray) and values.dtype != object):
        first: Any = values
        while first.nbytes > max(left[0], 0) and first.ndim and len(first):
            rows = max(left[0], 0) * len(first) // first.nbytes
            first = first[:rows] if rows else first[0]
        left[0] -= first.nbytes
        return [str(tuple(values.shape)), first.detach().clone() if isinstance(first, torch.Tensor) else first.copy()]
    if isinstance(values, Mapping | list | tuple | np.ndarray):
        entries = []
        for each in values.items() if isinstance(values, Mapping) else values:
            if left[0] <= 0:
                break
            entries.append(_beginning(each, left))
        return [len(values), entries]
    if isinstance(values, str | bytes):
        most = max(left[0], 0)
        left[0] -= len(values)
        return [len(values), values[:most]]
    if isinstance(values, np.generic | bool | int | float | complex | None):
        return values
    raise TypeError(type(values).__name__)
