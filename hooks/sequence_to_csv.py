"""Save a row for each element of the sequences of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError
from emrun.hooks._shared.columns import Column
from emrun.hooks._shared.evaluations import needed
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.rows import WritesRows

_INDEX = "index"


class SequenceToCsv(WritesRows):
    """Writes a row for each element of each sequence of a stream, at each evaluation of the stream.

        hooks:
          - SequenceToCsv: {variables: [area, speed], stream: valid, pad_mask_variable: mask}

    The first column says which example a row is, as in `SavePredictions`; `index` counts the elements of the sequence
    from 0. Elements of several numbers have columns `area.0`, `area.1`, ... in CSV. The file is complete or absent: it
    appears at the end of the stream, in place of that of the evaluation before.

    Args:
        variables: outputs and sources with a sequence for each example, all of the same length for an example.
        stream: the stream. Batches that the model is trained on are not written.
        id_variable: the source with the ids; by default `id`, or else the position in the stream.
        pad_mask_variable: a source that is 0 or false for elements that are padding, which have no rows.
        output_file: the file, relative to the run directory: `.csv`, `.parquet` or `.jsonl`.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the dataset does not have the stream, or the format cannot hold the values.
        StreamError: a batch lacks a variable, a variable has no sequences, or they have different lengths.
        StorageError: the file cannot be written.
    """

    def __init__(
        self,
        variables: Sequence[str],
        stream: str,
        id_variable: str | None = None,
        pad_mask_variable: str | None = None,
        output_file: str = "sequences.csv",
        dataset: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(stream, output_file, "output_file", id_variable, dataset, output_dir)
        check_names("variables", variables)
        reserved = next((name for name in variables if name in (_INDEX, id_variable)), None)
        if not variables or reserved is not None:
            why = "name at least one variable" if reserved is None else f"{reserved!r} is the name of another column"
            raise ArgumentError("variables", why)
        self._variables = list(dict.fromkeys(variables))
        self._mask = pad_mask_variable

    def rows_of(self, examples: Examples) -> Mapping[str, Column]:
        """Return the columns of all elements that are not padding."""
        name, ids = examples.named(self._id)
        if name in self._variables:
            raise examples.error(f"the column with the ids and a sequence are both called {name!r}")
        values = {variable: _sequences(examples, variable) for variable in needed(*self._variables, self._mask)}
        first = self._variables[0]
        for other, sequences in values.items():
            for row, (one, another) in enumerate(zip(values[first], sequences, strict=True)):
                if len(one) != len(another):
                    raise examples.error(
                        f"of the example whose {name} is {ids[row]}, {first!r} has {len(one)} elements, and "
                        f"{other!r} {len(another)}"
                    )
        if self._mask is None:
            kept = [np.arange(len(sequence)) for sequence in values[first]]
        else:
            kept = [np.flatnonzero(mask) for mask in values[self._mask]]
        repeated = np.repeat(np.arange(examples.count), list(map(len, kept)))
        columns: dict[str, Column] = {
            name: ids[repeated] if isinstance(ids, np.ndarray) else [ids[row] for row in repeated],
            _INDEX: np.concatenate(kept),
        }
        for variable in self._variables:
            columns[variable] = _joined([_at(*pair) for pair in zip(values[variable], kept, strict=True)])
        return columns


def _sequences(examples: Examples, name: str) -> list[Any]:
    """Return the sequence of each example: an array with an axis, or a list."""
    values = list(examples.column(name))
    if any(
        isinstance(value, str) or (isinstance(value, np.ndarray | np.generic) and not value.ndim) for value in values
    ):
        raise examples.error(f"{name!r} is not a sequence for each example")
    return values


def _at(values: Any, where: np.ndarray[Any, Any]) -> Any:
    return values[where] if isinstance(values, np.ndarray) else [values[index] for index in where]


def _joined(parts: list[Any]) -> Column:
    """Return sequences, one after another."""
    filled = [part for part in parts if len(part)] or parts[:1]  # an empty list has no dtype of its own
    is_array = all(isinstance(part, np.ndarray) for part in filled)
    if is_array and len({part.shape[1:] for part in filled}) == 1:
        return np.concatenate(filled)
    return [element for part in filled for element in part]
