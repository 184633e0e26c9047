"""Tables and lines with columns, folded to the width of the terminal; whole in files and pipes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import TextWrapper
from typing import Any

_GAP = 2  # blanks between columns
_LEAST = 12  # characters of a column that is folded


class _Cell(TextWrapper):
    """Folds a text at blanks, and in names before the parts that begin with a letter."""

    wordsep_re = re.compile(r"(\s+|(?<=[/_.,=-])(?=[^\W\d_]))")


class _Line(TextWrapper):
    """Folds a line where it has more than one blank."""

    wordsep_re = re.compile(r"( {2,})")


class _Sentence(TextWrapper):
    """Folds a line at blanks, but not within backticks: a command stays whole."""

    wordsep_re = re.compile(r"(\s+)(?=(?:[^`]*`[^`]*`)*[^`]*$)")


def width(stream: Any) -> int | None:
    """Return how many columns a terminal has, 80 if the terminal does not know; None if a stream is not a terminal."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns or 80) if stream.isatty() else None
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return None


def folded_line(line: str, space: int | None) -> str:
    """Return a line in at most `space` columns, folded where it has several blanks, or else between words.

    A command in backticks, or after `: ` at the end, is not folded.
    """
    if space is None or len(line) <= space:
        return line
    text, colon, command = line.partition(": emrun ")
    if colon:
        return f"{folded_line(f'{text}:', space)}\n    emrun {command}"
    wrapper = _Line if "  " in line.strip() else _Sentence
    return wrapper(space, subsequent_indent="    ", break_long_words=False).fill(line)


def folded_command(label: str, words: Sequence[str], space: int | None) -> str:
    """Return `label: command` to paste, in lines of at most `space` columns where its words allow this.

    Args:
        label: what the command does.
        words: the words of the command.
        space: the columns; None for a single line.
    """
    lines = [f"{label}: {shlex.quote(words[0])}"]
    for word in map(shlex.quote, words[1:]):
        if (
            space is not None and len(lines[-1]) + len(word) + 3 > space
        ):  # a blank before the word, and one and \\ after
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


@dataclass(frozen=True, slots=True)
class Table:
    """A table for a message, whole as a text.

    Args:
        rows: the cells of each row.
        headers: the headings; without them, the rows are plain columns.
        align: `left` or `right` for each column, by default all left. On the right, only the heading is folded.
    """

    rows: Sequence[Sequence[str]]
    headers: Sequence[str] = ()
    align: Sequence[str] = ()

    def __str__(self) -> str:
        return self.folded(None)

    def folded(self, space: int | None) -> str:
        """Return the table in at most `space` columns; None for the whole table.

        Long cells are folded. If this does not suffice, the last columns follow in another table, with the first
        column repeated.
        """
        rows = [*([self.headers] if self.headers else []), *self.rows]
        sizes = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        align = self.align or ["left"] * len(sizes)
        if space is not None and _sum(sizes) > space:
            body = [max(map(len, cells)) for cells in zip(*self.rows, strict=True)] or sizes
            sizes = [min(size, max(inside, _LEAST)) for size, inside in zip(sizes, body, strict=True)]  # headings first
            least = [size if side == "right" else min(size, _LEAST) for size, side in zip(sizes, align, strict=True)]
            if _sum(least) > space and len(sizes) > 2:
                first = next(n for n in range(len(sizes) - 1, 1, -1) if n == 2 or _sum(least[:n]) <= space)
                parts = range(first), [0, *range(first, len(sizes))]
                return "\n\n".join(self._with(part).folded(space) for part in parts)
            both = list(zip(sizes, least, strict=True))
            caps = ([max(low, min(size, cap)) for size, low in both] for cap in range(max(sizes), 0, -1))
            sizes = next((each for each in caps if _sum(each) <= space), least)
        lines = [line for row in rows for line in _lines(row, sizes, align)]
        if self.headers:
            lines.insert(len(list(_lines(self.headers, sizes, align))), "  ".join("-" * size for size in sizes))
        return "\n".join(lines)

    def _with(self, columns: Sequence[int]) -> Table:
        def of(cells: Sequence[str]) -> list[str]:
            return [cells[index] for index in columns if cells]

        return Table([of(row) for row in self.rows], of(self.headers), of(self.align))


def _sum(sizes: Sequence[int]) -> int:
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _lines(row: Sequence[str], sizes: Sequence[int], align: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a row, whose cells are folded to these sizes."""
    cells = [_Cell(size).wrap(cell) if len(cell) > size else [cell] for size, cell in zip(sizes, row, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        each = zip(parts, sizes, align, strict=True)
        yield "  ".join(part.rjust(size) if side == "right" else part.ljust(size) for part, size, side in each).rstrip()
