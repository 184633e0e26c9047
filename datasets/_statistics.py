"""Statistics of the train rows, as scikit-learn calculates them: values that fill gaps, and scales of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

import numpy as np

from emrun.base.errors import ArgumentError
from emrun.base.types import Json
from emrun.stream_context import Array

FillBy = Literal["median", "most_frequent"]
Normalize = Literal["standard", "minmax", "robust", "log"]


class FillForm(TypedDict):
    """A value that the train rows tell, in the argument `fill` of a config."""

    by: FillBy


def value_of(by: FillBy, values: Array, key: str, where: str) -> Any:
    """Return what fills the gaps of a column.

    Args:
        by: the statistic.
        values: the values of the train rows, without gaps.
        key: the argument, for messages.
        where: the file and the column, for messages.

    Raises:
        ArgumentError: there are no values, or a median of texts is asked for.
    """
    if not len(values):
        raise ArgumentError(key, f"{where} has no values in the train rows; write a value, or leave the column out")
    if by == "median":
        if values.dtype.kind not in "iuf":
            raise ArgumentError(key, f"{where} has no numbers, so no median; write by: most_frequent")
        return float(np.median(values.astype(np.float64)))
    found, counts = np.unique(values, return_counts=True)
    return found[np.argmax(counts)].item()


def scale_of(by: Normalize, columns: Iterable[tuple[str, Array]], where: str) -> Json:
    """Return how a source is scaled, column by column; NaN is ignored.

    Args:
        by: `standard` for mean 0 and deviation 1, `minmax` for 0 to 1, `robust` for median 0 and quartiles 1 apart, or
            `log` for the natural logarithm.
        columns: the name and the values of each column in the train rows, float64 of shape (N,).
        where: the file, for messages.

    Raises:
        ArgumentError: a column is constant.
    """
    shifts: list[float] = []
    scales: list[float] = []
    if by == "log":
        return {"by": by, "shift": shifts, "scale": scales}
    for name, values in columns:
        own = values[~np.isnan(values)] if not np.isnan(values).all() else np.zeros(1)
        shift = own.min()
        span = own.max() - shift
        scale = span
        if by == "standard":
            shift = own.mean()
            scale = own.std()
        elif by == "robust":
            quartiles = np.quantile(own, [0.25, 0.5, 0.75])
            shift = quartiles[1]
            scale = quartiles[2] - quartiles[0]
        if not span or not 0 < scale < np.inf:
            what = f"no {by} scale for its values" if span else f"the value {own[0]:g} only"
            advice = "leave the column out, or the source out of `normalize`"
            raise ArgumentError("normalize", f"{where}: column {name!r} has {what} in the train rows; {advice}")
        shifts.append(float(shift))
        scales.append(float(scale))
    return {"by": by, "shift": shifts, "scale": scales}


def scaled(values: Array, scale: Json, refuse: Callable[[int, str], Exception]) -> Array:
    """Return numbers of shape (N,) or (N, k), scaled, in their own type; whole numbers become float32.

    Args:
        values: the numbers.
        scale: what `scale_of` has returned.
        refuse: returns the error for a row without a logarithm.

    Raises:
        ArgumentError: a number has no logarithm.
    """
    dtype = values.dtype if values.dtype.kind == "f" else np.dtype(np.float32)
    exact = values.astype(np.float64)
    if scale["by"] == "log":
        if (exact <= 0).any():
            row = int(np.argmax((exact <= 0).reshape(len(exact), -1).any(axis=1)))
            raise refuse(row, f"{exact[row]} has no logarithm; write another form in `normalize`, or values above 0")
        return np.asarray(np.log(exact), dtype)
    shift = np.reshape(scale["shift"], values.shape[1:])
    return np.asarray((exact - shift) / np.reshape(scale["scale"], values.shape[1:]), dtype)
