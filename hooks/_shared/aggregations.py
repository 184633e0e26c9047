"""Read which aggregations of which variables are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from emrun.base.errors import ArgumentError
from emrun.base.types import VariableName
from emrun.base.wording import did_you_mean
from emrun.epoch_data import RUNNING

ByVariable = Mapping[VariableName, str | Sequence[str]]
"""Variable -> its aggregation, or a list of its aggregations."""


def read(variables: Any, more: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Return variable -> its aggregations, from a list of names and mappings, or a mapping.

    Args:
        variables: the argument.
        more: aggregations that are allowed beside those of `RunningStats`.

    Raises:
        ArgumentError: the argument has another form, or an aggregation is unknown.
    """
    if isinstance(variables, str) or not isinstance(variables, Sequence | Mapping) or not variables:
        raise ArgumentError(
            "variables", f"{variables!r} is not a list of variables such as [loss, {{accuracy: [mean, std]}}]"
        )
    aggregations: dict[str, list[str]] = {}
    entries = [variables] if isinstance(variables, Mapping) else variables
    for entry in entries:
        pairs = entry.items() if isinstance(entry, Mapping) else [(entry, ["mean"])]
        for name, wanted in pairs:
            names = [wanted] if isinstance(wanted, str) else wanted
            if not isinstance(name, str) or not isinstance(names, Sequence) or not names:
                raise ArgumentError("variables", f"{entry!r} is neither a name nor {{name: [aggregation, ...]}}")
            for aggregation in names:
                _check_aggregation(aggregation, (*RUNNING, *more))
            aggregations.setdefault(name, []).extend(
                aggregation for aggregation in names if aggregation not in aggregations.get(name, [])
            )
    return aggregations


def _check_aggregation(name: Any, known: tuple[str, ...]) -> None:
    if name in known:
        return
    function = getattr(np, name, None) if isinstance(name, str) else None
    try:
        usable = callable(function) and isinstance(function(np.array([1.0, 2.0])), Real | np.bool_)
    except Exception:  # a function that fails on two numbers, with whatever error, is not an aggregation
        usable = False
    if not usable:
        hint = did_you_mean(str(name), known)
        allowed = ", ".join(known)
        raise ArgumentError(
            "variables",
            f"{name!r} is not an aggregation{hint} (allowed: {allowed}, or a NumPy function such as median)",
        )
