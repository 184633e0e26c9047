"""The outputs of a model as probabilities, by what its losses say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from emrun.base.errors import HookError
from emrun.base.wording import listed
from emrun.model import Target

Probabilities = bool | Literal["softmax", "sigmoid"]
"""Whether there are probabilities, by the loss, or by a function that is named."""


def target_of(
    targets: Sequence[Target], probabilities: Probabilities, variables: Collection[str] | None
) -> Target | None:
    """Return the target whose output tells the classes; None if only a batch shows the output.

    Args:
        targets: those of the model.
        probabilities: True for what the loss says, or a function.
        variables: the outputs that count; None for all.

    Raises:
        HookError: no loss, or more than one, tells probabilities.
    """
    is_named = probabilities is not True
    found = [each for each in targets if variables is None or each.output in variables]
    found = [each for each in found if is_named or each.activation]
    outputs = list(dict.fromkeys(each.output for each in found))
    if len(outputs) > 1:
        what = f"losses compare several outputs, {listed(outputs)}"
        raise HookError(f"probabilities: {what}; choose one by `variables`, as in --variables {outputs[0]}")
    if not outputs and not is_named:
        known = listed([each.loss for each in targets])
        what = f"no loss of the model says how an output becomes probabilities (there is {known})"
        advice = "write softmax or sigmoid, as in --probabilities softmax; without, the outputs are written"
        raise HookError(f"probabilities: {what}; {advice}")
    if not found:
        return None
    first = found[0]
    return Target(first.loss, first.output, first.source, str(probabilities)) if is_named else first


def probabilities_of(values: np.ndarray[Any, Any], activation: str | None) -> np.ndarray[Any, Any]:
    """Return the probabilities of the classes, float32 of shape (B, C).

    Args:
        values: an output of shape (B, C), or of shape (B,) or (B, 1), which tells the second of two classes.
        activation: see `Target`.

    Raises:
        ValueError: the output has another shape.
    """
    is_single = activation != "softmax" and values.size == len(values)
    if not is_single and (values.ndim != 2 or values.shape[1] < 2):
        raise ValueError(f"{activation} needs a number for each class, (B, C), but the shape is {values.shape}")
    exact = values.astype(np.float64)
    if activation == "softmax":
        exact = np.exp(exact - exact.max(axis=1, keepdims=True))
        exact = exact / exact.sum(axis=1, keepdims=True)
    elif activation == "sigmoid":
        exact = np.exp(-np.logaddexp(0, -exact))
    if is_single:
        exact = exact.reshape(-1)
        exact = np.stack([1 - exact, exact], axis=1)
    return exact.astype(np.float32)
