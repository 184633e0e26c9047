"""The file `code/batches.jsonl` of a run: checksums of the first batch that each stream gave."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from emrun.base.censor import Censor
from emrun.base.fields import TEXT, fitting, mapping_of, optional, record, whole
from emrun.base.wording import listed
from emrun.storage.code.files import make_code_directory
from emrun.storage.files import append_line, read_regular, storing, truncate

_LOG = logging.getLogger(__name__)

BATCHES = "batches.jsonl"
_LARGEST = 64_000_000  # bytes
LINE = record(
    {"stream": TEXT, "pass": whole(), "ranks": whole(1), "sources": mapping_of(optional(TEXT))}, may_lack=("ranks",)
)
"""A line of the file; of several ranks, it has the rows of rank 0."""


class FirstBatches:
    """Writes the checksums, a line for each stream; at a resume, compares them with those that are there.

    Args:
        directory: the directory `code` of the run; it is created with the first line.
        censor: removes values of the environment from names.
    """

    def __init__(self, directory: Path, censor: Censor) -> None:
        self._path = directory / BATCHES
        self._censor = censor
        self._known: dict[tuple[str, int, int], dict[str, str | None]] | None = None

    def note(self, stream: str, pass_number: int, sources: Mapping[str, str | None], ranks: int = 1) -> None:
        """Write the checksums of a stream's first batch unless they are there; log a warning if others are there.

        Args:
            stream: the name of the stream.
            pass_number: the number of the pass, 0 for an evaluation.
            sources: name of a source -> checksum of its values; None for values that have none.
            ranks: how many ranks share the batch; those of another number are not compared.

        Raises:
            StorageError: the file cannot be read or written.
        """
        stream = self._censor(stream)
        now = {self._censor(name): sha for name, sha in sources.items()}
        if self._known is None:
            self._known = self._read()
        before = self._known.get((stream, pass_number, ranks))
        if before == now:
            return
        if before is not None:
            different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            _LOG.warning(
                "stream %r begins with another batch than when the run began (sources: %s): its data, its code or its "
                "arguments have changed, or it is not a function of the seed; see %s",
                stream,
                listed(different),
                self._path,
            )
        self._known[stream, pass_number, ranks] = now
        several = {"ranks": ranks} if ranks > 1 else {}
        make_code_directory(self._path.parent)
        append_line(self._path, json.dumps({"stream": stream, "pass": pass_number, **several, "sources": now}))

    def _read(self) -> dict[tuple[str, int, int], dict[str, str | None]]:
        """Read the file, and remove an incomplete line at its end; lines of another form are left as they are."""
        with storing(self._path, "read"):
            content = read_regular(self._path, _LARGEST) if os.path.lexists(self._path) else b""
        truncate(self._path, content.rfind(b"\n") + 1)
        found = {}
        for line in content.splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if fitting(entry, LINE):
                found[entry["stream"], entry["pass"], entry.get("ranks", 1)] = entry["sources"]
        return found
