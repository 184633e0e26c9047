"""Explains syntax errors in YAML at the line where the mistake was made."""

from __future__ import annotations

import re

from ruamel.yaml.error import MarkedYAMLError

_MISSING = (
    (r"(-)(\w.*)", "write a space after the dash: {0} {1}"),
    (r"([\w.]+):(\S.*)", "write a space after the colon: {0}: {1}"),
    (r"([\w.]+)\s*=\s*(.*)", "write a colon after a key, not '=': {0}: {1}"),
    (r"([\w.]+)\s+(\S.*)", "a colon is missing: {0}: {1}"),
)
"""How a line begins, after its dashes, in which something is missing behind the first part."""


class Slip:
    """Finds the cause and the position of a syntax error in YAML.

    The parser often reports a mistake a line or more later: for the parser, a key without a colon continues in the
    next line.

    Args:
        error: the error of the parser.
        lines: the lines of the text.
    """

    def __init__(self, error: MarkedYAMLError, lines: list[str]) -> None:
        self._problem = " ".join(str(error.problem or error.context or "is not valid YAML").split())
        self._context = str(error.context or "")
        mark = error.problem_mark or error.context_mark
        start = error.context_mark or mark
        self._line: int = mark.line
        self._column: int = mark.column
        self._start: tuple[int, int] = (start.line, start.column)
        self._lines = [*lines, *[""] * (max(self._line, self._start[0]) + 1 - len(lines))]
        self._text = self._lines[self._line]

    def explained(self) -> tuple[int, int, str]:
        """Return line and column, counted from 0, and a message."""
        problem = self._problem
        for beginning, explain in (
            ("mapping values are not", self._colon),
            ("could not find expected ':'", lambda: self._of_no_key(self._start[0])),
            ("sequence entries are not", lambda: "a list must begin on a new line, or be written as [a, b]"),
            ("expected <block end>", self._in_a_block),
            ("found character '\\t'", lambda: "a tab is not allowed here; indent with spaces"),
            ("found character", self._quotes_needed),
            (("found unknown escape", "expected escape sequence"), self._escape),
            ("found unexpected end of stream", lambda: (*self._start, "this quote is never closed")),
            ("expected ','", self._in_brackets),
            ("expected the node content", self._no_value),
            ("expected '<document start>'", self._after_the_document),
        ):
            if problem.startswith(beginning):
                explanation = explain()
                if isinstance(explanation, tuple):
                    return explanation
                return self._line, self._column, explanation or problem
        return self._line, self._column, problem

    def _colon(self) -> str | tuple[int, int, str] | None:
        """Explain a colon where a key is not possible."""
        before = self._text[: self._column]
        if re.search(r"[\[{]", before) and (missing := self._missing(self._line)):
            return missing
        key = _without_dashes(before)
        if ": " in key:
            return "this line has a second ':'; put a string with ': ' in quotes, and nested keys in {} or on new lines"
        above = self._line_above()
        if above is None:
            return None
        indent = _indent(self._text)
        indent_above = _indent(self._lines[above])
        if ": " in f"{self._lines[above].partition('#')[0].rstrip()} ".lstrip("- ") and indent > indent_above:
            return self._line, indent, f"{key!r} is indented further than the key above, which already has a value"
        return self._of_no_key(above)

    def _missing(self, line: int) -> tuple[int, int, str] | None:
        """Return what is missing in a line, and where; None if nothing is, or it is not known."""
        text = self._lines[line].rstrip()
        word = _without_dashes(text)
        for beginning, message in _MISSING:
            if match := re.match(beginning, word):
                return line, len(text) - len(word) + match.end(1), message.format(*match.groups())
        return None

    def _of_no_key(self, line: int) -> tuple[int, int, str]:
        """Explain a line that is neither a key with a value nor an entry of a list."""
        text = self._lines[line].rstrip()
        word = _without_dashes(text)
        below = next((following for following in self._lines[line + 1 :] if following.strip()), "")
        if missing := self._missing(line):
            return missing
        if _indent(below) > _indent(text):
            return line, len(text), f"a colon is missing: {word}:"
        message = f"{word!r} is neither a key nor a list entry; write {word}: VALUE or - {word}"
        return line, len(text) - len(word), message

    def _in_a_block(self) -> str | tuple[int, int, str]:
        """Explain a token that cannot follow in a mapping or a list of several lines."""
        token = self._problem.rpartition("found ")[2].strip("'")
        is_in_list = "block collection" in self._context or "block sequence" in self._context
        if token in ("]", "}"):
            return self._missing(self._line) or f"this {token!r} has no opening {'[' if token == ']' else '{'!r}"
        if token == "<scalar>":
            return "text follows a closing quote; quote the whole value, and write '' for a ' inside single quotes"
        if token == "?" and is_in_list:
            return self._missing(self._line) or f"this list entry has no dash; write - {self._text.strip()}"
        if token == "-" and not is_in_list:
            return "this list entry is among keys; write all entries of a list with a dash, in one column"
        above = self._line_above()
        column = _indent(self._lines[above]) if above is not None else 0
        return (
            f"is indented by {self._column}, the line above by {column}; lines that belong together must "
            "begin in the same column"
        )

    def _quotes_needed(self) -> str:
        start = self._text[self._column :]
        word = re.split(r"\s*(?:[,\]}]|\s#|$)", start)[0]
        return f"a string that begins with {start[:1]!r} needs quotes: '{word}'"

    def _escape(self) -> tuple[int, int, str]:
        column = self._text.rfind("\\", 0, self._column + 1)
        word = self._text[column : column + 2]
        return (
            self._line,
            column,
            f"{word} is not an escape sequence that YAML allows in double quotes; use single quotes, in "
            "which \\ has no special meaning",
        )

    def _in_brackets(self) -> str | tuple[int, int, str]:
        """Explain a token that cannot follow inside [] or {}."""
        if self._text[: self._column + 1].endswith("${"):
            return "a string with ${...} needs quotes inside [] and {}"
        line, column = self._start
        bracket = self._lines[line][column : column + 1]
        if "<stream end>" in self._problem:
            return line, column, f"this {bracket!r} is never closed"
        return (
            f"a comma or a colon is missing here, a string with ': ' needs quotes, or the {bracket!r} of "
            f"line {line + 1}, column {column + 1} is never closed"
        )

    def _no_value(self) -> str:
        character = self._text[self._column : self._column + 1]
        if not character:
            return "the text ends before the brackets are closed"
        return f"a value cannot begin with {character!r}; put a string in quotes"

    def _after_the_document(self) -> str | tuple[int, int, str] | None:
        first = next((index for index, text in enumerate(self._lines) if _is_meaningful(text)), 0)
        if _indent(self._lines[first]) > self._column:
            message = "is indented, but a line below is not; all top-level keys must begin in one column"
            return first, _indent(self._lines[first]), message
        return None

    def _line_above(self) -> int | None:
        """Return the index of the last line above that is not empty or a comment."""
        return next((index for index in range(self._line - 1, -1, -1) if _is_meaningful(self._lines[index])), None)


def _is_meaningful(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_dashes(text: str) -> str:
    return re.sub(r"^\s*(?:-\s+)*", "", text)
