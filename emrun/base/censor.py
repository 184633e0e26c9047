"""Keeps values of environment variables out of the files and messages that emrun writes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, quote_plus

from emrun.base.terminal import outlived

_SHORTEST = 4  # characters; a shorter value occurs everywhere by chance
_FEWEST_DIGITS = 6  # of a number that is replaced
_LONG = 8  # characters; a value of this length or more is also replaced within a word
_OWN_WORDS = {
    "batch", "batches", "best", "checkpoint", "checkpoints", "classes", "config", "cuda", "dataset", "epoch",
    "epochs", "error", "eval", "failed", "finished", "hook", "hooks", "interrupted", "iteration", "iterations",
    "latest", "loss", "main_loop", "model", "module", "none", "optimizer", "resume", "schedule", "seconds",
    "seed", "stream", "streams", "test", "train", "training", "valid", "warning",
}  # fmt: skip
_NUMBER = re.compile(r"(?i)[-+._e\d]*\d[-+._e\d]*|0[xo][\da-f_]+|true|false|yes|no|on|off|null|none")
_BEGINS = r"(?:(?<![^\W_])|(?<=\\[nrt]))"  # a word begins here, or an escape sequence ends before it
_ENDS = r"(?![^\W_])"


class Censor:
    """Replaces values that a config takes from the environment by the reference in the config.

    A value is found as it is, as the number that YAML reads from it, and as escaped in Python, JSON and URLs. If it
    has several lines, each line of 8 or more characters is found too. A value of 8 or more characters is also found
    within a word, a value of 4 to 7 characters only as a whole word. Values that occur in most texts by chance are not
    replaced: shorter values, numbers with fewer than 6 digits, and words that emrun itself writes, such as train or
    epoch. For names that the config shows, such as those of classes, see `Node.secrets`.

    Args:
        secrets: pairs of a value and its replacement, as an interpolated config yields them.
        kept: paths in which nothing is replaced, such as the run directory, whose name is not a secret.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]] = (), kept: Iterable[object] = ()) -> None:
        self._shown: dict[str, str] = {}  # text to be replaced -> its replacement
        self._kept: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.keep(*kept)
        self.add(secrets)

    def __call__(self, text: str) -> str:
        """Return a string with the values replaced."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._shown.get(match[0], match[0]), text)

    def add(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Also replace these values."""
        found = {form: spelling for value, spelling in secrets for form in _forms(value)}
        if not found.keys() <= self._shown.keys():
            self._shown = {**found, **self._shown}
            self._compile()

    def keep(self, *paths: object) -> None:
        """Do not replace anything within these paths."""
        self._kept.update(str(path) for path in paths)
        self._compile()

    def plain(self, value: Any) -> Any:
        """Return a tree of plain values with the secret values replaced in its strings; keys are not changed."""
        if isinstance(value, dict):
            return {key: self.plain(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(child) for child in value]
        return self(value) if isinstance(value, str) else value

    def _compile(self) -> None:
        kept = [path for path in self._kept if any(form in path for form in self._shown)]
        parts = {path: f"{re.escape(path)}{_ENDS}" for path in kept}
        parts.update((form, _as_it_is_found(form)) for form in self._shown)
        longest_first = sorted(parts, key=len, reverse=True)
        self._pattern = re.compile("|".join(parts[each] for each in longest_first)) if parts else None


def _as_it_is_found(form: str) -> str:
    text = re.escape(form)
    return text if len(form) >= _LONG and not _is_number(form) else f"{_BEGINS}{text}{_ENDS}"


def _forms(value: str) -> set[str]:
    """Return the spellings of a value that are replaced; an empty set if the value is too short."""
    found: set[str] = set()
    lines = {line.strip() for line in value.strip().splitlines()}
    for part in filter(_is_replaced, {value.strip(), *(line for line in lines if len(line) >= _LONG)}):
        escaped = {each for once in _escaped(part) for each in (once, *_escaped(once))}
        found |= {part, *escaped, quote(part), quote(part, safe=""), quote_plus(part)}
    return {form for form in found if _is_replaced(form)}


def _escaped(text: str) -> set[str]:
    """Return the spellings of a string between quotes in Python and JSON."""
    python = {repr(text)[1:-1], ascii(text)[1:-1], repr(text.encode(errors="surrogateescape"))[2:-1]}
    both = {each.replace("\\'", "'") for each in python}
    written = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    return {*both, *(each.replace("'", "\\'") for each in both), *written}


def _is_replaced(text: str) -> bool:
    if text.lower() in _OWN_WORDS:
        return False
    if _is_number(text):
        return sum(char.isdigit() for char in text) >= _FEWEST_DIGITS
    return len(text) >= _SHORTEST


def _is_number(text: str) -> bool:
    """Return whether YAML reads a string as a number, or as true, false or null."""
    return _NUMBER.fullmatch(text) is not None


class _CensoredStream:
    """A text stream that censors everything that is written; all other attributes are those of the wrapped stream."""

    def __init__(self, stream: Any, censor: Censor) -> None:
        self._stream = stream
        self._censor = censor

    def write(self, text: str) -> int:
        self._stream.write(self._censor(text) if isinstance(text, str) else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Terminal:
    """The censor of this process's standard error."""

    censor: Censor | None = None


def terminal_censor() -> Censor | None:
    """Return the censor of standard error, None if it is not censored."""
    return _Terminal.censor


def hide_on_terminal(secrets: Iterable[tuple[str, str]]) -> None:
    """Replace these values on standard error if it is censored."""
    if _Terminal.censor is not None:
        _Terminal.censor.add(secrets)


def keep_on_terminal(*paths: object) -> None:
    """Do not replace anything within these paths on standard error."""
    if _Terminal.censor is not None:
        _Terminal.censor.keep(*paths)


def for_terminal(text: str) -> str:
    """Return a censored text to print elsewhere, for example on standard output, which is not censored."""
    return text if _Terminal.censor is None else _Terminal.censor(text)


def censor_standard_error(censor: Censor) -> None:
    """Censor all text that any code of this process writes to `sys.stderr` from now on.

    Data that is written directly to `sys.stderr.buffer` or to the file descriptor is not censored.
    """
    _Terminal.censor = censor
    if sys.stderr is not None:
        sys.stderr = _CensoredStream(outlived(sys.stderr), censor)


@contextmanager
def censored_standard_error() -> Iterator[None]:
    """Censor standard error in the block, for the values of configs that are read in the block."""
    before = _Terminal.censor, sys.stderr
    censor_standard_error(Censor())
    try:
        yield
    finally:
        _Terminal.censor, sys.stderr = before
