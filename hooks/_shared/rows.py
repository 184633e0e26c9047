"""Hooks that write rows for the examples of a stream to a file, at each evaluation of the stream."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError
from emrun.base.wording import counted, did_you_mean, from_here
from emrun.hooks._shared.aside import Aside
from emrun.hooks._shared.columns import Column
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.prediction_files import FILES, PredictionFile
from emrun.hooks._shared.streams import OfStreams
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)


class WritesRows(OfStreams):
    """Writes rows to a file at each evaluation of a stream; the file is complete or absent.

    Rows are written batch by batch, so that the memory does not grow. Batches that the model is trained on are not
    written.

    Args:
        stream: the stream.
        file: the file, relative to the run directory; its ending chooses the format.
        argument: the argument with the file, for messages.
        id_variable: the source that says which example a row is; None for `id`, or else the position in the stream.
        dataset: the dataset.
        output_dir: the run directory.

    Raises:
        ArgumentError: the file has another ending, or its directory does not exist.
        HookError: the dataset does not have the stream.
        MissingExtra: Parquet without pyarrow.
    """

    changes_batches = False

    def __init__(
        self,
        stream: str,
        file: str | Path,
        argument: str,
        id_variable: str | None,
        dataset: Any,
        output_dir: str | Path | None,
    ) -> None:
        if not isinstance(stream, str):
            raise ArgumentError("stream", f"{stream!r} is not the name of a stream")
        super().__init__([stream], dataset=dataset, output_dir=output_dir)
        if not isinstance(file, str | Path):
            raise ArgumentError(argument, f"{file!r} is not the name of a file")
        self.path = Path(output_dir or ".") / file
        self.files = (Path(file).as_posix(),)
        if self.path.suffix not in FILES:
            near = did_you_mean(self.path.suffix, FILES)
            message = f"the name {self.path.name!r} must end in {', '.join(FILES)}{near}; emrun.predict returns arrays"
            raise ArgumentError(argument, message)
        FILES[self.path.suffix].library()  # fails before the training
        if not self.path.parent.is_dir():
            raise ArgumentError(argument, f"there is no directory {from_here(self.path.parent)}; create it first")
        if self.path.is_dir():
            raise ArgumentError(argument, f"{from_here(self.path)} is a directory")
        self.rows = 0
        self.columns: Sequence[str] = ()
        self._stream = stream
        self._id = id_variable
        self._aside = Aside(self.path)
        self._file: PredictionFile | None = None
        self._count = self._written = 0  # examples, rows

    @abstractmethod
    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return the columns of a batch, all of the same length.

        Raises:
            StreamError: a variable is missing, or its values cannot be written.
        """

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the rows of a batch.

        Raises:
            StreamError: a variable is missing, or has no value for each example.
            HookError: the format cannot hold the values.
            StorageError: the file cannot be written.
        """
        if stream_name != self._stream or self.main_loop.training:
            return
        examples = Examples(type(self).__name__, batch_data, self.main_loop.batch_length, self._count)
        columns = self.rows_of(examples)
        rows = len(next(iter(columns.values())))
        self._count += examples.count
        self._written += rows
        if rows:
            self.write(columns)

    def write(self, columns: Mapping[str, Column]) -> None:
        """Write the rows of a batch."""
        with storing(self.path, "write"):
            file = self._begin() if self._file is None else self._file
            file.add(columns)

    def after_stream(self, stream_name: str) -> None:
        """Complete the file at the end of an evaluation of the stream.

        Raises:
            StorageError: the file cannot be written.
        """
        if stream_name != self._stream or self.main_loop.training:
            return
        file = self._file
        if file is None:
            self.rows = self._count = 0
            _LOG.warning("stream %r has no rows; %s is not written", stream_name, from_here(self.path))
            return
        with storing(self.path, "write"):
            try:
                file.close()
                self._aside.finish()
            finally:
                self.rows = self._written
                self.columns = file.columns
                self._drop()
        rows = counted(self.rows, "row")
        once = {"once": f"{stream_name} {self.path}"}
        _LOG.info("wrote %s of stream %r to %s", rows, stream_name, from_here(self.path), extra=once)

    def before_epoch(self, epoch_id: int) -> None:
        """Drop what an evaluation that was interrupted has left."""
        self._drop()

    def after_training(self, success: bool) -> None:
        """Drop an incomplete file."""
        self._drop()

    def _begin(self) -> PredictionFile:
        path = self._aside.begin(by_one_process=not self.main_loop.evaluating)  # `predict` may run twice
        try:
            self._file = FILES[self.path.suffix](path, type(self).__name__)
        except BaseException:
            self._aside.drop()
            raise
        return self._file

    def _drop(self) -> None:
        file = self._file
        self._file = None
        self._count = 0
        self._written = 0
        if file is not None:
            with suppress(Exception):  # the file is dropped
                file.close()
        self._aside.drop()
