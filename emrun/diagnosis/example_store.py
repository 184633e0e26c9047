"""Examples that are the same, found with little memory: checksums of all examples, in a database in a file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_CACHE = 64_000  # KB that SQLite keeps in memory
_SHOWN = 5
_LONGEST = 60  # characters of an id
Entry = tuple[str, bytes, bytes]
"""An example: its id, the checksum of what the model reads, and that of its labels."""


@dataclass(frozen=True, slots=True)
class SimilarExamples:
    """Examples that are the same.

    Args:
        count: how many there are.
        groups: the ids of the first ones, each with those of the examples that it is like.
    """

    count: int
    groups: list[list[str]]


class ExampleStore:
    """Checksums of the examples of streams, of which those that occur twice can be asked for.

    They are in a SQLite file, which takes about 100 bytes for an example; the memory is limited to 64 MB, whatever the
    number of examples.

    Args:
        file: a file that does not exist.
    """

    def __init__(self, file: Path) -> None:
        self._data = sqlite3.connect(file, isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "temp_store = FILE", f"cache_size = -{_CACHE}"):
            self._data.execute(f"PRAGMA {setting}")
        self._data.execute("CREATE TABLE examples (stream INTEGER, id TEXT, content BLOB, labels BLOB)")
        self._data.execute("BEGIN")
        self._streams: list[str] = []

    def begin(self, stream: str) -> None:
        """Begin a stream; the examples that are added next are its own."""
        self._streams.append(stream)

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the next examples of the stream."""
        rows = ((len(self._streams) - 1, name[:_LONGEST], *checksums) for name, *checksums in entries)
        self._data.executemany("INSERT INTO examples VALUES (?, ?, ?, ?)", rows)

    def end(self) -> None:
        """Sort the examples; no more can be added. In each stream, their row ids are in their order."""
        self._data.execute("CREATE INDEX alike ON examples (content, stream)")
        self._data.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._data.close()

    def twice(self, stream: str) -> SimilarExamples:
        """Return the examples of a stream that occurred before in it, with the first one that each is like."""
        number = self._streams.index(stream)
        return self._similar(
            "SELECT SUM(COUNT(*) - 1) OVER (), content FROM examples WHERE stream = ? "
            "GROUP BY content HAVING COUNT(*) > 1 ORDER BY MIN(rowid)",
            [number],
            lambda content: self._ids(content, number),
        )

    def in_both(self, stream: str, other: str) -> SimilarExamples:
        """Return the examples of a stream that are also in another one, with those that they are like there."""
        pair = self._streams.index(stream), self._streams.index(other)
        return self._similar(
            "SELECT COUNT(*) OVER (), id, content FROM examples AS a WHERE stream = ? AND EXISTS "
            "(SELECT 1 FROM examples AS b WHERE b.content = a.content AND b.stream = ?) ORDER BY rowid",
            pair,
            lambda name, content: [name, *self._ids(content, pair[1])],
        )

    def with_other_labels(self) -> SimilarExamples:
        """Return the examples that are like an earlier one of any stream, but have other labels."""
        return self._similar(
            "SELECT SUM(COUNT(*)) OVER (), content FROM examples "
            "GROUP BY content HAVING COUNT(DISTINCT labels) > 1 ORDER BY MIN(rowid)",
            (),
            self._ids,
        )

    def _similar(self, query: str, values: Sequence[int], group: Callable[..., list[str]]) -> SimilarExamples:
        """Return what a query finds: its first column is how many examples there are; `group` gets the others."""
        rows = self._data.execute(f"{query} LIMIT {_SHOWN}", values).fetchall()
        return SimilarExamples(rows[0][0] if rows else 0, [group(*columns) for _, *columns in rows])

    def _ids(self, content: bytes, number: int | None = None) -> list[str]:
        """Return the first ids of a content: in a stream, or behind the names of their streams."""
        rows = self._data.execute(
            "SELECT stream, id FROM examples WHERE content = ? AND stream = IFNULL(?, stream) ORDER BY rowid LIMIT ?",
            (content, number, _SHOWN),
        )
        return [f"{self._streams[stream]} {name}" if number is None else name for stream, name in rows]


def in_words(similar: SimilarExamples, other: str = "") -> str:
    """Return the first groups for a message: `3 (train 17, 20), 9 (train 4)`."""
    before = f"{other} " if other else ""
    return ", ".join([f"{first} ({before}{', '.join(others)})" for first, *others in similar.groups])
