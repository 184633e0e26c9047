"""Explains what is wrong with a text that is not YAML, at the line where the slip is."""

from __future__ import annotations

import re

from ruamel.yaml.error import MarkedYAMLError


class Slip:
    """What is wrong with a text that is not YAML, in the words of who wrote it, and where.

    The parser often notices a slip a line or more later: a key without its colon goes on in the next line.

    Args:
        error: what the parser says.
        lines: the text.
    """

    def __init__(self, error: MarkedYAMLError, lines: list[str]) -> None:
        self._problem = " ".join(str(error.problem or error.context or "is not valid YAML").split())
        self._context = str(error.context or "")
        mark, start = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
        self._line: int = mark.line if mark else 0
        self._column: int = mark.column if mark else 0
        self._start: tuple[int, int] = (start.line, start.column) if start else (0, 0)
        self._lines = [*lines, *[""] * (max(self._line, self._start[0]) + 1 - len(lines))]
        self._text = self._lines[self._line]

    def explained(self) -> tuple[int, int, str]:
        """Return line and column, counted from 0, and a message."""
        problem = self._problem
        for beginning, explain in (
            ("mapping values are not", self._colon),
            ("could not find expected ':'", lambda: self._of_no_key(self._start[0])),
            ("sequence entries are not", lambda: "a list begins on a line of its own, or is written [a, b]"),
            ("expected <block end>", self._in_a_block),
            ("found character", self._character),
            (("found unknown escape", "expected escape sequence"), self._escape),
            ("expected alphabetic", lambda: f"{self._at_start()!r} means something in YAML; put the text in quotes"),
            ("expected chomping", self._quotes_needed),
            ("found unexpected end of stream", lambda: (*self._start, "this quote is never closed")),
            ("expected ','", self._in_brackets),
            ("expected the node content", self._no_value),
            ("expected '<document start>'", self._after_the_document),
        ):
            if problem.startswith(beginning):
                found = explain()
                return found if isinstance(found, tuple) else (self._line, self._column, found or problem)
        return self._line, self._column, problem

    def _at_start(self) -> str:
        line, column = self._start
        return self._lines[line][column : column + 1]

    def _colon(self) -> str | tuple[int, int, str] | None:
        """Explain a colon where no key can be."""
        before = self._text[: self._column]
        key = _without_dashes(before)
        if ": " in key:
            return "a second ':' in this line; put a text in quotes, keys below a key into {} or on lines of their own"
        above = self._line_above(self._line)
        if above is None:
            return None
        own, other = _indent(self._text), _indent(self._lines[above])
        if ": " in f"{self._lines[above].partition('#')[0].rstrip()} ".lstrip("- ") and own > other:
            return self._line, own, f"{key!r} is indented further than the key above it, which has a value already"
        return self._of_no_key(above)

    def _of_no_key(self, line: int) -> tuple[int, int, str]:
        """Explain a line that should be a key with a value, or an entry of a list, and is a mere text."""
        text = self._lines[line]
        entry = text.strip()
        word = _without_dashes(entry)
        column = _indent(text) + len(entry) - len(word)
        if re.match(r"-\w", entry):
            return line, column, f"write a space after the dash: - {entry[1:]}"
        if found := re.match(r"([\w.]+):(\S.*)", word):
            return line, column + len(found[1]), f"write a space after the colon: {found[1]}: {found[2]}"
        if found := re.match(r"([\w.]+)\s*=\s*(.*)", word):
            return line, column, f"a key is followed by a colon: {found[1]}: {found[2]}"
        if found := re.match(r"([\w.]+)\s+(\S.*)", word):
            return line, column + len(found[1]), f"a colon is missing: {found[1]}: {found[2]}"
        below = next((each for each in self._lines[line + 1 :] if each.strip()), "")
        if _indent(below) > _indent(text):
            return line, column + len(word), f"a colon is missing: {word}:"
        if entry == word:
            return line, column, f"{word!r} is neither a key, {word}: VALUE, nor an entry of a list, - {word}"
        return line, column, f"{word!r} is an entry of a list, but a key follows"

    def _in_a_block(self) -> str | tuple[int, int, str]:
        """Explain what cannot follow in a mapping or a list of several lines."""
        found = self._problem.rpartition("found ")[2].strip("'")
        rest = self._text[self._column :].strip()
        if found in ("]", "}"):
            if missing := re.match(r"\s*(?:-\s+)*([\w.]+)\s+[\[{]", self._text):
                return self._line, missing.end(1), f"a colon is missing: {missing[1]}: ..."
            return f"this {found!r} has no {'[' if found == ']' else '{'!r} before it"
        if found == "<scalar>":
            return "more text after a closing quote; put the whole value in quotes, and write '' for a ' within them"
        in_list = "block collection" in self._context or "block sequence" in self._context
        if found == "?" and in_list:
            if re.match(r"-\w", rest):
                return f"write a space after the dash: - {rest[1:]}"
            return f"an entry of this list has no dash; write - {rest}"
        if found == "-" and not in_list:
            return "an entry of a list among keys; it belongs in the column of the entries before it"
        above = self._line_above(self._line)
        column = _indent(self._lines[above]) if above is not None else 0
        return f"is indented by {self._column}, the line above by {column}; what belongs together begins in one column"

    def _character(self) -> str:
        is_tab = self._text[self._column : self._column + 1] == "\t"
        return "a tab; indent with spaces" if is_tab else self._quotes_needed()

    def _quotes_needed(self) -> str:
        start = self._text[self._column - (1 if self._problem.startswith("expected chomping") else 0) :]
        word = re.split(r"\s*(?:[,\]}]|\s#|$)", start)[0]
        return f"a text that begins with {start[:1]!r} needs quotes: '{word}'"

    def _escape(self) -> tuple[int, int, str]:
        column = self._text.rfind("\\", 0, self._column + 1)
        word = self._text[column : column + 2]
        hint = "put the text in single quotes, which leave \\ as it is"
        return self._line, column, f"{word} in double quotes is not an escape that YAML knows; {hint}"

    def _in_brackets(self) -> str | tuple[int, int, str]:
        """Explain what cannot follow within [] or {}."""
        if self._text[: self._column + 1].endswith("${"):
            return "within [] and {} a text with ${...} needs quotes"
        if missing := re.search(r"([\w.]+)\s+[\[{]$", self._text[: self._column + 1]):
            return self._line, missing.end(1), f"a colon is missing: {missing[1]}: ..."
        if self._is_closed():
            return "a comma is missing before this, or a text with ': ' in it needs quotes"
        return (*self._start, f"this {self._at_start()!r} is never closed")

    def _is_closed(self) -> bool:
        """Tell whether the bracket that is open closes further on."""
        line, column = self._start
        rest = "\n".join((self._lines[line][column:], *self._lines[line + 1 :]))
        depth = []
        for token in re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?<=\s)#.*|[\[\]{}]", rest):
            if token in "[{":
                depth.append("]" if token == "[" else "}")
            elif token in "]}":
                if token != depth.pop():
                    return False
                if not depth:
                    return True
        return False

    def _no_value(self) -> str:
        character = self._text[self._column : self._column + 1]
        if not character:
            return "the text ends within brackets"
        return f"{character!r} stands where a value is expected; put a text in quotes"

    def _after_the_document(self) -> str | tuple[int, int, str] | None:
        first = next((index for index, each in enumerate(self._lines) if _is_meaningful(each)), 0)
        if self._lines[first].startswith("%"):
            return first, 0, "a line cannot begin with '%'; put a text in quotes"
        if _indent(self._lines[first]) > self._column:
            return first, _indent(self._lines[first]), "is indented, and a line below is not; keys begin in one column"
        return None

    def _line_above(self, line: int) -> int | None:
        """Return the last line above another one that has more than a comment."""
        return next((each for each in range(line - 1, -1, -1) if _is_meaningful(self._lines[each])), None)


def _is_meaningful(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_dashes(text: str) -> str:
    return re.sub(r"^\s*(?:-\s+)*", "", text)
