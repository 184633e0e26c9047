"""Tables and lines with columns, folded to the width of the terminal; whole in files and pipes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from textwrap import TextWrapper
from typing import Any

_GAP = 2  # blanks between columns
_LEAST = 12  # characters of a column that is folded


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
        """Return the table in at most `space` columns of a terminal; None for the whole table.

        Long cells are folded. If this does not suffice, the last columns follow in another table, with the first
        column repeated.
        """
        from tabulate import SEPARATING_LINE, tabulate
        from wcwidth import wrap

        sizes = self._sizes(space)
        if space is not None and _sum(sizes) > space and len(sizes) > 2:
            end = next(n for n in range(len(sizes) - 1, 1, -1) if n == 2 or _sum(sizes[:n]) <= space)
            parts = (range(end), [0, *range(end, len(sizes))])
            return "\n\n".join(self._with(part).folded(space) for part in parts)

        folded: list[Any] = [
            ["\n".join(wrap(cell, size)) for cell, size in zip(cells, sizes, strict=True)] for cells in self._all()
        ]
        shown: Callable[..., str] = partial(tabulate, folded, colalign=list(self.align) or None, disable_numparse=True)
        if not self.headers:
            return shown(tablefmt="plain")
        # headers of tabulate would be two columns wider; as a row, they have a line above and below the table, which go
        folded.insert(1, SEPARATING_LINE)
        return shown(tablefmt="simple").partition("\n")[2].rpartition("\n")[0]

    def _all(self) -> list[Sequence[str]]:
        """Return the headings, if there are any, and the rows."""
        return [*([self.headers] if self.headers else []), *self.rows]

    def _sizes(self, space: int | None) -> list[int]:
        """Return the width of each column: of those on the left, only as much as there is space for."""
        from wcwidth import width as columns

        sizes = [max(map(columns, cells)) for cells in zip(*self._all(), strict=True)]
        if space is None or _sum(sizes) <= space:
            return sizes
        body = [max(map(columns, cells)) for cells in zip(*self.rows, strict=True)] or [0] * len(sizes)
        fixed = [body_width if side == "right" else 0 for body_width, side in zip_longest(body, self.align)]
        least = [min(size, max(fixed_width, _LEAST)) for size, fixed_width in zip(sizes, fixed, strict=True)]
        capped = (
            [max(low, min(size, cap)) for low, size in zip(least, sizes, strict=True)] for cap in range(space, 0, -1)
        )
        return next((widths for widths in capped if _sum(widths) <= space), least)

    def _with(self, columns: Sequence[int]) -> Table:
        def of(cells: Sequence[str]) -> list[str]:
            return [cells[index] for index in columns if cells]

        return Table([of(row) for row in self.rows], of(self.headers), of(self.align))


def _sum(sizes: Sequence[int]) -> int:
    return sum(sizes) + _GAP * (len(sizes) - 1)
