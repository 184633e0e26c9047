"""The first batch of each stream: its checksums tell later whether the data are still the same."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.errors import StorageError
from emrun.base.wording import listed
from emrun.ranks.group import ranks
from emrun.storage.code.files import Key, note_batch
from emrun.storage.run import Run
from emrun.streams.bookmark import digests_of
from emrun.streams.reuse import copied
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class FirstDigests:
    """Gives the checksums of first batches to the run: of the first evaluation and of pass 1 of each stream.

    Args:
        run: the run; None for none.
    """

    def __init__(self, run: Run | None) -> None:
        self._code = None if run is None else run.code
        self._seen: set[tuple[str, int]] = set()

    def note(self, stream: StreamWrapper, batch: Any) -> None:
        """Look at a batch if it is the first of its stream.

        Args:
            stream: the stream, whose position is behind the batch.
            batch: the batch, before hooks can change it.
        """
        position = stream.position
        key = stream.name, position.pass_number
        if self._code is None or key in self._seen or position.pass_number > 1 or position.batch != 1:
            return
        self._seen.add(key)
        with suppress(Exception):  # values of the user's own types can raise anything
            (copy,) = copied(iter([batch]))  # since the batch may change; the checksums would hold up the training
            self._code.later(partial(_write, self._code.directory, (*key, ranks().size), copy))


def _write(directory: Path, key: Key, batch: Any) -> None:
    stream, pass_number, _ = key
    try:
        different = note_batch(directory, key, digests_of(batch))
    except StorageError as error:
        _LOG.warning("the first batch of stream %r is not recorded: %s", stream, error)
        return
    except Exception:  # of values of the user's own types
        return
    if different:
        where = f"pass {pass_number}" if pass_number else "an evaluation"
        message = "stream %r has other data than when the run began: %s in the first batch of %s"
        _LOG.warning(message, stream, listed(list(map(repr, different))), where)
