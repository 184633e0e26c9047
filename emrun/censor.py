"""What keeps values of the environment out of what emrun writes and prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, quote_plus

_SHORTEST = 4  # characters; what is shorter stands everywhere by chance
_FEWEST_DIGITS = 6  # of a number
_LONG = 8  # characters, from which on a value is replaced within a word too
_OWN_WORDS = {
    "batch", "batches", "best", "checkpoint", "checkpoints", "classes", "config", "cuda", "dataset", "epoch",
    "epochs", "error", "eval", "failed", "finished", "hook", "hooks", "interrupted", "iteration", "iterations",
    "latest", "loss", "main_loop", "model", "module", "none", "optimizer", "resume", "schedule", "seconds",
    "seed", "stream", "streams", "test", "train", "training", "valid", "warning",
}  # fmt: skip
_NUMBER = re.compile(r"(?i)[-+._e\d]*\d[-+._e\d]*|0[xo][\da-f_]+|true|false|yes|no|on|off|null|none")
_BEGINS = r"(?:(?<![^\W_])|(?<=\\[nrt]))"  # a word begins here, or what is escaped before it ends
_ENDS = r"(?![^\W_])"


class Censor:
    """Replaces values that a config takes from the environment by what the config says instead.

    A value is found as it is, escaped as Python, JSON and URLs do, and as the number that YAML makes of it; of a value
    of several lines also each line of 8 or more characters. A value of 8 or more characters is found within a word too,
    one of 4 to 7 only as a word. Not replaced are a shorter one, a number of fewer than 6 digits, and a word that emrun
    itself writes, such as train or epoch: they stand in most texts by chance. For names that the config shows, such as
    those of classes, see `Node.secrets`.

    Args:
        secrets: the values, each with what is shown instead, as an interpolated config yields them.
        kept: paths in which nothing is replaced, such as the directory of a run, whose name everybody sees.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]] = (), kept: Iterable[object] = ()) -> None:
        self._shown: dict[str, str] = {}  # what is replaced -> what is shown instead
        self._kept: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.keep(*kept)
        self.add(secrets)

    def __call__(self, text: str) -> str:
        """Return a text without the values."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._shown.get(match[0], match[0]), text)

    def add(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Replace these values too."""
        found = {form: spelling for value, spelling in secrets for form in _forms(value)}
        if not found.keys() <= self._shown.keys():
            self._shown = {**found, **self._shown}
            self._compile()

    def keep(self, *paths: object) -> None:
        """Leave these paths as they are where they stand in a text."""
        self._kept.update(str(path) for path in paths)
        self._compile()

    def plain(self, value: Any) -> Any:
        """Return a tree of plain values without the values in its texts; keys stay."""
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
    """Return how a value may stand in a text; nothing for one that is too short."""
    found: set[str] = set()
    lines = {line.strip() for line in value.strip().splitlines()}
    for part in filter(_is_replaced, {value.strip(), *(line for line in lines if len(line) >= _LONG)}):
        escaped = {each for once in _escaped(part) for each in (once, *_escaped(once))}
        found |= {part, *escaped, quote(part), quote(part, safe=""), quote_plus(part)}
    return {form for form in found if _is_replaced(form)}


def _escaped(text: str) -> set[str]:
    """Return a text as Python and JSON write it between quotes."""
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
    """Tell whether YAML reads a text as a number, or as true, false or null."""
    return _NUMBER.fullmatch(text) is not None


class _CensoredStream:
    """A text stream that everything goes through a censor into; in all else it is the stream itself."""

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
    """Standard error of this process, and what censors it."""

    censor: Censor | None = None


def terminal_censor() -> Censor | None:
    """Return the censor of standard error, None when it has none."""
    return _Terminal.censor


def hide_on_terminal(secrets: Iterable[tuple[str, str]]) -> None:
    """Let standard error, where it is censored, not show these values."""
    if _Terminal.censor is not None:
        _Terminal.censor.add(secrets)


def keep_on_terminal(*paths: object) -> None:
    """Let standard error, where it is censored, show these paths as they are."""
    if _Terminal.censor is not None:
        _Terminal.censor.keep(*paths)


def for_terminal(text: str) -> str:
    """Return a text as it is printed elsewhere than on standard error, where nothing is censored by itself."""
    return text if _Terminal.censor is None else _Terminal.censor(text)


def censor_standard_error(censor: Censor) -> None:
    """Censor the text that this process writes to `sys.stderr` from now on, whoever writes it.

    What is written past that, to `sys.stderr.buffer` or to its descriptor, is not.
    """
    _Terminal.censor = censor
    if sys.stderr is not None:
        sys.stderr = _CensoredStream(sys.stderr, censor)


@contextmanager
def censored_standard_error() -> Iterator[None]:
    """Censor standard error in the block: no values of the configs that are read in it."""
    before = _Terminal.censor, sys.stderr
    censor_standard_error(Censor())
    try:
        yield
    finally:
        _Terminal.censor, sys.stderr = before
