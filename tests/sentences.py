"""The sentences of a page of `docs`: `python tests/sentences.py PAGE...` prints their numbers and the longest.

Code in a line counts as one word; blocks of code, pictures and headings do not count. An item of a list and a cell of a
table end a sentence; cells do not count for the mean.
"""

import re
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

LONGEST = 40  # words of a sentence
MEAN = 18  # words of the sentences of a page
_BLOCKS = re.compile(r"^ *```.*?^ *```$|^#+ [^\n]*$|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_ROWS = re.compile(r"^ *\|.*$", re.MULTILINE)
_TAGS = re.compile(r"<[^>]+>")
_LINKS = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ITEMS = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|\|", re.MULTILINE)
_END = re.compile(r"(?<=[.!?:])[\"')*_]*\s+")
_WORD = re.compile(r"\w[\w'.,/%+-]*")


def sentences(page, *, tables=True):
    """Return the sentences of a page, each with its number of words; without those in tables if they are not wanted."""
    text = _BLOCKS.sub("\n\n", page)
    if not tables:
        text = _ROWS.sub("\n\n", text)
    text = re.sub("`[^`]*`", "code", text)
    text = _TAGS.sub(" ", text)
    text = _LINKS.sub(r"\1", text)
    text = _ITEMS.sub("\n\n", text)
    found = []
    for block in re.split(r"\n\s*\n", text):
        for sentence in _END.split(" ".join(block.split())):
            words = len(_WORD.findall(sentence))
            if words > 1:  # not the number of a cell
                found.append((words, sentence))
    return found


def longest(page):
    """Return the words of the longest sentence of a page."""
    return max((words for words, _ in sentences(page)), default=0)


def mean(page):
    """Return the mean of the words of the sentences outside of tables."""
    counts = [words for words, _ in sentences(page, tables=False)]
    return statistics.mean(counts) if counts else 0.0


def main(paths):
    """Print a row for each page, and the longest sentences of a single one."""
    rows = []
    for path in map(Path, paths):
        page = path.read_text(encoding="utf-8")
        rows.append([path, len(page.split()), len(sentences(page)), mean(page), longest(page)])
    print(tabulate(rows, ["page", "words", "sentences", "mean", "longest"], tablefmt="github", floatfmt=".1f"))
    if len(rows) == 1:
        for words, sentence in sorted(sentences(page), reverse=True)[:20]:
            print(words, sentence)


if __name__ == "__main__":
    main(sys.argv[1:])
