"""Examples that are alike, found with little memory: checksums of all examples, in a database in a file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CACHE = 64_000  # KB that SQLite keeps in memory
_SHOWN = 5
_LONGEST = 60  # characters of an id
Entry = tuple[str, bytes, bytes]
"""An example: its id, the checksum of what the model reads, and that of its labels."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Examples that are alike.

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
        for each in ("journal_mode = OFF", "synchronous = OFF", "temp_store = FILE", f"cache_size = -{_CACHE}"):
            self._data.execute(f"PRAGMA {each}")
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

    def twice(self, stream: str) -> Alike:
        """Return the examples of a stream that occurred before in it, with the first one that each is like."""
        number = self._streams.index(stream)
        groups_ = "(SELECT COUNT(*) AS n FROM examples WHERE stream = ? GROUP BY content)"
        count = self._number(f"SELECT COALESCE(SUM(n - 1), 0) FROM {groups_}", number)
        firsts = self._data.execute(
            "SELECT content FROM examples WHERE stream = ? GROUP BY content HAVING COUNT(*) > 1 "
            "ORDER BY MIN(rowid) LIMIT ?",
            (number, _SHOWN),
        )
        return Alike(count, [self._ids(number, content) for (content,) in firsts.fetchall()])

    def in_both(self, stream: str, other: str) -> Alike:
        """Return the examples of a stream that are also in another one, with those that they are like there."""
        pair = self._streams.index(stream), self._streams.index(other)
        shared = (
            "FROM examples AS a WHERE a.stream = ? AND EXISTS "
            "(SELECT 1 FROM examples AS b WHERE b.content = a.content AND b.stream = ?)"
        )
        count = self._number(f"SELECT COUNT(*) {shared}", *pair)
        rows = self._data.execute(f"SELECT a.id, a.content {shared} ORDER BY a.rowid LIMIT ?", (*pair, _SHOWN))
        return Alike(count, [[name, *self._ids(pair[1], content)] for name, content in rows.fetchall()])

    def with_other_labels(self) -> Alike:
        """Return the examples that are like an earlier one of any stream, but have other labels."""
        found = (
            "FROM (SELECT content FROM examples GROUP BY content HAVING COUNT(DISTINCT labels) > 1) AS c "
            "JOIN examples AS e ON e.content = c.content"
        )
        count = self._number(f"SELECT COUNT(*) {found}")
        firsts = self._data.execute(
            f"SELECT e.content {found} GROUP BY e.content ORDER BY MIN(e.rowid) LIMIT ?", (_SHOWN,)
        )
        groups = []
        for (content,) in firsts.fetchall():
            rows = self._data.execute(
                "SELECT stream, id FROM examples WHERE content = ? ORDER BY rowid LIMIT ?", (content, _SHOWN)
            )
            groups.append([f"{self._streams[number]} {name}" for number, name in rows.fetchall()])
        return Alike(count, groups)

    def _ids(self, number: int, content: bytes) -> list[str]:
        rows = self._data.execute(
            "SELECT id FROM examples WHERE content = ? AND stream = ? ORDER BY rowid LIMIT ?",
            (content, number, _SHOWN),
        )
        return [name for (name,) in rows.fetchall()]

    def _number(self, query: str, *values: int) -> int:
        return int(self._data.execute(query, values).fetchone()[0])


def in_words(alike: Alike, other: str = "") -> str:
    """Return the first groups for a message: `3 (train 17, 20), 9 (train 4)`."""
    shown = [f"{first} ({other}{' ' * bool(other)}{', '.join(others)})" for first, *others in alike.groups]
    return ", ".join(shown)
