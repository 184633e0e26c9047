"""Save a column for each class: the logits or probabilities of every example of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emrun.hooks._shared.columns import Column, names_of_classes
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.rows import WritesRows


class LogitsToCsv(WritesRows):
    """Writes a row for each example of a stream, with a column for each class, at each evaluation of the stream.

        hooks:
          - LogitsToCsv: {variable: logits, stream: valid}

    The columns have the names of the classes. The first one says which example a row is, as in `SavePredictions`, which
    writes any number of variables; the file is complete or absent in the same way.

    Args:
        variable: the output, of shape (B, C), with a number for each class.
        stream: the stream. Batches that the model is trained on are not written.
        class_names: the names of the classes, in the order of their numbers; by default those of the dataset, or else
            0, 1, 2, ...
        id_variable: the source with the ids; by default `id`, or else the position in the stream.
        output_file: the file, relative to the run directory: `.csv`, `.parquet` or `.jsonl`.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have the stream, its names are not a list of names, or the format cannot hold
            the values.
        StreamError: a batch lacks a variable, or there is another number of classes than of names.
        StorageError: the file cannot be written.
    """

    def __init__(
        self,
        variable: str,
        stream: str,
        class_names: Sequence[str] | None = None,
        id_variable: str | None = None,
        output_file: str = "logits.csv",
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(stream, output_file, "output_file", id_variable, dataset, output_dir)
        self._variable = variable
        self._names = names_of_classes("class_names", class_names, dataset, variable)
        self._whose = "the dataset" if class_names is None else "class_names"

    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return a column for each class."""
        logits = examples.column(self._variable)
        if not isinstance(logits, np.ndarray) or logits.ndim != 2:
            has = f"the shape {logits.shape}" if isinstance(logits, np.ndarray) else "values of different shapes"
            raise examples.error(f"{self._variable!r} has {has}, not (examples, classes)")
        names = list(self._names or map(str, range(logits.shape[1])))
        if len(names) != logits.shape[1]:
            raise examples.error(
                f"{self._variable!r} has {logits.shape[1]} classes, shape {logits.shape}, but {self._whose} "
                f"has {len(names)} names; set class_names"
            )
        name, ids = examples.named(self._id)
        if name in names:
            raise examples.error(f"a class and the column with the ids are both called {name!r}; rename the class")
        return {name: ids} | {class_name: logits[:, index] for index, class_name in enumerate(names)}
