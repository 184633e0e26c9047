"""Reading the step record of a run as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emrun.base.arguments import expanded
from emrun.base.errors import UsageError
from emrun.record.rows import Reader
from emrun.record.steps import ITERATION
from emrun.storage.run import STEPS, holds_run, no_run
from emrun.storage.trace import TRACE


def read_steps(run: str | Path) -> dict[str, NDArray[Any]]:
    """Return the values of every training step that a run has recorded.

        steps = emrun.read_steps("log/digits_20261120-210301")
        plt.plot(steps["iteration"], steps["loss"])

    The first 100,000 iterations are all there, then every 10th, and from 1,000,000 on every 100th. While the run is
    being trained, up to 1,000 iterations at the end are missing.

    Args:
        run: the run directory.

    Returns:
        Column -> array of shape (steps,): `iteration` (int64), counted from 1, and the values (float64): `loss`, the
        scalar that was minimised; `learning_rate`, and `learning_rate_1`, `learning_rate_2`, ... for further parameter
        groups; and what hooks have added with `main_loop.record`. A step without a value has NaN. Without a step
        record, `iteration` is empty and the only column. Lines that cannot be read are left out with a warning.

    Raises:
        UsageError: there is no such run.
        StorageError: the file cannot be read.
    """
    directory = expanded(run)
    if not holds_run(directory):
        raise no_run(directory)
    if not any((directory / name).exists() for name in (TRACE, STEPS)):  # of a project, perhaps
        raise UsageError(f"{directory} is not a run directory: it has neither {TRACE} nor {STEPS}")
    chunks = list(Reader(directory).steps())
    names = dict.fromkeys(name for chunk in chunks for name in chunk.columns)
    empty = np.empty(0, np.int64)
    iterations = [chunk.first + chunk.every * np.arange(len(chunk), dtype=np.int64) for chunk in chunks]
    columns: dict[str, NDArray[Any]] = {ITERATION: np.concatenate([empty, *iterations])}
    for name in names:
        columns[name] = np.concatenate(
            [np.array(chunk.columns.get(name, [None] * len(chunk)), np.float64) for chunk in chunks]
        )
    return columns
