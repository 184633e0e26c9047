"""What the figures of a look mean: which layers have which fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from emrun.hooks._diagnose.look import Activations, Change
from emrun.hooks._diagnose.verdicts import Finding

_SMALL = 1e-6  # cs231n.github.io/neural-networks-3: "somewhere around 1e-3", here with wide bounds
_LARGE = 0.1
_SETTLED = 20  # updates after which their size is judged: weights that begin at 0 change much before
_ROUNDING = 1e-6  # differences between examples, relative to the values, that are not differences


def findings(seen: Activations, changes: Sequence[Change], update: int, loss: Any) -> list[Finding]:
    """Return what a look has found, and where it has looked without finding anything; waits for the device.

    Args:
        seen: what the layers have returned.
        changes: what the update has done.
        update: the number of the update.
        loss: what was minimised in the last batch; None if it is not known.
    """
    layers = [layer for layer, *_ in seen.finite]
    outputs = seen.outputs or dict([seen.last] if seen.last is not None else [])
    loss, ends, ranges, norms = _read(
        (
            loss,
            [(low, high) for _, low, high in seen.finite],
            [((high - low).amax(), low.amin(), high.amax()) for low, high in outputs.values()],
            [(change.gradient, change.step, change.size) for change in changes],
        )
    )
    judgements = _not_finite(layers, ends, loss)
    if outputs:
        judgements.append(_same(list(outputs), ranges))
    for change, figures in zip(changes, norms, strict=True):
        judgements += _changed(change, figures, loss, is_settled=update >= _SETTLED)
    return judgements


def _not_finite(layers: Sequence[str], ends: Sequence[tuple[float, float]], loss: float | None) -> list[Finding]:
    """Judge whether layers return finite values; only the first one that does not is named."""
    by_layer: dict[str, Finding] = {}
    for layer, (low, high) in zip(layers, ends, strict=True):
        is_mask = low == -math.inf and math.isfinite(high) and loss is not None and math.isfinite(loss)
        is_so = not is_mask and not (math.isfinite(low) and math.isfinite(high))
        by_layer[layer] = ("not_finite", layer, is_so, [low, high])
        if is_so:
            break
    return list(by_layer.values())


def _same(outputs: Sequence[str], ranges: Sequence[tuple[float, float, float]]) -> Finding:
    """Judge whether the outputs differ between examples; one that does is enough."""
    spreads = [spread for spread, _, _ in ranges]
    sizes = [max(abs(low), abs(high)) for _, low, high in ranges]
    is_so = all(spread <= _ROUNDING * size for spread, size in zip(spreads, sizes, strict=True))
    return ("same_output", ", ".join(outputs), is_so, [max(spreads), max(sizes)])


def _changed(change: Change, figures: Any, loss: float | None, *, is_settled: bool) -> list[Finding]:
    """Judge the gradient of a parameter and its update; the figures are those of `Change` as numbers."""
    gradient, step, size = figures
    name = change.name
    judgements: list[Finding] = []
    is_planned = gradient == 0 and not change.is_full  # what begins at 0 stays there in a warm-up from 0
    if (loss is None or abs(loss) > 0) and not is_planned:  # with 0 or none (NaN), the batch has nothing to learn
        judgements.append(("no_gradient", name, not gradient, gradient))
    is_due = change.is_full and bool(gradient)  # a change is expected
    if step > 0 or is_due:
        judgements.append(("never_moves", name, step == 0, change.rate))
    if size and is_settled and step > 0:
        ratio = step / size
        judgements.append(("large_update", name, ratio > _LARGE, ratio))
        if ratio >= _SMALL or is_due:
            judgements.append(("small_update", name, ratio < _SMALL, ratio))
    return judgements


def _read(figures: Any) -> Any:
    """Return figures with numbers instead of tensors with one element; waits once for each device and dtype."""
    leaves, form = tree_flatten(figures)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            places.setdefault((leaf.device, leaf.dtype), []).append(index)
    for indices in places.values():
        values = torch.stack([leaves[index].detach().reshape(()) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            leaves[index] = value
    return tree_unflatten(leaves, form)
