"""Save the outputs for every example of a stream: Parquet, CSV or JSON lines."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_names
from emrun.base.errors import StreamError
from emrun.base.preparations import named_classes
from emrun.base.sources import POSITION, parts
from emrun.base.wording import listed
from emrun.dataset import classes_of
from emrun.hook import Loop
from emrun.hooks._shared.columns import Column
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.probabilities import Probabilities, probabilities_of, target_of
from emrun.hooks._shared.rows import WritesRows
from emrun.model import Target

_LOG = logging.getLogger(__name__)


class SavePredictions(WritesRows):
    """Writes a row for each example of a stream to a file, at each evaluation of the stream.

        hooks:
          - SavePredictions: {stream: valid, file: predictions.parquet}

    The ending of the file chooses the format: `.parquet` (needs pyarrow), `.csv` or `.jsonl` (a JSON object for each
    example); `emrun.predict` returns arrays. Values of several dimensions are lists in Parquet and JSON, and columns
    `logits.0`, `logits.1`, ... in CSV. Numbers keep all their digits; bfloat16 becomes float32. A mapping, and a list
    of mappings, such as the boxes and scores of each picture, has a column for each key: `found.boxes`, ...

    The first column says which example a row is: the source `id`, or, if the stream does not have it, `position`. This
    counts the examples of the stream from 0, as they come; with `emrun predict`, in the order of the rows of
    `ctx.batches`. So a stream that shuffles its evaluations needs a source `id`. If the stream has a source `position`
    of whole numbers, it is a column too: that of `ImageFolder` and `TarShards` counts the examples that were left out,
    too. Rows are written batch by batch, so that the memory does not grow. The file is complete or absent: it appears
    at the end of the stream, in place of that of the evaluation before.

    `emrun predict RUN_DIR STREAM -o FILE` uses this hook with a finished run.

    Args:
        stream: the stream. Batches that the model is trained on are not written.
        file: the file, relative to the run directory.
        variables: outputs and sources that are written; by default all outputs with one value for each example.
        classes: add a column `class`, the number of the class with the largest value in the output of shape (B, C), of
            several in `logits`, and `name`, its name, if the dataset has `classes_names`.
        probabilities: instead of the outputs, write `class` and `name`, and the probability of each class, in columns
            such as `probability.cat`. The loss tells which output is meant, and its form: softmax for
            `CrossEntropyLoss`, sigmoid for `BCEWithLogitsLoss`; with another loss, write `softmax` or `sigmoid`. With
            sigmoid, one output is the probability of the second of two classes, and several outputs exclude nothing,
            so that there is no `class`.

    Attributes:
        rows: the number of rows of the last file that was written.
        columns: the names of its columns.
        has_numbers: whether the stream numbers its examples itself, by a source `position`.

    Raises:
        ArgumentError: `file` has another ending, or its directory does not exist.
        StreamError: a batch does not have one of `variables`, or the variable has no value for each example.
        HookError: the dataset does not have the stream, no loss or more than one tells probabilities, or the format
            cannot hold the values, such as lists of different lengths in CSV.
        MissingExtra: Parquet without pyarrow.
        StorageError: the file cannot be written.
    """

    def __init__(
        self,
        stream: str,
        file: str | Path,
        variables: Sequence[str] | None = None,
        output_dir: str | Path | None = None,
        dataset: Any = None,
        classes: bool = False,
        probabilities: Probabilities = False,
    ) -> None:
        super().__init__(stream, file, "file", None, dataset, output_dir)
        if variables is not None:
            check_names("variables", variables)
        self._variables = None if variables is None else list(dict.fromkeys(variables))
        self._names: list[str] = []  # of the variables that are written
        self._has_classes = classes
        self._probabilities = probabilities
        self._target: Target | None = None  # what tells the classes, if a loss says it
        self.has_numbers = False

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the dataset has the stream, and that a loss tells probabilities, if they are written.

        Raises:
            HookError: a check failed.
        """
        super().register_mainloop(main_loop)
        if self._probabilities:
            self._target = target_of(main_loop.model.targets, self._probabilities, self._variables)

    def before_batch(self, stream_name: str, batch: Mapping[str, Any]) -> None:
        """Note which names are sources."""
        if not self._count:
            self._sources = frozenset(batch)

    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return a column for each variable."""
        names = self._variables
        if self._probabilities:
            names = names or []
        if names is None:
            names = [name for name in examples.batch if name not in self._sources]

        # the parts of mappings and of lists of mappings
        entries: list[dict[str, Any]] = []
        outputs: list[str] = []
        for name in names:
            if name in examples.batch and examples.have(name):
                entries.append(dict(parts({name: examples.batch[name]})))
                outputs += entries[-1]
            else:
                outputs.append(name)
        examples = replace(examples, batch=ChainMap(*entries, examples.batch))  # type: ignore[arg-type]
        if not examples.first:
            self._names = self._chosen(examples, outputs)

        # the columns
        name, ids = examples.named(None)
        columns = {name: ids}
        numbers = examples.numbers()
        self.has_numbers = numbers is not None
        if numbers is not None and not self._probabilities:
            columns[POSITION] = numbers
        columns |= {variable: examples.column(variable) for variable in self._names}
        added = self._classes(examples) if self._has_classes or self._probabilities else {}
        if twice := added.keys() & columns.keys():
            raise examples.error(f"classes: there is a variable {min(twice)!r} too; choose others with `variables`")
        return columns | added

    def _classes(self, examples: Examples) -> dict[str, Column]:
        """Return the column of the classes, that of their names, and their probabilities."""
        if self._target is None:
            known = named_classes(self.dataset)
            source = next(iter(known), "label") if isinstance(known, Mapping) and len(known) == 1 else "label"
            output = self._wide_output(examples)
        else:
            source = self._target.source or ""
            output = self._target.output
        values = np.asarray(examples.column(output))
        shares = None
        excludes = True  # whether an example has one class
        if self._probabilities:
            activation = str(self._probabilities) if self._target is None else self._target.activation
            excludes = activation == "softmax" or values.size == len(values)
            try:
                shares = probabilities_of(values, activation)
            except ValueError as error:
                raise examples.error(f"probabilities: {output!r}: {error}; -o FOLDER/ writes masks") from error
        wide = values if shares is None or activation == "softmax" else shares
        names = classes_of(self.dataset, source)
        if names is not None and len(names) != wide.shape[1]:
            count = f"{output!r} has {wide.shape[1]} classes"
            raise examples.error(f"classes: {count}, but the dataset has {len(names)} names")
        columns: dict[str, Column] = {}
        if excludes:
            columns["class"] = numbers = wide.argmax(axis=1)
            columns |= {} if names is None else {"name": [names[number] for number in numbers]}
        if shares is not None:
            labels = names or range(shares.shape[1])
            columns |= {f"probability.{label}": shares[:, index] for index, label in enumerate(labels)}
        return columns

    def _wide_output(self, examples: Examples) -> str:
        """Return the only output of shape (B, C), or of several `logits`."""
        outputs = {name: examples.batch[name] for name in examples.batch if name not in self._sources}
        wide = [name for name, output in outputs.items() if getattr(output, "ndim", 0) == 2 and output.shape[1] > 1]
        chosen = wide if len(wide) == 1 else [name for name in wide if name == "logits"]
        if not chosen:
            raise examples.error(
                f"classes: no output, or more than one, has the shape (B, C): {listed(wide) or 'none'}"
            )
        return chosen[0]

    def _chosen(self, examples: Examples, outputs: list[str]) -> list[str]:
        """Return the names of the variables to write, from the first batch of a pass."""
        if self._variables is not None or self._probabilities:
            return outputs
        left_out = {name: why for name in outputs if (why := self._obstacle(examples, name))}
        for name, why in left_out.items():
            _LOG.info("SavePredictions leaves out %s: %s", name, why)
        names = [name for name in outputs if name not in left_out]
        if not names:
            why = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items()) or "there is none"
            raise examples.error(f"no output can be a column ({why}); set `variables`")
        return names

    def _obstacle(self, examples: Examples, name: str) -> str:
        """Return why an output cannot be a column; an empty string if it can."""
        if not examples.have(name):
            return "not a value for each example"
        try:
            values = examples.column(name)
        except StreamError as error:
            return str(error).rpartition(f"{name!r}: ")[2]
        is_ragged = isinstance(values, list) and not all(isinstance(value, str) for value in values)
        if is_ragged and self.path.suffix == ".csv":
            return "only .parquet and .jsonl can hold lists of different lengths"
        return ""
