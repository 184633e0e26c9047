"""Save the outputs for every example of a stream: Parquet, CSV, JSON lines or npz."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emrun.base.arguments import check_names
from emrun.base.sources import POSITION
from emrun.base.wording import listed
from emrun.hooks._parts.columns import Column
from emrun.hooks._parts.examples import Examples
from emrun.hooks._parts.rows import WritesRows

_LOG = logging.getLogger(__name__)


class SavePredictions(WritesRows):
    """Writes a row for each example of a stream to a file, at each evaluation of the stream.

        hooks:
          - SavePredictions: {stream: valid, file: predictions.parquet}

    The ending of the file chooses the format: `.parquet` (needs pyarrow), `.csv`, `.jsonl` (a JSON object for each
    example) or `.npz` (an array for each variable). Values of several dimensions are lists in Parquet and JSON, and
    columns `logits.0`, `logits.1`, ... in CSV. Numbers keep all their digits; bfloat16 becomes float32.

    The first column says which example a row is: the source `id`, or, if the stream does not have it, `position`, which
    counts the examples of the stream from 0. If the stream has a source `position` of whole numbers, it is a column
    too: that of `ImageFolder` and `TarShards` counts the examples that were left out. Rows are written batch by batch,
    so that the memory does not grow. The file is complete or absent: it appears at the end of the stream, in place of
    that of the evaluation before.

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
        HookError: the dataset does not have the stream, or the format cannot hold the values, such as lists of
            different lengths in CSV.
        MissingExtra: Parquet without pyarrow.
        StorageError: the file cannot be written.
    """

    def __init__(
        self,
        stream: str,
        file: str | Path,
        variables: Sequence[str] | None = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(stream, file, "file", None, None, output_dir)
        if variables is not None:
            check_names("variables", variables)
        self._variables = None if variables is None else list(dict.fromkeys(variables))
        self._names: list[str] = []  # of the variables that are written

    def before_batch(self, stream_name: str, batch: Mapping[str, Any]) -> None:
        """Note which names are sources."""
        if not self._count:
            self._sources = frozenset(batch)

    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return a column for each variable."""
        if not examples.first:
            self._names = self._chosen(examples)
        name, ids = examples.named(None)
        columns = {name: ids}
        if (numbers := examples.numbers()) is not None:
            columns[POSITION] = numbers
        return columns | {each: examples.column(each) for each in self._names}

    def _chosen(self, examples: Examples) -> list[str]:
        """Return the names of the variables to write, from the first batch of a pass."""
        if self._variables is not None:
            return self._variables
        outputs = [name for name in examples.batch if name not in self._sources]
        whole = [name for name in outputs if not examples.have(name)]
        if whole:
            _LOG.info("SavePredictions leaves out %s: not a value for each example", listed(whole))
        names = [name for name in outputs if name not in whole]
        if not names:
            there = listed(list(examples.batch))
            raise examples.error(f"no output has a value for each example (there is {there}); set `variables`")
        return names
