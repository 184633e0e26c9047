"""Examples that are read one by one, and what to do with those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np

from emrun.base.arguments import check_choice
from emrun.base.errors import EmrunError, StreamError
from emrun.base.sources import ID, POSITION
from emrun.base.types import Batch, Named, Policy, Strings
from emrun.datasets._splits import Splits
from emrun.datasets._threads import in_order
from emrun.stream_context import Rows, StreamContext

Example = TypeVar("Example")


class ExampleReader:
    """Reads the examples of a batch one by one.

    Args:
        on_bad_example: `error` ends the stream at an example that cannot be read. `warn` and `ignore` leave the example
            out of its batch, and tell the context of the pass. A batch without any example is still yielded, because
            positions in a pass count batches.

    Raises:
        ArgumentError: `on_bad_example` has another value.
    """

    def __init__(self, on_bad_example: Policy) -> None:
        check_choice("on_bad_example", on_bad_example, Policy)
        self.skips = on_bad_example != "error"
        """Whether examples are left out."""

    def read(
        self,
        rows: Rows,
        ctx: StreamContext,
        read_one: Callable[[int, int], Example],
        name_one: Callable[[int], tuple[str, str]],
        *,
        alone: bool = False,
    ) -> list[Example]:
        """Return the examples of some rows, in the order of the rows, without those that were left out.

        Args:
            rows: the rows of a batch.
            ctx: the context of the pass.
            read_one: reads the example of a row; called with the row and its index in `rows`, by several threads. If
                it raises an error, the example is bad, except for emrun's own errors and errors of the operating
                system, such as a missing file. An error that is raised here comes after the last call has ended.
            name_one: returns the name of the example of a row, and where it is found, for messages.
            alone: whether the calling thread reads all rows.

        Raises:
            StreamError: an example cannot be read and is not left out.
        """
        found = []
        read = in_order(rows.tolist(), read_one, lambda error: not self.skips or _is_other(error), alone=alone)
        for row, example, error in read:
            if error is None:
                found.append(cast("Example", example))
            else:
                self.leave_out(error, row, *name_one(row), ctx)
        return found

    def leave_out(self, error: BaseException, row: int, name: str, where: str, ctx: StreamContext) -> None:
        """Leave out the example of a row, because of an error.

        Args:
            error: the error.
            row: the row.
            name: the name of the example.
            where: where it is found.
            ctx: the context of the pass.

        Raises:
            StreamError: examples are not left out, or the error is not about the example.
        """
        if not isinstance(error, Exception) or isinstance(error, EmrunError | MemoryError):
            error.add_note(f"while reading {where} (row {row})")
            raise error
        said = str(error) or type(error).__name__
        if not self.skips or _is_other(error):
            advice = "" if _is_other(error) else " (main_loop.on_bad_example: warn leaves such examples out)"
            message = f"stream {ctx.stream_name!r}: cannot read {where} (row {row}): {said}{advice}"
            raise StreamError(message) from error
        ctx.leave_out(printable(name), said)


def _is_other(error: BaseException) -> bool:
    """Return whether an error is not about the example: one of emrun, of memory, or of the operating system."""
    is_refusal = isinstance(error, OSError) and error.errno is not None
    return is_refusal or isinstance(error, EmrunError | MemoryError) or not isinstance(error, Exception)


class NamedSplits(Splits):
    """Streams whose batches have the names of the examples, `id`, and their numbers, `position`."""


def printable(name: str) -> str:
    """Return a name of a file or example with its bytes that are not UTF-8 escaped."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def with_names(batch: Batch, rows: Sequence[int], names: Strings) -> Named:
    """Return a batch with the names of its examples and their numbers, unless it has such sources of its own.

    Args:
        batch: the other sources.
        rows: the number of each example.
        names: the names of all examples; bytes that are not UTF-8 are escaped.
    """
    own = [printable(names[row]) for row in rows]
    return {**batch, ID: own, POSITION: np.array(rows, np.int64), **batch}
