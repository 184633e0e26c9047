"""Save the outputs for every example of a stream: Parquet, CSV, JSON lines or npz."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from emrun.arguments import check_names
from emrun.errors import ArgumentError, StreamError
from emrun.hook import AbstractHook
from emrun.hooks._columns import Column, column
from emrun.hooks._prediction_files import FILES, PredictionFile
from emrun.sources import length
from emrun.storage.files import check_guards, storing, written_aside
from emrun.wording import counted, did_you_mean, listed

_LOG = logging.getLogger(__name__)

ID, POSITION = "id", "position"


class SavePredictions(AbstractHook):
    """Writes a row for each example of a stream to a file, at each evaluation of the stream.

        hooks:
          - SavePredictions: {stream: valid, file: predictions.parquet}

    The ending of the file chooses the format: `.parquet` (needs pyarrow), `.csv`, `.jsonl` (a JSON object for each
    example) or `.npz` (an array for each variable). Values of several dimensions are lists in Parquet and JSON, and
    columns `logits.0`, `logits.1`, ... in CSV. Numbers keep all their digits; bfloat16 becomes float32.

    The first column says which example a row is: the source `id`, or, if the stream does not have it, `position`, which
    counts the examples of the stream from 0. Rows are written batch by batch, so that the memory does not grow. The
    file is complete or absent: it appears at the end of the stream, in place of that of the evaluation before.

    `emrun predict RUN_DIR STREAM -o FILE` uses this hook with a finished run.

    Args:
        stream: the stream. Batches that the model is trained on are not written.
        file: the file, relative to the run directory.
        variables: outputs and sources that are written; by default all outputs with one value for each example.

    Attributes:
        rows: the number of rows of the last file that was written.
        columns: the names of its columns.

    Raises:
        ArgumentError: `file` has another ending, or its directory does not exist.
        StreamError: a batch does not have one of `variables`, or the variable has no value for each example.
        HookError: the format cannot hold the values, such as lists of different lengths in CSV.
        MissingExtra: Parquet without pyarrow.
        StorageError: the file cannot be written.
    """

    reads = None  # whatever the outputs are, and `id`

    changes_batches = False

    def __init__(
        self,
        stream: str,
        file: str | Path,
        variables: Sequence[str] | None = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(output_dir=output_dir)
        if not isinstance(file, str | Path):
            raise ArgumentError("file", f"{file!r} is not the name of a file")
        self.path = Path(output_dir or ".") / file
        if self.path.suffix not in FILES:
            near = did_you_mean(self.path.suffix, FILES)
            message = f"the name {self.path.name!r} must end in {', '.join(FILES)}{near}"
            raise ArgumentError("file", message)
        if not self.path.parent.is_dir():
            raise ArgumentError("file", f"there is no directory {self.path.parent}")
        if self.path.is_dir():
            raise ArgumentError("file", f"{self.path} is a directory")
        if variables is not None:
            check_names("variables", variables)
        self.rows = 0
        self.columns: Sequence[str] = ()
        self._stream = stream
        self._variables = None if variables is None else list(dict.fromkeys(variables))
        self._names: list[str] = []  # of the variables that are written
        self._open: ExitStack | None = None
        self._file: PredictionFile | None = None
        self._count = 0

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Add the rows of a batch.

        Raises:
            StreamError: a variable is missing, or has no value for each example.
            HookError: the format cannot hold the values.
            StorageError: the file cannot be written.
        """
        if stream_name != self._stream or self.main_loop.training:
            return
        examples = self.main_loop.batch_length
        first = self._file is None
        if first:
            self._names = self._chosen(batch_data, examples)
        columns: dict[str, Column] = {}
        if ID not in batch_data:
            columns[POSITION] = np.arange(self._count, self._count + examples)
        elif ID not in self._names:
            columns[ID] = self._column(ID, batch_data, examples)
        for name in self._names:
            columns[name] = self._column(name, batch_data, examples)
        with storing(self.path, "write"):
            file = self._begin() if self._file is None else self._file
            file.add(columns)
        self._count += examples

    def after_stream(self, stream_name: str) -> None:
        """Complete the file at the end of an evaluation of the stream.

        Raises:
            StorageError: the file cannot be written.
        """
        if stream_name != self._stream or self.main_loop.training:
            return
        if self._file is None or self._open is None:
            self.rows = 0
            _LOG.warning("stream %r has no rows; %s is not written", stream_name, self.path)
            return
        file, opened = self._file, self._open
        self._file = self._open = None
        with storing(self.path, "write"), opened:
            file.finish()
        self.rows, self.columns, self._count = self._count, file.columns, 0
        _LOG.info("wrote %s of stream %r to %s", counted(self.rows, "row"), stream_name, self.path)

    def before_epoch(self, epoch_id: int) -> None:
        """Drop what an evaluation that was interrupted has left."""
        self._drop()

    def after_training(self, success: bool) -> None:
        """Drop an incomplete file."""
        self._drop()

    def _chosen(self, batch_data: Mapping[str, Any], examples: int) -> list[str]:
        """Return the names of the variables to write, from the first batch of a pass."""
        if self._variables is not None:
            return self._variables
        outputs = [name for name in batch_data if name in self._outputs(batch_data)]
        whole = [name for name in outputs if length(batch_data[name]) != examples]
        if whole:
            _LOG.info("SavePredictions leaves out %s: not a value for each example", listed(whole))
        names = [name for name in outputs if name not in whole]
        if not names:
            message = f"SavePredictions: no output has a value for each example (there is {listed(list(batch_data))})"
            raise StreamError(f"{message}; set `variables`", first_batch=True)
        return names

    def _outputs(self, batch_data: Mapping[str, Any]) -> list[str]:
        """Return the names in a batch that are not those of sources."""
        return [name for name in batch_data if name not in self._sources]

    def before_batch(self, stream_name: str, batch: Mapping[str, Any]) -> None:
        """Note which names are sources."""
        if self._file is None:
            self._sources = frozenset(batch)

    def _column(self, name: str, batch_data: Mapping[str, Any], examples: int) -> Column:
        if name not in batch_data:
            there = list(batch_data)
            message = f"SavePredictions: there is no output or source {name!r}{did_you_mean(name, there)}"
            raise StreamError(f"{message} (available: {listed(there)})", first_batch=not self._count)
        value = batch_data[name]
        found = length(value)
        if found != examples:
            has = "one value for the whole batch" if found < 0 else f"{found} values"
            message = f"SavePredictions: {name!r} has {has}, but the batch has {counted(examples, 'example')}"
            raise StreamError(message, first_batch=not self._count)
        try:
            return column(value)
        except (TypeError, ValueError) as error:
            message = f"SavePredictions cannot write {name!r}: {str(error).splitlines()[0]}"
            raise StreamError(message, first_batch=not self._count) from error

    def _begin(self) -> PredictionFile:
        check_guards(self.path)
        with ExitStack() as stack:
            fixed = self.path.with_name(f".{self.path.name}.tmp")  # which a run that was killed may have left
            aside = stack.enter_context(written_aside(self.path, None if self.main_loop.evaluating else fixed))
            self._file = FILES[self.path.suffix](aside)
            stack.callback(self._file.close)
            self._open = stack.pop_all()
        return self._file

    def _drop(self) -> None:
        opened, self._open, self._file, self._count = self._open, None, None, 0
        if opened is not None:
            _LOG.debug("%s was not completed", self.path)
            opened.__exit__(_Dropped, _Dropped(), None)


class _Dropped(Exception):
    """Ends the writing of a file that is not complete."""
