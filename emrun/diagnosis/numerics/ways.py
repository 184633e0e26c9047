"""The ways in which a step may be calculated give the same gradients: compiled, in 16 bits, in parts, recomputed."""

from __future__ import annotations

import torch

from emrun.base.types import Batch
from emrun.diagnosis.numerics.gradients import Step, difference
from emrun.diagnosis.numerics.rows import DIFFERS, LEFT_OUT, SAME, Row

WAYS = {
    "compile": "compiled and plain",
    "precision": "16 bits and float32",
    "micro_batch_size": "parts of a batch",
    "recompute": "recomputed activations",
}
"""Key of the model -> what is compared."""
_SAFETY = 4  # times the error of rounded weights: activations are rounded, too


def way(step: Step, key: str, batch: Batch) -> Row:
    """Compare the gradients of a batch with those that the model calculates without one of its `ways`.

    Raises:
        NotApplicableError: gradients cannot be taken.
        RandomError: with the same random states, the plain step gives other gradients each time.
    """
    model = step.model
    what = WAYS[key]
    if key not in model.ways.used:
        return Row(what, LEFT_OUT, f"the config does not have model.{key}")
    has_dropout = key == "recompute"  # which draws the same numbers again
    if has_dropout:
        with model.ways.without(WAYS):
            step.check_repeats(batch, dropout=True)
    with model.ways.without([name for name in WAYS if name != key]):
        gradients = step.measure(batch, dropout=has_dropout).gradients
    with model.ways.without(WAYS):
        plain = step.measure(batch, dropout=has_dropout).gradients
    differing = difference(plain, gradients, _bounds(step, batch) if key == "precision" else None)
    if differing is None:
        return Row(what, SAME)
    name, deviation = differing
    return Row(what, DIFFERS, f"{name} by {deviation:.2g}", name, deviation)


def _bounds(step: Step, batch: Batch) -> dict[str, float]:
    """Return the error that each gradient may have in 16 bits: that of a run in float64 with rounded weights."""
    ways = step.model.ways
    dtype = torch.float16 if step.model.precision == "fp16" else torch.bfloat16
    with ways.without(WAYS):
        with ways.in_float64():
            exact = step.measure(batch).gradients
        with ways.in_float64(dtype):
            rounded = step.measure(batch).gradients
    eps = torch.finfo(dtype).eps
    least = eps * eps * max(gradient.norm().item() for gradient in exact.values())
    return {
        name: _SAFETY * ((rounded[name] - gradient).norm().item() + eps * gradient.norm().item() + least)
        for name, gradient in exact.items()
    }
