"""Examples that are read one by one, and what to do with those that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np

from emrun.base.arguments import check_choice
from emrun.base.errors import EmrunError, StreamError
from emrun.base.sources import ID, POSITION
from emrun.datasets._splits import Part, Splits
from emrun.datasets._threads import in_order
from emrun.stream_context import Rows, StreamContext

_LOG = logging.getLogger(__name__)
_TOLD_ONE_BY_ONE = 3

OnBadExample = Literal["error", "skip"]
"""What to do with an example that cannot be read."""

Example = TypeVar("Example")
Read = TypeVar("Read")


class ExampleReader:
    """Reads the examples of a batch one by one.

    Args:
        on_bad_example: `error` ends the stream at an example that cannot be read. `skip` leaves the example out of its
            batch, with a warning for the first few examples of each stream, and logs their number at the end of each
            pass; the file of the log has all their names. A batch without any example is still yielded, because
            positions in a pass count batches.

    Raises:
        ArgumentError: `on_bad_example` has another value.
    """

    def __init__(self, on_bad_example: OnBadExample) -> None:
        check_choice("on_bad_example", on_bad_example, OnBadExample)
        self._skips = on_bad_example == "skip"
        self.left_out: dict[str, int] = {}
        """Stream -> number of examples that were left out, over all passes."""
        self._read: dict[str, int] = {}
        self._had_empty: set[str] = set()
        self._named: dict[str, dict[str, bool]] = {}  # stream -> examples that were left out; whether the log has them

    def read(
        self, rows: Rows, ctx: StreamContext, read_one: Callable[[int, int], Example], name_one: Callable[[int], str]
    ) -> list[Example]:
        """Return the examples of some rows, in the order of the rows, without those that were left out.

        Args:
            rows: the rows of a batch.
            ctx: the context of the pass.
            read_one: reads the example of a row; called with the row and its index in `rows`, by several threads. If
                it raises an error, the example is bad, except for emrun's own errors and errors of the operating
                system, such as a missing file. An error that is raised here comes after the last call has ended.
            name_one: returns where the example of a row is found, for messages.

        Raises:
            StreamError: an example cannot be read and is not left out.
        """
        stream = ctx.stream_name
        found = []
        for row, example, error in in_order(rows.tolist(), read_one, lambda error: not self._skips or _is_other(error)):
            if error is None:
                found.append(cast("Example", example))
                continue
            if not isinstance(error, Exception) or isinstance(error, EmrunError | MemoryError):
                error.add_note(f"while reading {name_one(row)} (row {row})")
                raise error
            name, said = name_one(row), str(error) or type(error).__name__
            if not self._skips or _is_other(error):
                advice = "" if _is_other(error) else " (on_bad_example: skip leaves such examples out)"
                raise StreamError(f"stream {stream!r}: cannot read {name} (row {row}): {said}{advice}") from error
            self.left_out[stream] = self.left_out.get(stream, 0) + 1
            self._named.setdefault(stream, {}).setdefault(f"{name}: {said}", False)
            if self.left_out[stream] <= _TOLD_ONE_BY_ONE:
                _LOG.warning("stream %r: left out %s: %s", stream, name, said)
        self._read[stream] = self._read.get(stream, 0) + len(rows)
        if not found and stream not in self._had_empty:
            self._had_empty.add(stream)
            _LOG.warning(
                "stream %r: all %d examples of a batch were left out, so the batch is empty; set "
                "`main_loop.on_empty_batch` to `warn` or `ignore` to skip such batches, or use a larger batch_size",
                stream,
                len(rows),
            )
        return found

    def counted(self, batches: Iterable[Read], ctx: StreamContext) -> Iterator[Read]:
        """Yield the batches of a pass; at its end, log how many examples were left out, and the names of new ones."""
        stream = ctx.stream_name
        read, left_out = self._read.get(stream, 0), self.left_out.get(stream, 0)
        yield from batches
        named = self._named.get(stream, {})
        names = [name for name, is_told in named.items() if not is_told]
        self._named[stream] = dict.fromkeys(named, True)
        if self.left_out.get(stream, 0) > left_out:
            _LOG.warning(
                "left out %d of %d examples of stream %r",
                self.left_out[stream] - left_out,
                self._read[stream] - read,
                stream,
                extra={"names": names},
            )


def _is_other(error: BaseException) -> bool:
    """Return whether an error is not about the example: one of emrun, of memory, or of the operating system."""
    is_refusal = isinstance(error, OSError) and error.errno is not None
    return is_refusal or isinstance(error, EmrunError | MemoryError) or not isinstance(error, Exception)


class NamedSplits(Splits):
    """Streams whose parts read with one `ExampleReader`, and say which examples are in a batch.

    Args:
        reader: the reader.
        parts: stream -> its part; `train` is one of them.
        batch_size: the number of examples in a batch.
    """

    def __init__(self, reader: ExampleReader, parts: Mapping[str, Part], batch_size: int) -> None:
        self._reader = reader
        super().__init__(parts["train"], parts.get("valid"), parts.get("test"), batch_size=batch_size)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Stream -> number of examples that were left out, over all passes."""
        return self._reader.left_out

    def _read(self, name: str, ctx: StreamContext) -> Iterator[Mapping[str, Any]]:
        return self._reader.counted(super()._read(name, ctx), ctx)


def with_names(batch: Mapping[str, Any], rows: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Return a batch with the names of its examples and their numbers, unless it has such sources of its own.

    Args:
        batch: the other sources.
        rows: the number of each example.
        names: the names of all examples; bytes that are not UTF-8 are escaped.
    """
    own = [names[row].encode(errors="surrogateescape").decode(errors="backslashreplace") for row in rows]
    return {**batch, ID: own, POSITION: np.array(rows, np.int64), **batch}
