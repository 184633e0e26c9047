"""The file steps.jsonl: the values of every training step, in chunks of columns."""

from __future__ import annotations

import json
import logging
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emrun.epoch_data import numbers
from emrun.storage.files import opened_regular, storing
from emrun.storage.lines import Lines, read_lines

_LOG = logging.getLogger(__name__)

FORMAT = 1
KEYS = ("format", "from", "every")
"""The keys of a chunk that are not columns."""
ITERATION = "iteration"
"""The column that a chunk does not have, because the keys say it."""

_BEGINNING = re.compile(rb'\s*\{\s*"format":\s*(\d{1,18})[,}]')
_OWN = b'{"format": 1, "from": '
_BLOCK = 1 << 16  # bytes that are read of a line at once
_FLOATS = {float, type(None)}
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The values of some iterations.

    Args:
        first: the first iteration.
        every: the distance between two iterations.
        columns: name -> one number for each iteration; None where there is none.
    """

    first: int
    every: int
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        """Return the number of iterations."""
        return max(map(len, self.columns.values()), default=0)

    def line(self) -> str:
        """Return the chunk as a line of `steps.jsonl`, without its end."""
        keys = {"format": FORMAT, "from": self.first, "every": self.every}
        try:
            return json.dumps({**keys, **self.columns}, allow_nan=False)
        except ValueError:  # a value is not finite
            columns = {name: list(map(numbers, values)) for name, values in self.columns.items()}
            return json.dumps({**keys, **columns}, allow_nan=False)


def _is_chunk(**keys: Any) -> bool:
    """Return whether the keys of a chunk are valid: there may be a million chunks, so this is written for its speed."""
    first = keys["from"]
    every = keys["every"]
    return (
        type(first) is int
        and 1 <= first <= 10**12
        and type(every) is int
        and 1 <= every <= 10**9
        and type(keys["format"]) is int
        and keys["format"] == FORMAT
    )


def format_of(line: bytes) -> int | None:
    """Return the format number at the beginning of a line; None if the line does not begin like a chunk."""
    match = _BEGINNING.match(line)
    return int(match[1]) if match else None


def read_chunk(line: bytes | str) -> Chunk | None:
    """Return the chunk of a line of `steps.jsonl`; None if the line is damaged or not such a chunk.

    Args:
        line: the line.
    """
    try:
        content = json.loads(line)
        if type(content) is not dict or not _is_chunk(**{key: content.get(key) for key in KEYS}):
            return None
        columns = {
            name: values if type(values) is list and set(map(type, values)) <= _FLOATS else list(map(_number, values))
            for name, values in content.items()
            if name not in KEYS
        }
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    chunk = Chunk(content["from"], content["every"], columns)
    lengths = {len(values) for values in columns.values()}
    return chunk if lengths == {len(chunk) or 1} and ITERATION not in columns else None


def chunks_of(path: Path) -> Iterator[Chunk | str]:
    """Yield the chunks of a step record in their order; for a line that is left out, the reason.

    Args:
        path: the file.

    Raises:
        StorageError: the file cannot be read.
    """
    end = 0
    for number, line in enumerate(read_lines(path), start=1):
        chunk = read_chunk(line)
        if chunk is not None and chunk.first > end:
            yield chunk
            end = chunk.first + chunk.every * (len(chunk) - 1)
        elif chunk is not None:
            yield f"line {number} begins before the end of line {number - 1}; it is ignored"
        elif (version := format_of(line)) is not None and version > FORMAT:
            yield f"line {number} has format {version}, but this emrun reads {FORMAT}; ignored"
        else:
            yield f"line {number} is damaged or not a chunk of steps; it is ignored"


def _number(value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if type(value) is int or value in NOT_FINITE:
        return float(value)
    raise ValueError(value)


class StepsFile:
    """Appends chunks to `steps.jsonl`, and never changes a file that this run has not written.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.refusal: str | None = None
        """Why nothing is written: the file is not the step record of this run."""
        self._lines = Lines(path)
        self._is_known = False

    @property
    def position(self) -> tuple[int, str]:
        """The length of the file in bytes, and its SHA-256."""
        return self._lines.length, self._lines.digest

    def begin(self) -> None:
        """Check that the file, if there is one, is that of this run; log a warning if it is not."""
        if not self._is_known:
            self.refusal = self._not_ours(is_new=True)
        if self.refusal is not None:
            _LOG.warning(
                "%s %s: the file is left as it is, and the steps of this run are not recorded; move the file away, or "
                "set main_loop.record_steps: 0",
                self._lines.path,
                self.refusal,
            )
        self._is_known = True

    def append(self, chunk: Chunk) -> None:
        """Append a chunk, completely or not at all."""
        if self.refusal is None:
            self._lines.append(chunk.line())

    def rewind(self, length: int | None = 0, digest: str | None = None, end: int = 1) -> None:
        """Cut the file down to its content at a checkpoint; log a warning if this content was changed or lost.

        A file that is not a step record, or has lines of a newer format, is not changed; see `refusal`.

        Args:
            length: the length of the file at the checkpoint, in bytes; None if it is not known.
            digest: the SHA-256 of the file at the checkpoint, None if it is not known.
            end: the first iteration that was not in the file at the checkpoint.
        """
        self.refusal = self._not_ours()
        self._is_known = True
        if self.refusal is not None:
            return

        def is_wanted(line: bytes) -> bool:
            chunk = read_chunk(line)
            return line.endswith(b"\n") and (chunk is None or chunk.first < end)

        is_whole = self._lines.go_back_to(sys.maxsize if length is None else length, digest, is_wanted=is_wanted)
        if length is not None and not is_whole:
            _LOG.warning(
                "%s was changed since the checkpoint was saved; its complete lines are kept, and the next steps are "
                "appended; the training itself is not affected",
                self._lines.path,
            )

    def _not_ours(self, *, is_new: bool = False) -> str | None:
        """Return why the file is not one that this run may write; None if it may, or if there is no file."""
        with storing(self._lines.path, "read"), suppress(FileNotFoundError):
            status = self._lines.path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return "is not a regular file"
            if status.st_size:
                return "exists, but this run did not write it" if is_new else self._not_a_step_record()
        return None

    def _not_a_step_record(self) -> str | None:
        """Return why the file has other content than this emrun writes; None if it has not."""
        is_step_record = False
        with opened_regular(self._lines.path) as file:
            is_beginning = True
            while block := file.readline(_BLOCK):
                if is_beginning:
                    number = format_of(block)
                    if number is not None and number > FORMAT:
                        return f"has lines of format {number}, which a newer emrun wrote"
                    kept = block.rstrip(b"\0")  # a loss of power leaves zeros
                    is_step_record |= kept.startswith(_OWN) or _OWN.startswith(kept)
                is_beginning = block.endswith(b"\n")
        return None if is_step_record else "is not a step record"
