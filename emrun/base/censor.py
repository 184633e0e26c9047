"""Keeps values of environment variables out of what emrun writes and prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emrun.base.terminal import outlived

_LONG = 8  # characters; a shorter value stands in other words by chance
_SHORTEST = 4  # characters of a value with letters and digits, which is not a usual word
_REFERENCES: dict[str, str] = {}  # value -> the text of the config in its place
_REVEALED: set[str] = set()  # paths


def hide(value: str, reference: str) -> None:
    """Let `hidden` replace a value that a config takes from the environment, from now on in this process.

    Args:
        value: the value. One of 4 to 7 characters is replaced only as a whole word, and only if it has letters and
            digits; a shorter one is not.
        reference: what the config has in its place, `${env:NAME}`.
    """
    value = value.strip()
    is_mixed = any(map(str.isalpha, value)) and any(map(str.isdigit, value))
    if len(value) >= _LONG or (is_mixed and len(value) >= _SHORTEST):
        _REFERENCES[value] = reference


def reveal(*paths: Path) -> None:
    """Let `hidden` keep the values that stand in these paths, such as that of the run directory."""
    _REVEALED.update(map(str, paths))


def hidden(text: str) -> str:
    """Return a text with the values of the environment replaced by their references."""
    for value in sorted(_REFERENCES, key=len, reverse=True):
        if value not in text or any(value in path for path in _REVEALED):
            continue
        pattern = re.escape(value) if len(value) >= _LONG else rf"(?<!\w){re.escape(value)}(?!\w)"
        text = _REFERENCES[value].join(re.split(pattern, text))
    return text


def hidden_in(tree: Any) -> Any:
    """Return plain values with the values of the environment replaced in strings; keys are not changed."""
    if isinstance(tree, dict):
        return {key: hidden_in(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [hidden_in(child) for child in tree]
    return hidden(tree) if isinstance(tree, str) else tree


def references() -> Mapping[str, str]:
    """Return what `hidden` replaces, for `hide` in a process that is not forked: value -> reference."""
    return dict(_REFERENCES)


class _CensoredStream:
    """A text stream that hides values of the environment; all other attributes are those of the wrapped stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hidden(text) if isinstance(text, str) else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def censor_standard_error() -> None:
    """Hide values of the environment in all text that any code of this process writes to `sys.stderr` from now on.

    Data that is written directly to `sys.stderr.buffer` or to the file descriptor is not censored.
    """
    if sys.stderr is not None:
        sys.stderr = _CensoredStream(outlived(sys.stderr))


@contextmanager
def censored_standard_error() -> Iterator[None]:
    """Hide values of the environment in all text that is written to `sys.stderr` in the block."""
    before = sys.stderr
    censor_standard_error()
    try:
        yield
    finally:
        sys.stderr = before
