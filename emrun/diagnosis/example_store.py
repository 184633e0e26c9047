"""Examples that are alike, found with little memory: checksums of all examples, in a database in a file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
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
        groups: the ids of the first ones, with those of the examples that they are like.
    """

    count: int
    groups: list[tuple[str, list[str]]]


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
        self._data.execute("CREATE TABLE examples (stream INTEGER, place INTEGER, id TEXT, content BLOB, labels BLOB)")
        self._data.execute("BEGIN")
        self._streams: list[str] = []
        self._counts: list[int] = []

    def begin(self, stream: str) -> None:
        """Begin a stream; the examples that are added next are its own."""
        self._streams.append(stream)
        self._counts.append(0)

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the next examples of the stream."""
        number, place = len(self._streams) - 1, self._counts[-1]
        rows = [
            (number, place + index, name[:_LONGEST], content, labels)
            for index, (name, content, labels) in enumerate(entries)
        ]
        self._data.executemany("INSERT INTO examples VALUES (?, ?, ?, ?, ?)", rows)
        self._counts[-1] += len(rows)

    def end(self) -> None:
        """Sort the examples; no more can be added."""
        self._data.execute("CREATE INDEX alike ON examples (content, stream, place)")
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
            "SELECT MIN(place), content FROM examples WHERE stream = ? GROUP BY content HAVING COUNT(*) > 1 "
            "ORDER BY MIN(place) LIMIT ?",
            (number, _SHOWN),
        ).fetchall()
        groups = []
        for _, content in firsts:
            first, *others = self._ids(number, content)
            groups.append((first, others))
        return Alike(count, groups)

    def in_both(self, stream: str, other: str) -> Alike:
        """Return the examples of a stream that are also in another one, with those that they are like there."""
        pair = self._streams.index(stream), self._streams.index(other)
        shared = (
            "FROM examples AS a WHERE a.stream = ? AND EXISTS "
            "(SELECT 1 FROM examples AS b WHERE b.content = a.content AND b.stream = ?)"
        )
        count = self._number(f"SELECT COUNT(*) {shared}", *pair)
        rows = self._data.execute(f"SELECT a.id, a.content {shared} ORDER BY a.place LIMIT ?", (*pair, _SHOWN))
        return Alike(count, [(name, self._ids(pair[1], content)) for name, content in rows.fetchall()])

    def with_other_labels(self) -> Alike:
        """Return the examples that are like an earlier one of any stream, but have other labels."""
        found = (
            "FROM (SELECT content FROM examples GROUP BY content HAVING COUNT(DISTINCT labels) > 1) AS c "
            "JOIN examples AS e ON e.content = c.content"
        )
        count = self._number(f"SELECT COUNT(*) {found}")
        firsts = self._data.execute(
            f"SELECT e.content, MIN(e.stream * 1000000000000 + e.place) AS at {found} GROUP BY e.content "
            "ORDER BY at LIMIT ?",
            (_SHOWN,),
        ).fetchall()
        groups = []
        for content, _ in firsts:
            rows = self._data.execute(
                "SELECT stream, id FROM examples WHERE content = ? ORDER BY stream, place LIMIT ?", (content, _SHOWN)
            )
            first, *others = [f"{self._streams[number]} {name}" for number, name in rows.fetchall()]
            groups.append((first, others))
        return Alike(count, groups)

    def _ids(self, number: int, content: bytes) -> list[str]:
        rows = self._data.execute(
            "SELECT id FROM examples WHERE content = ? AND stream = ? ORDER BY place LIMIT ?",
            (content, number, _SHOWN),
        )
        return [name for (name,) in rows.fetchall()]

    def _number(self, query: str, *values: int) -> int:
        return int(self._data.execute(query, values).fetchone()[0])


def in_words(alike: Alike, other: str = "") -> str:
    """Return the first groups for a message: `3 (train 17, 20), 9 (train 4)`."""
    shown = [f"{first} ({other}{' ' * bool(other)}{', '.join(others)})" for first, others in alike.groups]
    return ", ".join(shown)


def as_lists(groups: Sequence[tuple[str, list[str]]]) -> list[list[str]]:
    """Return groups for JSON."""
    return [[first, *others] for first, others in groups]
