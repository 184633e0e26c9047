"""The file `code/batches.jsonl` of a run: checksums of the first batch that each stream gave, for `emrun diff`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from emrun.base.censor import Censor
from emrun.base.fields import TEXT, fitting, mapping_of, optional, record, whole
from emrun.storage.code.files import make_code_directory
from emrun.storage.files import append_line
from emrun.storage.lines import read_lines

BATCHES = "batches.jsonl"
_MOST = 10_000  # entries that are read
_LINE = record(
    {"stream": TEXT, "pass": whole(), "ranks": whole(1), "sources": mapping_of(optional(TEXT))}, may_lack=("ranks",)
)

Key = tuple[str, int, int]
"""A stream, the number of the pass, 0 for an evaluation, and how many ranks share a batch; the sources are rank 0's."""


class FirstBatches:
    """Writes the checksums, a line for each stream, unless a run that is resumed has them.

    Args:
        directory: the directory `code` of the run; it is created with the first line.
        censor: removes values of the environment from names.
    """

    def __init__(self, directory: Path, censor: Censor) -> None:
        self._path = directory / BATCHES
        self._censor = censor

    def note(self, stream: str, pass_number: int, sources: Mapping[str, str | None], ranks: int = 1) -> list[str]:
        """Write the checksums of a stream's first batch unless they are there; return the sources that then differ.

        Args:
            stream: the name of the stream.
            pass_number: the number of the pass, 0 for an evaluation.
            sources: name of a source -> checksum of its values; None for values that have none.
            ranks: how many ranks share the batch.

        Raises:
            StorageError: the file cannot be read or written.
        """
        stream = self._censor(stream)
        before = recorded_batches(self._path.parent).get((stream, pass_number, ranks))
        now = {self._censor(name): sha for name, sha in sources.items()}
        if before is None:
            several = {"ranks": ranks} if ranks > 1 else {}
            make_code_directory(self._path.parent)
            append_line(self._path, json.dumps({"stream": stream, "pass": pass_number, **several, "sources": now}))
        return [name for name in {**(before or now), **now} if (before or now).get(name) != now.get(name)]


def recorded_batches(directory: Path) -> dict[Key, dict[str, str | None]]:
    """Return the checksums that are in a directory `code`; lines of another form are left out.

    Raises:
        StorageError: the file cannot be read.
    """
    found: dict[Key, dict[str, str | None]] = {}
    for line in read_lines(directory / BATCHES):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if fitting(entry, _LINE) and len(found) < _MOST:
            found.setdefault((entry["stream"], entry["pass"], entry.get("ranks", 1)), entry["sources"])
    return found
